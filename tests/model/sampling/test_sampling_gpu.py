"""On a GPU, sampling neither makes the host wait for the device nor compiles kernels while requests wait."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import torch
import triton
from host_waits import no_host_waits

from disagg.core.types import SamplingParams
from disagg.model.sampling.batch import Sampler
from disagg.model.sampling.next_tokens import BeamStep, SampledBeams
from disagg.model.sampling.penalties import SamplingRow, history_of
from disagg.node.warm import warm_sampling

pytestmark = pytest.mark.gpu
VOCAB, EOS, DEVICE = 1024, (3,), torch.device("cuda:0")
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=9, min_p=0.01, logprobs=2, max_tokens=9),
    SamplingParams(temperature=1.0, seed=1, repetition_penalty=1.3, presence_penalty=1.0, max_tokens=9),
    SamplingParams(frequency_penalty=0.5, min_tokens=5, logit_bias=((3, 2.0),), max_tokens=9),
]


def step(sampler: Sampler, rows: list[SamplingRow], ahead: int) -> Any:
    logits = torch.randn(len(rows), VOCAB, device=DEVICE)
    return sampler.step(logits, [msgspec.structs.replace(row, ahead_tokens=ahead) for row in rows])


def search() -> SampledBeams:
    beams = SamplingParams(beams=2, logit_bias=((5, 1.0),), min_tokens=3, max_tokens=9)
    return SampledBeams(torch.randn(2, VOCAB, device=DEVICE), [BeamStep(beams, (7,), [0.0, -1.0])], EOS)


def test_no_step_makes_the_host_wait() -> None:
    """Neither the first step of a batch, nor one whose tokens the host lacks, nor one of fewer rows."""
    for waits in (True, False):  # the first time compiles kernels
        with nullcontext() if waits else no_host_waits():
            rows, sampler = [SamplingRow(p, (5,), history_of((1, 2), p)) for p in PARAMS], Sampler(EOS)
            steps = [step(sampler, rows, ahead) for ahead in (0, 1)]
            steps += [step(sampler, rows[::-2], 2), search()]
        assert [len(one.result()) for one in steps] == [4, 4, 2, 1]


def test_a_warm_rank_compiles_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of rows, which moves the addresses of their parameters."""
    compiled: list[dict[str, Any]] = []
    warm_sampling(VOCAB, DEVICE)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **more: compiled.append(more))
    for count in (1, 2, 3, 4, 7, 10):
        rows = [SamplingRow(p, (5,), history_of((1,), p)) for p in PARAMS[1:3] * count]
        step(Sampler(EOS), rows[:count], 0).result()
        step(Sampler(EOS), rows, 0).result()
    assert not compiled
