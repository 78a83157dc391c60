"""The Triton kernels on a real device."""

from __future__ import annotations

import pytest
import torch
from copy_cases import CASES, POISON, Case, as_bytes
from host_waits import no_host_waits

from disagg.core.types import Span
from kernels.copy.gather import gather
from kernels.copy.scatter import scatter
from kernels.dispatch import backend

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@pytest.fixture
def generator() -> torch.Generator:
    assert backend(torch.device(DEVICE)) == "triton", "unset DISAGG_KERNELS to test the kernels"
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte(case: Case, generator: torch.Generator) -> None:
    slots = case.slots(DEVICE, generator)
    _, pool = case.pool(DEVICE, generator)
    allocation, out = case.staged(DEVICE, None)
    expected = case.gathered(pool, slots, allocation)
    gather(pool, slots, case.layers, case.heads, out)
    assert (as_bytes(allocation) == expected).all()

    allocation, pool = case.pool(DEVICE, None)
    _, staged = case.staged(DEVICE, generator)
    expected = case.scattered(staged, slots, allocation)
    scatter(staged, pool, slots, case.layers, case.heads)
    assert (as_bytes(allocation) == expected).all()


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "pool_slots"),
    [
        (torch.bfloat16, 2, 128, 2**31 // 64 + 5000),  # 2^31 words of 8 bytes in each of K and V: 32 GiB
        (torch.uint8, 3, 1, 2**31 // 3 + 5000),  # 2^31 words of 1 byte in each
        (torch.float32, 8, 128, 2**20 + 17),  # 2^31 bytes, fewer words
    ],
)
def test_offsets_beyond_two_to_the_31(
    dtype: torch.dtype, heads: int, head_dim: int, pool_slots: int, generator: torch.Generator
) -> None:
    pool = torch.empty((1, 2, pool_slots, heads, head_dim), dtype=dtype, device=DEVICE)
    raw = pool.view(-1).view(torch.uint8).fill_(POISON)
    picked = torch.cat([torch.arange(100), torch.arange(pool_slots - 3000, pool_slots)])
    slots = picked[torch.randperm(len(picked), generator=generator)].int().to(DEVICE)
    span = Span(1, heads)
    nbytes = 2 * len(slots) * len(span) * head_dim * pool.element_size()
    staged = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(DEVICE)
    scatter(staged, pool, slots, Span(0, 1), span)
    rows = raw.view(2, pool_slots, heads, -1)
    assert torch.equal(rows[:, slots.long(), 1:].flatten(), staged)
    assert (rows[:, slots.long(), :1] == POISON).all()
    assert (rows[:, 100 : pool_slots - 3000] == POISON).all()
    out = torch.full_like(staged, POISON)
    gather(pool, slots, Span(0, 1), span, out)
    assert torch.equal(out, staged)


def test_runs_on_the_current_stream_and_never_waits(generator: torch.Generator) -> None:
    case = Case(torch.bfloat16, 128, 4, Span(1, 3), pool_slots=64, tokens=40)
    slots = case.slots(DEVICE, generator)
    _, content = case.pool(DEVICE, generator)
    _, pool = case.pool(DEVICE, None)
    _, copy = case.pool(DEVICE, None)
    _, out = case.staged(DEVICE, None)
    gather(pool, slots, case.layers, case.heads, out)  # compiles, so that only launches follow
    scatter(out, copy, slots, case.layers, case.heads)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(DEVICE)
    with no_host_waits(), torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # about a second: what runs elsewhere runs before the pool is filled
        pool.copy_(content)
        gather(pool, slots, case.layers, case.heads, out)
        scatter(out, copy, slots, case.layers, case.heads)
        done = stream.record_event()
        assert not done.query(), "the launches waited for the stream"
    stream.synchronize()
    layers, heads = slice(case.layers.start, case.layers.stop), slice(case.heads.start, case.heads.stop)
    got, expected = (x[layers, :, slots.long(), heads] for x in (copy, content))
    assert (as_bytes(got) == as_bytes(expected)).all()


def test_pool_on_another_than_the_current_device(generator: torch.Generator) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    case = Case(torch.bfloat16, 64, 4, Span(1, 3))
    slots = case.slots("cuda:1", generator)
    _, pool = case.pool("cuda:1", generator)
    allocation, out = case.staged("cuda:1", None)
    expected = case.gathered(pool, slots, allocation)
    with torch.cuda.device(0):
        gather(pool, slots, case.layers, case.heads, out)
        assert torch.cuda.current_device() == 0
    assert (as_bytes(allocation) == expected).all()
