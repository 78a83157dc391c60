"""A rank's copies to host memory: bit for bit, nothing beside them touched, and a failure is reported, not raised."""

from __future__ import annotations

import threading

import pytest
import torch
from conditions import PATIENCE_S

from disagg.core.config.groups import DecodeConfig, PrefillConfig
from disagg.core.types import KVLayout, RequestKey
from disagg.kv import host_slabs
from disagg.kv.host_pool import block_bytes
from disagg.kv.host_slabs import HostSlabs
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.transfer_pools import TransferPools
from disagg.node.plan import StepPlan, Swap, Work
from disagg.node.swap import AUTOMATIC_BYTES, Swapper, page_bytes, swap_bytes

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
PAGE, PAGES, HEADS, LAYERS = 4, 20, 3, 2
KEY = RequestKey("r")


class Done:
    """Collects the reports of a swapper, and waits for them."""

    def __init__(self) -> None:
        self.reported: list[tuple[Swap, str]] = []
        self._one = threading.Semaphore(0)

    def __call__(self, swap: Swap, seconds: float, error: str) -> None:
        assert seconds >= 0
        self.reported.append((swap, error))
        self._one.release()

    def wait(self) -> str:
        assert self._one.acquire(timeout=PATIENCE_S)
        return self.reported[-1][1]


def make(dtype: torch.dtype, device: str, blocks: int = 8) -> tuple[Swapper, Done, MHATokenToKVPool]:
    pool = MHATokenToKVPool(LAYERS, PAGE * PAGES, HEADS, 8, dtype, device)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (pool.nbytes,), dtype=torch.uint8, generator=generator)
    pool.buffer.view(torch.uint8).view(-1).copy_(noise)
    done = Done()
    nbytes = blocks * block_bytes(pool.nbytes // PAGES)
    return Swapper(TransferPools.of(pool, None), PAGE, nbytes=nbytes, done=done), done, pool


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_pages_come_back_as_they_left(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_slabs, "SLAB_BYTES", 1)  # a slab for each block
    swapper, done, pool = make(dtype, device)
    assert swapper.host.memory.blocks == 8
    before = pool.buffer.clone()
    source, target, blocks = [7, 2, 19, 4, 11], [3, 18, 1, 9, 6], [6, 1, 7, 3, 0]
    swapper.order(Swap(KEY, 1, True, source, blocks), None)
    assert done.wait() == ""
    assert torch.equal(pool.buffer.view(torch.uint8), before.view(torch.uint8)), "going out changes no page"
    for page in source:
        pool.buffer[:, :, page * PAGE : (page + 1) * PAGE] = 0
    swapper.order(Swap(KEY, 1, False, target, blocks), None)
    assert done.wait() == ""
    swapper.stop()
    for page in range(PAGES):
        found = pool.buffer[:, :, page * PAGE : (page + 1) * PAGE].contiguous().view(torch.uint8)
        was = source[target.index(page)] if page in target else page
        wanted = before[:, :, was * PAGE : (was + 1) * PAGE].contiguous().view(torch.uint8)
        if page in source:
            assert not found.any()
        else:
            assert torch.equal(found, wanted), page
    assert swapper.host.memory.slabs == [0, 1, 3, 6, 7], "no more host memory than was needed"


def test_a_failure_is_told_and_the_next_copy_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    swapper, done, _ = make(torch.float32, "cpu")

    def no_memory(self: HostSlabs, numbers: list[int]) -> None:
        raise RuntimeError("cannot pin")

    with monkeypatch.context() as patch:
        patch.setattr(HostSlabs, "reserve", no_memory)
        swapper.order(Swap(KEY, 1, True, [1], [0]), None)
        assert done.wait() == "RuntimeError: cannot pin"
    swapper.order(Swap(KEY, 2, True, [1], [0]), None)
    assert done.wait() == ""
    swapper.stop()
    swapper.stop()


def test_the_size_of_a_page_is_that_of_the_rank_with_the_most_heads() -> None:
    layout = KVLayout(32, 8, 128, "bfloat16")
    assert page_bytes(layout, 1, 16) == 2 << 20
    assert page_bytes(layout, 3, 16) == 1 << 20, "the one in the middle has 4 of 8 heads"


def test_the_memory_for_swapped_pages_follows_the_settings() -> None:
    cpu = torch.device("cpu")
    assert swap_bytes(DecodeConfig(), cpu) == 0
    assert swap_bytes(DecodeConfig(swap_bytes=4096), cpu) == 4096
    assert swap_bytes(DecodeConfig(swap_bytes=4096, preemption="recompute"), cpu) == 0
    assert swap_bytes(PrefillConfig(), torch.device("cuda")) == 0, "prefill groups do not preempt"
    assert 0 < swap_bytes(DecodeConfig(), torch.device("cuda")) <= AUTOMATIC_BYTES


def test_a_plan_crosses_the_wire() -> None:
    work = Work(KEY, 3, 1, 40, [7], 20, [5], 2)
    plan = StepPlan(9, [work], [Swap(KEY, 3, True, [1, 2], [0])])
    assert StepPlan.decode(plan.encode()) == plan
