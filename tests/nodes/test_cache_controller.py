"""Copies between the tiers: what a rank does with the operations of a plan, and when a decode request may run."""

from __future__ import annotations

import threading
from itertools import count

import pytest
import torch
from conditions import PATIENCE_S
from fake_model import STATE_FORMS

from decode_node.costs import CostEstimates
from decode_node.request import NewRequest
from decode_node.scheduler import DecodeScheduler
from decode_node.scheduler_options import SchedulerOptions
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.kv.cache_operations import CacheOperation, PoolTransfer
from disagg.kv.host_slabs import HostSlabs
from disagg.kv.mamba_pool import MambaPool
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.transfer_pools import TransferPools
from disagg.model.chunks import PromptChunks
from disagg.node import cache_controller
from disagg.node.cache_controller import (
    HostBlockCounts,
    HybridCacheController,
    host_block_counts,
    layer_groups,
    least_host_bytes,
)
from disagg.node.host_memory import pinnable_bytes
from disagg.node.kv_manager import KVManager
from disagg.node.plan import StepPlan, Work

PAGE, LAYERS = 4, 5


class Controller:
    """A controller of a pool with random content, and its reports."""

    def __init__(self, *, layered: bool, blocks: int = 6) -> None:
        self.pool = MHATokenToKVPool(LAYERS, 10 * PAGE, 2, 3, torch.float32)
        self.pool.buffer.copy_(torch.rand(self.pool.buffer.shape))
        self.states = MambaPool(STATE_FORMS, 4)
        for buffer in self.states.buffers:
            buffer.copy_(torch.rand(buffer.shape))
        self.moved: dict[int, str] = {}
        self.seconds: dict[int, float] = {}
        self.broken: list[str] = []
        self.reported = threading.Condition()
        self.controller = HybridCacheController(
            TransferPools.of(self.pool, self.states),
            PAGE,
            HostBlockCounts(blocks, 2),
            layered=layered,
            moved=self._report,
            broken=self._break,
            clock=count().__next__,
        )

    def _report(self, number: int, error: str, seconds: float) -> None:
        with self.reported:
            self.moved[number] = error
            self.seconds[number] = seconds
            self.reported.notify_all()

    def _break(self, error: str) -> None:
        with self.reported:
            self.broken.append(error)
            self.reported.notify_all()

    def order(self, *operations: CacheOperation) -> None:
        """Orders the operations, and waits for their reports."""
        self.controller.order(StepPlan(1, [], cache_operations=list(operations)))
        numbers = {operation.number for operation in operations}
        with self.reported:
            assert self.reported.wait_for(lambda: self.broken or numbers <= self.moved.keys(), PATIENCE_S)

    def page(self, number: int) -> torch.Tensor:
        return self.pool.buffer[:, :, number * PAGE : (number + 1) * PAGE].clone()


@pytest.mark.parametrize("layered", [True, False])
def test_pages_and_states_come_back_elsewhere(layered: bool) -> None:
    one = Controller(layered=layered)
    pages, states = [one.page(2), one.page(7)], [buffer[:, 1].clone() for buffer in one.states.buffers]
    one.order(CacheOperation(1, True, [PoolTransfer("kv", [2, 7], [5, 0]), PoolTransfer("state", [1], [1])]))
    others = {number: one.page(number) for number in range(10) if number not in (3, 4)}
    one.order(CacheOperation(2, False, [PoolTransfer("kv", [3, 4], [5, 0]), PoolTransfer("state", [3], [1])]))
    assert torch.equal(one.page(3), pages[0])
    assert torch.equal(one.page(4), pages[1])
    assert all(torch.equal(one.page(number), kv) for number, kv in others.items()), "no other page changed"
    for buffer, state in zip(one.states.buffers, states, strict=True):
        assert torch.equal(buffer[:, 3], state)
    assert one.moved == {1: "", 2: ""}
    one.controller.stop()


@pytest.mark.parametrize("layered", [True, False])
def test_loads_of_a_plan_share_its_time_by_their_pages(layered: bool) -> None:
    one = Controller(layered=layered)
    one.order(CacheOperation(1, True, [PoolTransfer("kv", [2, 7, 8, 9], [0, 1, 2, 3])]))
    assert one.seconds[1] == 0.0, "stores are not measured"
    loads = [([2], [0]), ([3, 4, 5], [1, 2, 3])]
    one.order(
        *(CacheOperation(2 + at, False, [PoolTransfer("kv", *pages)]) for at, pages in enumerate(loads))
    )
    assert (one.seconds[2], one.seconds[3]) == (0.25, 0.75), "the clock is read twice, a second apart"
    one.controller.stop()


def test_a_load_beside_a_step_is_queued_when_it_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that waited on the device for the step before would delay the launch of this step."""
    one = Controller(layered=True)
    one.order(CacheOperation(1, True, [PoolTransfer("kv", [2], [5])]))
    stored, complete, asked = one.page(2), threading.Event(), threading.Event()

    def wait(event: object) -> None:
        if event is complete:
            asked.set()
            assert complete.wait(PATIENCE_S)

    monkeypatch.setattr(cache_controller, "record_event", lambda *_, **__: complete)
    monkeypatch.setattr(cache_controller, "wait_for", wait)
    before = one.page(3)
    load = CacheOperation(2, False, [PoolTransfer("kv", [3], [5])])
    work = Work(RequestKey("other", 1), reservation=1, row=1, start=0, tokens=[7], prompt_tokens=1)
    one.controller.order(StepPlan(1, [work], cache_operations=[load]))
    assert asked.wait(PATIENCE_S)
    assert torch.equal(one.page(3), before)
    assert not torch.equal(before, stored)
    complete.set()
    with one.reported:
        assert one.reported.wait_for(lambda: 2 in one.moved, PATIENCE_S)
    assert torch.equal(one.page(3), stored)
    one.controller.stop()


@pytest.mark.parametrize(
    ("kv", "states", "counts"),
    [(6, 2, (6, 2)), (4, 2, (4, 2)), (6, 1, (6, 1)), (6, 0, (0, 0)), (0, 2, (0, 0))],
)
def test_the_second_tier_has_as_many_blocks_as_the_host_pins(
    monkeypatch: pytest.MonkeyPatch, kv: int, states: int, counts: tuple[int, int]
) -> None:
    """None, if it has no memory for either pages or states: then none stays pinned."""
    pinned, unpinned = iter((states, kv)), list[HostSlabs]()

    def pin(self: HostSlabs, room_bytes: object) -> int:
        assert room_bytes is pinnable_bytes
        return next(pinned)

    monkeypatch.setattr(HostSlabs, "pin", pin)
    monkeypatch.setattr(HostSlabs, "unpin", lambda self: unpinned.append(self))
    controller = Controller(layered=True).controller
    assert (controller.counts, controller.wanted) == (counts, (6, 2))
    assert list(pinned) == []
    assert len(unpinned) == (0 if any(counts) else 2)
    block_bytes = [pool.memory.memory.shape[1] for pool in (controller.kv, controller.states)]
    assert controller.pinned_bytes == counts[0] * block_bytes[0] + counts[1] * block_bytes[1]
    controller.stop()


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 8, 9, 32, 68, 69, 80, 200])
def test_the_first_groups_of_a_load_are_small_and_the_groups_are_few(layers: int) -> None:
    groups = layer_groups(layers)
    assert [layer for group in groups for layer in range(group.start, group.stop)] == list(range(layers))
    sizes = [len(group) for group in groups]
    assert sizes[0] == 1
    assert sizes[:4] == [1, 1, 2, max(4, -(-(layers - 4) // 16))][: len(sizes)] or len(sizes) <= 4
    assert len(groups) <= 19
    assert max(sizes[3:], default=4) <= max(4, -(-layers // 15))


def test_a_store_without_memory_is_reported_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Controller(layered=True)

    def no_memory(*_: object) -> None:
        raise RuntimeError("cannot pin")

    with monkeypatch.context() as patch:
        patch.setattr(HostSlabs, "reserve", no_memory)
        one.order(CacheOperation(1, True, [PoolTransfer("kv", [2], [5])]))
    assert "cannot pin" in one.moved[1]
    one.order(CacheOperation(2, True, [PoolTransfer("kv", [2], [5])]))
    assert one.moved[2] == ""
    assert one.broken == []
    one.controller.stop()


def test_a_load_that_fails_breaks_the_rank() -> None:
    """Its request would read pages without KV; the group ends, and its requests are recovered."""
    one = Controller(layered=False)
    one.order(CacheOperation(1, False, [PoolTransfer("kv", [2], [5])]))  # nothing was stored there
    assert one.broken
    one.controller.stop()


def test_room_of_the_host_memory() -> None:
    pool, states = MHATokenToKVPool(2, 40, 4, 128, torch.bfloat16), MambaPool(STATE_FORMS, 3)
    page_bytes = 2 * 2 * 16 * 4 * 128 * 2  # a multiple of 4096
    assert host_block_counts(TransferPools.of(pool, None), 16, 10 * page_bytes + 1) == (10, 0)
    assert host_block_counts(TransferPools.of(pool, states), 16, 4 * page_bytes) == (
        2,
        page_bytes * 2 // 4096,
    )
    assert host_block_counts(TransferPools.of(pool, states), 16, 0) == (0, 0)
    for pools in (TransferPools.of(pool, None), TransferPools.of(pool, states)):
        least = least_host_bytes(pools, 16)
        wanted = [1, 1] if pools.state_buffers else [1]
        assert list(map(bool, host_block_counts(pools, 16, least)))[: len(wanted)] == wanted
        assert 0 in host_block_counts(pools, 16, least - 1)[: len(wanted)]


def test_a_decode_request_waits_for_its_load() -> None:
    """All of its KV that is sent has landed, and a rank still loads what was cached."""
    kv_manager = KVManager(pool_tokens=16 * PAGE, page_size=PAGE, rows=2, eviction="lru")
    kv_manager.add_host_tier(32, 0, 1)
    scheduler = DecodeScheduler(
        kv_manager,
        SchedulerOptions(
            group="decode",
            ranks=1,
            max_context_tokens=16 * PAGE,
            first_ticket=0,
            rates=CostEstimates(1e3, 1e3),
            chunks=PromptChunks(64),
            preemption="recompute",
            watermark=0.0,
            max_batch=4,
        ),
    )
    tokens = list(range(3 * PAGE + 1))
    prefix = PrefixKey.of(pack_tokens(tokens))
    table = kv_manager.reserve(len(tokens), prefix)
    assert table is not None
    kv_manager.keep(table, prefix)
    kv_manager.release(table)
    (store,) = kv_manager.take_operations()
    kv_manager.moved(store.number, 0, "")
    assert kv_manager.cache is not None
    kv_manager.cache.evict(3)
    key = RequestKey("r1")
    request = scheduler.reserve(
        NewRequest(
            key,
            pack_tokens(tokens),
            SamplingParams(max_tokens=4),
            router="",
            prefill_group="",
            deadline_s=0.0,
            prefix=prefix,
        )
    )
    assert request.ticket.tokens.start == 3 * PAGE, "what is loaded is not sent"
    request.landed_ranks.add(0)
    request.sequences[0].tokens.append(1)
    request.begun = True
    plan = scheduler.next_step()
    assert plan is not None
    assert (plan.work, len(plan.cache_operations)) == ([], 1)
    assert scheduler.next_step() is None
    scheduler.check()
    kv_manager.moved(plan.cache_operations[0].number, 0, "")
    plan = scheduler.next_step()
    assert plan is not None
    assert [work.key for work in plan.work] == [key]
