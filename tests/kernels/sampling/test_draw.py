"""Draws without a sort choose the tokens of the sorted reference, and weights are those of a softmax.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.dispatch import INTERPRETED
from kernels.sampling import draw as module
from kernels.sampling.draw import DrawParams, draw, draw_reference, gap_of, likeliest_tokens, scale_of
from kernels.sampling.philox import uniform_of, uniform_reference
from kernels.sampling.units import fraction_bits, units_reference

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
VOCAB = 700
CASES = [(0.0, 1.0, 0.0, 0), (1.0, 1.0, 0.0, 0), (1.0, 0.95, 0.0, 0), (0.3, 0.5, 0.0, 0), (1.7, 1.0, 0.05, 0)]
CASES += [
    (1.0, 1.0, 0.0, 5),
    (1.7, 0.8, 0.02, 40),
    (1e-30, 0.9, 0.5, 3),
    (1e5, 0.3, 1.0, 650),
    (1.0, 1e-9, 0.0, 9999),
]
"""temperature, top_p, min_p, top_k."""

QUICK = {
    ("flat", 16): slice(2, 8, 4),
    ("peaked", 64): slice(1, 8, 2),
    ("equal", 16): slice(5, 6),
    ("sixteen bits", 2048): slice(0, 9, 2),
}


def params_of(cases: list[tuple[float, float, float, int]], device: str, seed: int = 0) -> DrawParams:
    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    rng = random.Random(seed)
    seeds = [rng.randrange(-(2**63), 2**63) for _ in cases]
    return DrawParams(
        floats([scale_of(case[0]) for case in cases]),
        floats([1.0 - case[1] for case in cases]),
        floats([gap_of(case[2], case[0]) for case in cases]),
        torch.tensor([case[3] for case in cases], dtype=torch.int64, device=device),
        torch.tensor(seeds, dtype=torch.int64, device=device),
        torch.arange(len(cases), device=device),
    )


def logits_of(kind: str, rows: int = len(CASES)) -> torch.Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(len(kind)))
    match kind:
        case "peaked":
            return 6 * logits
        case "sixteen bits":
            return (2 * logits).bfloat16().float()
        case "equal":
            return logits.clamp(max=-0.5).where(logits < -1, -0.0)
        case "masked":
            return logits.where(logits > 1.5, float("-inf"))
    return logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "listed"),
    [
        pytest.param(kind, listed, marks=() if (kind, listed) in QUICK else pytest.mark.slow)
        for kind in ("flat", "peaked", "sixteen bits", "equal", "masked")
        for listed in (16, 64, 2048)
    ],
)
def test_tokens_are_those_of_a_sort(
    kind: str, listed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short list needs several passes, a long one holds a whole row, one of 64 the candidates. Slow: more rows."""
    monkeypatch.setattr(module, "LIST", listed)
    monkeypatch.setattr(module, "BLOCK", 512)
    monkeypatch.setattr(module, "LANES", 64 if listed < 512 else 512)
    cases = CASES[QUICK[kind, listed]] if (kind, listed) in QUICK else CASES
    logits = logits_of(kind)[: len(cases)]
    with np.errstate(over="ignore"):  # of Triton's interpreter, at the lowest temperature
        found = draw(logits.to(device), params_of(cases, device))
    assert found.dtype == torch.int64
    assert torch.equal(found.cpu(), draw_reference(logits, params_of(cases, "cpu")))


@pytest.mark.parametrize("device", DEVICES)
def test_bad_logits_have_no_token(device: str) -> None:
    cases = [(1.0, 0.9, 0.0, 0)] * 4 + [(0.0, 1.0, 0.0, 0)] * 2
    logits = logits_of("flat", len(cases)).to(device)
    good = draw_reference(logits, params_of(cases, device)).tolist()
    for row, bad in ((0, "nan"), (1, "inf"), (4, "nan")):
        logits[row, 300] = float(bad)
    logits[2] = float("-inf")
    assert draw(logits, params_of(cases, device)).tolist() == [-1, -1, -1, good[3], -1, good[5]]
    best = logits.argmax(dim=-1).tolist()
    assert likeliest_tokens(logits).tolist() == [-1, -1, -1, best[3], -1, best[5]]
    assert draw(logits[:0], params_of([], device)).tolist() == []


@triton.jit
def _uniform_kernel(seeds, positions, out):  # type: ignore[no-untyped-def]
    index = tl.program_id(0)
    tl.store(out + index, uniform_of(tl.load(seeds + index), tl.load(positions + index)))


def test_uniform_numbers_are_those_of_numpy() -> None:
    keys = [(0, 0), (7, 3), (2**63 - 1, 5), (-(2**63), 2**40), (-1, 1)]
    seeds, positions = (torch.tensor(column) for column in zip(*keys, strict=True))
    found = uniform_reference(seeds, positions)
    if INTERPRETED:
        _uniform_kernel[(len(keys),)](seeds, positions, found.fill_(-1.0))
    for (seed, position), number in zip(keys, found.tolist(), strict=True):
        key = np.array([seed % 2**64, position], dtype=np.uint64)
        assert number == np.random.Generator(np.random.Philox(key=key)).random()


@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_weights_of_the_reference_are_a_softmax(temperature: float) -> None:
    logits = 3 * torch.randn(4, 1 << 14, generator=torch.Generator().manual_seed(0))
    highest, bits = logits.amax(dim=-1, keepdim=True), fraction_bits(1 << 14)
    units = units_reference(logits, highest, torch.full((4, 1), scale_of(temperature)), bits)
    wanted = ((logits.double() - highest.double()) / temperature).exp()
    error = (units.double() / 2**bits - wanted).abs()
    distance = (highest - logits).double() / temperature
    assert bool((error <= wanted * (1.5e-7 + 1.2e-7 * distance) + 2.0**-bits).all())
    assert units.amax() == 1 << bits
    assert bool((units.sum(-1) < 1 << 62).all())


@pytest.mark.parametrize("vocab", [1, 2, 1 << 17, (1 << 18) - 1, 1 << 18, 1 << 20])
def test_sums_of_any_vocabulary_fit(vocab: int) -> None:
    assert vocab << fraction_bits(vocab) <= 1 << 62


def test_bad_arguments() -> None:
    params, logits = params_of(CASES, "cpu"), logits_of("flat")
    for wrong in (logits.double(), logits[:, ::2], logits[0]):
        with pytest.raises(ValueError, match="logits must be contiguous float32"):
            draw(wrong, params)
    with pytest.raises(ValueError, match=r"scales must be contiguous torch\.float32 \[9\]"):
        draw(logits[1:], params)
    with pytest.raises(ValueError, match=r"top_k must be contiguous torch\.int64"):
        draw(logits, DrawParams(**{**vars(params), "top_k": params.scales}))
