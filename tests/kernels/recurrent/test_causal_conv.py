"""Convolutions of packed sequences: those of a loop over tokens, with windows that stay in their slots.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from recurrent_cases import DEVICES, TOKENS, UNTOUCHED, check, noise, slices_of, states, strided

from kernels.dispatch import backend
from kernels.recurrent.causal_conv import causal_conv
from kernels.recurrent.slices import PackedSlices, Slice

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("channels", "taps", "silu", "biased"), [(200, 4, True, True), (33, 3, False, False), (8, 2, True, False)]
)
def test_windows_follow_the_tokens(
    channels: int, taps: int, silu: bool, biased: bool, single: bool, device: str
) -> None:
    x, weight = strided(TOKENS, channels, seed=1, device=device), noise(channels, taps, seed=2, device=device)
    bias = noise(channels, seed=3, device=device) if biased else None
    ones, slices = slices_of(single, device)
    state = states(channels, taps, slices=ones, device=device)
    before, out = state.clone(), torch.full((TOKENS, channels), UNTOUCHED, device=device)
    causal_conv(x, weight, bias, state, slices, out, silu=silu, how=backend(x.device))
    wide, factors = x.double().cpu(), weight.double().cpu()
    added = torch.zeros(channels) if bias is None else bias.double().cpu()

    def token(held: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        held = torch.cat([held[:, 1:], wide[index, :, None]], dim=1)
        found = (held * factors).sum(1) + added
        return held, found * found.sigmoid() if silu else found

    check(ones, token, before, state, out, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_sixteen_bits(device: str) -> None:
    x = noise(9, 8, seed=1, dtype=torch.bfloat16, device=device)
    weight = noise(8, 4, seed=2, dtype=torch.bfloat16, device=device)
    state, out = torch.zeros(1, 8, 4, dtype=torch.bfloat16, device=device), torch.empty_like(x)
    slices = PackedSlices.of([Slice(0, 0, 9, False)], device)
    causal_conv(x, weight, None, state, slices, out, silu=True, how=backend(x.device))
    exact = torch.empty(9, 8, device=device)
    causal_conv(x.float(), weight.float(), None, state.float(), slices, exact, silu=True)
    torch.testing.assert_close(out.float(), exact, rtol=2**-6, atol=2**-7)
    assert torch.equal(state[0], x[-4:].t())


def test_misfits_are_named() -> None:
    x, weight, state = torch.zeros(3, 8), torch.zeros(8, 4), torch.zeros(2, 8, 4)
    slices = PackedSlices.of([Slice(0, 0, 3, False)])
    with pytest.raises(ValueError, match=r"state must be float \[2, 8, 4\]"):
        causal_conv(x, weight, None, state.mT.contiguous().mT, slices, x, silu=False)
    with pytest.raises(ValueError, match=r"out must be float \[3, 8\]"):
        causal_conv(x, weight, None, state, slices, x[:2], silu=False)
    with pytest.raises(ValueError, match="2 to 16 taps"):
        causal_conv(x, weight, None, state[:, :, :2], slices, x, silu=False)
    with pytest.raises(ValueError, match=r"bias must be float \[8\]"):
        causal_conv(x, weight, torch.zeros(7), state, slices, x, silu=False)
