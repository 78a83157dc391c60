"""Steps of a batch that are launched before the host has read the tokens of earlier ones."""

from __future__ import annotations

import pytest
import torch

from disagg.core.errors import InvariantError
from disagg.core.types import SamplingParams
from disagg.model.sampling.batch import Sampler
from disagg.model.sampling.next_tokens import next_tokens
from disagg.model.sampling.penalties import SamplingRow, TokenHistory, history_of
from disagg.model.sampling.sampled import Chosen

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
VOCAB, EOS = 50, (3, 60)
PROMPT = [1, 2, 3, 7]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2, repetition_penalty=1.4, logprobs=2),
    SamplingParams(
        frequency_penalty=1.5, presence_penalty=0.5, min_tokens=4, logit_bias=((3, 9.0), (3, 1.0))
    ),
    SamplingParams(temperature=1.2, top_k=7, min_p=0.05, seed=-5, presence_penalty=-1.0, logprobs=0),
]


def logits_of(step: int, rows: int = len(PARAMS)) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(step))


def one_by_one(steps: int) -> list[list[Chosen]]:
    """Chosen tokens of each request, each step with new parameters and histories."""
    answers: list[list[Chosen]] = [[] for _ in PARAMS]
    for step in range(steps):
        rows = [
            SamplingRow(p, [one.token for one in answer], history_of(PROMPT, p))
            for p, answer in zip(PARAMS, answers, strict=True)
        ]
        for answer, chosen in zip(answers, next_tokens(logits_of(step), rows, EOS), strict=True):
            assert isinstance(chosen, Chosen)
            answer.append(chosen)
    return answers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("late", [0, 1, 3])
def test_steps_ahead_of_the_host_choose_the_same_tokens(late: int, device: str) -> None:
    expected, sampler = one_by_one(8), Sampler(EOS)
    histories = [history_of(PROMPT, p) for p in PARAMS]
    answers: list[list[int]] = [[] for _ in PARAMS]
    pending, batches = [], []
    for step in range(8):
        rows = [
            SamplingRow(p, answer, history, ahead_tokens=len(pending))
            for p, answer, history in zip(PARAMS, answers, histories, strict=True)
        ]
        pending.append(sampler.step(logits_of(step).to(device), rows))
        batches.append(sampler.batch)
        assert sampler.batch is not None
        sampler.batch.check()
        while len(pending) > late or (pending and step == 7):
            sampled = pending.pop(0)
            for row, chosen in enumerate(sampled.result()):
                assert chosen == expected[row][len(answers[row])]
                assert isinstance(chosen, Chosen)
                answers[row].append(chosen.token)
    assert all(batch is batches[0] for batch in batches), "uploaded once"
    assert [len(answer) for answer in answers] == [8] * len(PARAMS)
    assert 3 not in answers[3][:4]
    assert answers[3][4] == 3


def test_rows_that_leave_and_join_keep_their_counts() -> None:
    """Request 3 leaves for a step, and its row moves; request 2 is computed again from its third token."""
    expected, sampler = one_by_one(6), Sampler(EOS)
    histories = [history_of(PROMPT, p) for p in PARAMS]
    at = [0] * len(PARAMS)
    for members in ([0, 2, 3], [0, 2], [3, 2], [4, 3, 2], [2, 3], [0, 4, 3, 1]):
        rows = [
            SamplingRow(PARAMS[i], [one.token for one in expected[i][: at[i]]], histories[i]) for i in members
        ]
        logits = torch.stack([logits_of(at[i])[i] for i in members])
        assert sampler.step(logits, rows).result() == [expected[i][at[i]] for i in members]
        for i in members:
            at[i] += 1
    at[2] = 2
    row = SamplingRow(PARAMS[2], [one.token for one in expected[2][:2]], histories[2])
    assert sampler.step(logits_of(2)[2:3], [row]).result() == [expected[2][2]]


def test_tokens_that_nobody_has_are_not_counted() -> None:
    with pytest.raises(InvariantError, match="1 of 2 tokens"):
        TokenHistory(PROMPT).counts([5], 2, VOCAB, torch.device("cpu"))


def test_logits_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits must be float32 \[1, 50\]"):
        Sampler(EOS).step(logits_of(0), [SamplingRow(PARAMS[0], (), None)])
