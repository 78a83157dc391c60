"""Pools with gaps between slots: views of the same bytes of each slot of a larger pool, as recurrent states have.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from disagg.core.types import Span
from kernels.copy.checksum import Check, Origin, Summer
from kernels.copy.gather import gather
from kernels.copy.move import move
from kernels.copy.page_copy import copy_pages
from kernels.copy.rows import PoolSlice
from kernels.copy.scatter import scatter
from kernels.copy.sum_rows import sum_rows

torch.set_num_threads(1)
LAYERS, SLOTS = 3, 9
VIEWS = [(0, 2, 36, 100), (72, 3, 5, 90), (8, 4, 16, 96), (4, 1, 12, 20)]
"""First byte of the view within a slot, heads, bytes of a head, bytes of a slot."""


def larger(slot_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (LAYERS, 1, SLOTS, 1, slot_bytes), dtype=torch.uint8, generator=generator)


def view(pool: torch.Tensor, start: int, heads: int, head_bytes: int) -> torch.Tensor:
    return pool[:, :, :, 0, start : start + heads * head_bytes].unflatten(3, (heads, head_bytes))


@pytest.mark.parametrize(("start", "heads", "head_bytes", "slot_bytes"), VIEWS)
def test_copies_leave_the_gaps_alone(start: int, heads: int, head_bytes: int, slot_bytes: int) -> None:
    pool, other = larger(slot_bytes, 1), larger(slot_bytes, 2)
    here = view(pool, start, heads, head_bytes)
    layers, own, slots = Span(1, 3), Span(heads // 2, heads), torch.tensor([7, 2], dtype=torch.int32)
    wanted = here[1:3, :, slots.long(), own.start : own.stop].clone()
    out = torch.empty(wanted.numel(), dtype=torch.uint8)
    gather(here, slots, layers, own, out)
    assert torch.equal(out, wanted.flatten())

    expected = other.clone()
    view(expected, start, heads, head_bytes)[1:3, :, slots.flip(0).long(), own.start : own.stop] = wanted
    scattered, moved = other.clone(), other.clone()
    scatter(out, view(scattered, start, heads, head_bytes), slots.flip(0), layers, own)
    assert torch.equal(scattered, expected)
    target = PoolSlice(view(moved, start, heads, head_bytes), slots.flip(0), layers, own)
    move(PoolSlice(here, slots, layers, own), target, torch.tensor([5]), 5)
    assert torch.equal(moved, expected)


@pytest.mark.parametrize(("start", "heads", "head_bytes", "slot_bytes"), VIEWS)
def test_checksums_are_those_of_the_bytes_without_gaps(
    start: int, heads: int, head_bytes: int, slot_bytes: int
) -> None:
    own = view(larger(slot_bytes, 3), start, heads, head_bytes)
    sums = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    summer = Summer(torch.device("cpu"))
    for pool, total in zip((own, own.contiguous()), sums, strict=True):
        check = Check(summer, Origin(3, 4, 1), total, seed=77)
        sum_rows(PoolSlice(pool, torch.tensor([4, 1]), Span(0, LAYERS), Span(0, heads)), check)
    assert torch.equal(*sums)
    assert sums[0].item() != 0


def test_a_copy_of_pages_refuses_gaps() -> None:
    own = view(larger(100, 1), 0, 2, 36)
    with pytest.raises(ValueError, match="pool must be contiguous"):
        copy_pages(own, torch.tensor([0]), torch.tensor([1]), 1)
