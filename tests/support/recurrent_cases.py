"""Packed slices for tests of the recurrent kernels: slots out of order, gaps between slices, an empty slice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.dispatch import INTERPRETED
from kernels.recurrent.slices import PackedSlices, Slice

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
LONG, MEDIUM = (20, 17) if INTERPRETED else (70, 37)
"""Tokens of two slices: more than the references compute at a time, or than a program of a kernel does."""
TOKENS, SLOTS = 14 + LONG + MEDIUM, 7
CHUNKS = (
    Slice(5, 3, 4, True),
    Slice(0, 9, 1, False),
    Slice(3, 10, LONG, True),
    Slice(2, 12 + LONG, 0, True),
    Slice(1, 12 + LONG, MEDIUM, False),
    Slice(6, 12 + LONG + MEDIUM, 1, True),
)
SINGLES = (Slice(4, 7, 1, True), Slice(0, 1, 1, True), Slice(2, 3, 1, True))
PROMPT, CUTS = (35, (1, 13)) if INTERPRETED else (90, (1, 13, 64))
"""Tokens of a prompt, and of the parts into which it is cut."""
UNTOUCHED = 7.0

Token = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Returns the next state and the output, in float64, of a token (its index) after a state."""


def noise(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def strided(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """A view of a wider tensor, as the parts of a projection are."""
    return noise(shape[0], 3, *shape[1:], seed=seed, dtype=dtype, device=device)[:, 1]


def slices_of(single: bool, device: str | torch.device) -> tuple[tuple[Slice, ...], PackedSlices]:
    if not single:
        return CHUNKS, PackedSlices.of(list(CHUNKS), device)
    slots, firsts = (torch.tensor([one[at] for one in SINGLES], device=device) for at in (0, 1))
    return SINGLES, PackedSlices.single(slots, firsts)


def states(*shape: int, slices: tuple[Slice, ...], device: str | torch.device = "cpu") -> torch.Tensor:
    """States of slots; what no slice may read is NaN."""
    found = torch.full((SLOTS, *shape), torch.nan)
    for one in slices:
        if one.begun:
            found[one.slot] = noise(*shape, seed=one.slot)
    return found.to(device)


def check(
    slices: tuple[Slice, ...],
    token: Token,
    before: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    tolerance: float,
) -> None:
    """Compares state and output with those of a loop over tokens; everything else must be as before."""
    expected = torch.full(out.shape, UNTOUCHED, dtype=torch.float64)
    after = before.double().cpu()
    for one in slices:
        if one.tokens:
            held = after[one.slot] if one.begun else torch.zeros_like(after[one.slot])
            for index in range(one.first, one.first + one.tokens):
                held, expected[index] = token(held, index)
            after[one.slot] = held
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(out.double().cpu(), expected, **near)
    torch.testing.assert_close(state.double().cpu(), after, equal_nan=True, **near)
    written = {one.slot for one in slices if one.tokens}
    for slot in set(range(SLOTS)) - written:
        same = torch.equal(state[slot].cpu().view(torch.uint8), before[slot].cpu().view(torch.uint8))
        assert same, f"slot {slot}"
