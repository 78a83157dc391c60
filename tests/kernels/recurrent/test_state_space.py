"""State spaces of packed sequences: Mamba-2 and Mamba-1 as in a loop over tokens, with states in their slots.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from recurrent_cases import CUTS, DEVICES, PROMPT, TOKENS, UNTOUCHED, check, noise, slices_of, states, strided

from kernels.dispatch import backend
from kernels.recurrent.slices import PackedSlices, Slice
from kernels.recurrent.state_space import StateSpace, state_space

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("heads", "channels", "groups", "size", "per_channel", "least_dt"),
    [
        (4, 16, 2, 16, False, 0.0),
        (3, 24, 1, 12, False, 0.6),
        (1, 40, 1, 8, True, 0.0),
        (2, 6, 2, 4, True, 0.6),
    ],
)
def test_states_follow_the_tokens(
    heads: int,
    channels: int,
    groups: int,
    size: int,
    per_channel: bool,
    least_dt: float,
    single: bool,
    device: str,
) -> None:
    each = (heads, channels) if per_channel else (heads,)
    x = strided(TOKENS, heads, channels, seed=1, device=device)
    dt = strided(TOKENS, *each, seed=2, device=device) * 3
    b, c = (strided(TOKENS, groups, size, seed=seed, device=device) for seed in (3, 4))
    a = -noise(*each, *((size,) if per_channel else ()), seed=5, device=device).exp()
    layer = StateSpace(
        a,
        noise(*each, seed=6, device=device),
        noise(*each, seed=7, device=device),
        (least_dt, float("inf")),
    )
    ones, slices = slices_of(single, device)
    state = states(heads, channels, size, slices=ones, device=device)
    before = state.clone()
    out = torch.full((TOKENS, heads, channels), UNTOUCHED, device=device)
    state_space(x, dt, b, c, layer, state, slices, out, how=backend(x.device))
    steps = F.softplus(dt.double().cpu() + layer.dt_bias.double().cpu()).clamp(min=least_dt)
    wide, keys, queries = (one.double().cpu() for one in (x, b, c))
    rates, skip = a.double().cpu(), layer.d.double().cpu()
    group_of = [head * groups // heads for head in range(heads)]

    def token(held: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        step = steps[index][..., None] if per_channel else steps[index][:, None, None]
        rate = rates if per_channel else rates[:, None, None]
        held = held * (step * rate).exp() + step * wide[index][..., None] * keys[index, group_of][:, None]
        skipped = (skip if per_channel else skip[:, None]) * wide[index]
        return held, (held * queries[index, group_of][:, None]).sum(-1) + skipped

    check(ones, token, before, state, out, 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_prompt_has_the_same_outputs(cut: int, device: str) -> None:
    x, dt = noise(PROMPT, 2, 8, seed=1, device=device), noise(PROMPT, 2, seed=2, device=device)
    b, c = (noise(PROMPT, 1, 16, seed=seed, device=device) for seed in (3, 4))
    layer = StateSpace(*(noise(2, seed=seed, device=device) for seed in (5, 6, 7)), (0.1, float("inf")))
    layer = StateSpace(-layer.a.abs(), layer.d, layer.dt_bias, layer.dt_limit)
    outs, ends = [], []
    for size in (PROMPT, cut):
        state, out = torch.full((1, 2, 8, 16), torch.nan, device=device), torch.empty_like(x)
        for first in range(0, PROMPT, size):
            one = Slice(0, first, min(size, PROMPT - first), first > 0)
            slices = PackedSlices.of([one], device)
            state_space(x, dt, b, c, layer, state, slices, out, how=backend(x.device))
        outs.append(out)
        ends.append(state)
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def test_misfits_are_named() -> None:
    x, dt, b = torch.zeros(3, 4, 8), torch.zeros(3, 4), torch.zeros(3, 2, 16)
    layer, state = StateSpace(*(torch.zeros(4) for _ in range(3))), torch.zeros(2, 4, 8, 16)
    slices = PackedSlices.of([Slice(0, 0, 3, False)])
    with pytest.raises(ValueError, match="dt must be"):
        state_space(x, x, b, b, layer, state, slices, x)
    with pytest.raises(ValueError, match=r"b must have a divisor of 4 groups; got 3"):
        state_space(x, dt, torch.zeros(3, 3, 16), b, layer, state, slices, x)
    with pytest.raises(ValueError, match="contiguous within a slot"):
        state_space(x, dt, b, b, layer, torch.zeros(2, 8, 4, 16).transpose(1, 2), slices, x)
    with pytest.raises(ValueError, match=r"c must be float \[3, 2, 16\]"):
        state_space(x, dt, b, b[:, :1], layer, state, slices, x)
