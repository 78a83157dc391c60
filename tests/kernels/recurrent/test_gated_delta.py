"""The gated delta rule of packed sequences: as in a loop over tokens, with states in their slots.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from recurrent_cases import CUTS, DEVICES, PROMPT, TOKENS, UNTOUCHED, check, noise, slices_of, states, strided

from kernels.dispatch import backend
from kernels.recurrent.gated_delta import gated_delta
from kernels.recurrent.slices import PackedSlices, Slice

pytestmark = pytest.mark.usefixtures("poison_empty")


def normalized(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("per_element", [False, True])
@pytest.mark.parametrize(("key_heads", "heads", "key_dim", "value_dim"), [(2, 4, 8, 16), (3, 3, 12, 20)])
def test_states_follow_the_tokens(
    key_heads: int, heads: int, key_dim: int, value_dim: int, per_element: bool, single: bool, device: str
) -> None:
    q, k = (strided(TOKENS, key_heads, key_dim, seed=seed, device=device) for seed in (1, 2))
    v = strided(TOKENS, heads, value_dim, seed=3, device=device)
    shape = (TOKENS, heads, key_dim) if per_element else (TOKENS, heads)
    decay, beta = -strided(*shape, seed=4, device=device).exp(), strided(TOKENS, heads, seed=5, device=device)
    beta = beta.sigmoid()
    ones, slices = slices_of(single, device)
    state = states(heads, key_dim, value_dim, slices=ones, device=device)
    before = state.clone()
    out = torch.full((TOKENS, heads, value_dim), UNTOUCHED, device=device)
    gated_delta(q, k, v, decay, beta, state, slices, out, how=backend(q.device))
    repeats = heads // key_heads
    queries, keys = (normalized(x.double().cpu()).repeat_interleave(repeats, 1) for x in (q, k))
    values, levels, shares = (x.double().cpu() for x in (v, decay, beta))

    def token(held: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        factor = levels[index].exp()
        held = held * (factor[..., None] if per_element else factor[:, None, None])
        key, query = keys[index][..., None], queries[index][..., None] * key_dim**-0.5
        change = (values[index] - (held * key).sum(1)) * shares[index][:, None]
        held = held + key * change[:, None]
        return held, (held * query).sum(1)

    check(ones, token, before, state, out, 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_prompt_has_the_same_outputs(cut: int, device: str) -> None:
    q, k, v = (noise(PROMPT, 2, 8, seed=seed, device=device) for seed in (1, 2, 3))
    decay, beta = (
        -noise(PROMPT, 2, seed=4, device=device).exp(),
        noise(PROMPT, 2, seed=5, device=device).sigmoid(),
    )
    outs = []
    for size in (PROMPT, cut):
        state, out = torch.full((1, 2, 8, 8), torch.nan, device=device), torch.empty_like(v)
        for first in range(0, PROMPT, size):
            one = Slice(0, first, min(size, PROMPT - first), first > 0)
            slices = PackedSlices.of([one], device)
            gated_delta(q, k, v, decay, beta, state, slices, out, how=backend(q.device))
        outs.append(out)
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)


def test_misfits_are_named() -> None:
    q, v, beta = torch.zeros(3, 2, 8), torch.zeros(3, 4, 16), torch.zeros(3, 4)
    state, slices = torch.zeros(2, 4, 8, 16), PackedSlices.of([Slice(0, 0, 3, False)])
    with pytest.raises(ValueError, match="q must have a divisor of 4 heads; got 3"):
        gated_delta(torch.zeros(3, 3, 8), q, v, beta, beta, state, slices, v)
    with pytest.raises(ValueError, match="decay must be"):
        gated_delta(q, q, v, beta[:2], beta, state, slices, v)
    with pytest.raises(ValueError, match="beta must be"):
        gated_delta(q, q, v, beta, beta[:, :2], state, slices, v)
    with pytest.raises(ValueError, match="contiguous within a slot"):
        gated_delta(q, q, v, beta, beta, torch.zeros(2, 8, 4, 16).transpose(1, 2), slices, v)
