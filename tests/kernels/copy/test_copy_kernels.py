"""Gather and scatter move exactly the right bytes, on whatever backend this process chooses for the CPU.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from copy_cases import SAMPLED_CASES, Case, as_bytes

from disagg.core.types import Span
from kernels.copy.gather import gather, gather_reference
from kernels.copy.scatter import scatter, scatter_reference
from kernels.dispatch import backend

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("run", [gather, gather_reference])
@pytest.mark.parametrize("case", SAMPLED_CASES, ids=str)
def test_gather_moves_every_byte(case: Case, run: Callable[..., None], generator: torch.Generator) -> None:
    _, pool = case.pool("cpu", generator)
    allocation, out = case.staged("cpu", None)
    slots = case.slots("cpu", generator)
    expected = case.gathered(pool, slots, allocation)
    untouched = as_bytes(pool).copy()
    run(pool, slots, case.layers, case.heads, out)
    assert (as_bytes(allocation) == expected).all()
    assert (as_bytes(pool) == untouched).all()


@pytest.mark.parametrize("run", [scatter, scatter_reference])
@pytest.mark.parametrize("case", SAMPLED_CASES, ids=str)
def test_scatter_moves_every_byte_and_no_other(
    case: Case, run: Callable[..., None], generator: torch.Generator
) -> None:
    allocation, pool = case.pool("cpu", None)
    _, staged = case.staged("cpu", generator)
    slots = case.slots("cpu", generator)
    expected = case.scattered(staged, slots, allocation)
    untouched = as_bytes(staged).copy()
    run(staged, pool, slots, case.layers, case.heads)
    assert (as_bytes(allocation) == expected).all()
    assert (as_bytes(staged) == untouched).all()


def test_offsets_beyond_two_to_the_31(generator: torch.Generator) -> None:
    """Of the 4 GiB only the touched pages ever exist. A product kept in int32 would wrap."""
    slots_in_pool = 2**31 // 3 + 1000
    pool = torch.empty((1, 2, slots_in_pool, 3, 1), dtype=torch.uint8)
    slots = torch.tensor([0, slots_in_pool - 1, 7, slots_in_pool - 900, 2**30 // 3], dtype=torch.int32)
    staged = torch.randint(0, 256, (2 * len(slots) * 2,), dtype=torch.uint8, generator=generator)
    scatter(staged, pool, slots, Span(0, 1), Span(1, 3))
    assert torch.equal(pool[0, :, slots.long(), 1:].flatten(), staged)
    out = torch.zeros_like(staged)
    gather(pool, slots, Span(0, 1), Span(1, 3), out)
    assert torch.equal(out, staged)


def test_backend_is_the_selected_one() -> None:
    assert backend(torch.device("cpu")) == os.environ.get("DISAGG_KERNELS", "torch")
