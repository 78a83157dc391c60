"""Penalties, bias, shortest answers and log-probabilities, against transformers and against plain Python."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import load_plain, make_runner, prompts
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from disagg.core.errors import RequestError
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.model.sampling.batch import SamplingBatch
from disagg.model.sampling.next_tokens import next_tokens
from disagg.model.sampling.penalties import SamplingRow, history_of
from disagg.model.sampling.sampled import Chosen
from disagg.model.unsplit import generate_unsplit

VOCAB = 40
EOS = (3, 38)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def random_tokens(count: int, seed: int) -> list[int]:
    """From a few tokens only, so that they repeat."""
    return random.Random(seed).choices(range(0, VOCAB, 3), k=count)


def row_of(
    params: SamplingParams, prompt: list[int] | None = None, answer: list[int] | None = None
) -> SamplingRow:
    return SamplingRow(params, answer or [], history_of(prompt or [1], params))


def adjust(logits: torch.Tensor, rows: list[SamplingRow], eos_ids: tuple[int, ...]) -> torch.Tensor:
    return SamplingBatch(rows, eos_ids, VOCAB, logits.device).adjusted(logits)


def plain_adjusted(
    logits: list[float], params: SamplingParams, prompt: list[int], answer: list[int]
) -> list[float]:
    """The rules, one token at a time."""
    counts, out = Counter(answer), list(logits)
    for token in {*prompt, *answer}:
        by = params.repetition_penalty
        out[token] = out[token] * by if out[token] < 0 else out[token] / by
    for token, count in counts.items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        out[token] += bias
    if len(answer) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else EOS)):
            out[token] = -math.inf
    return out


@pytest.mark.parametrize("penalty", [0.3, 1.3, 5.0])
@pytest.mark.parametrize("answer_tokens", [0, 1, 9])
def test_repetition_penalty_is_that_of_transformers(penalty: float, answer_tokens: int) -> None:
    logits, prompt, answer = random_logits(1), random_tokens(7, 1), random_tokens(answer_tokens, 2)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits.clone())
    found = adjust(logits, [row_of(SamplingParams(repetition_penalty=penalty), prompt, answer)], EOS)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, logits)


@pytest.mark.parametrize("answer_tokens", [0, 2, 3, 4])
def test_min_tokens_is_that_of_transformers(answer_tokens: int) -> None:
    logits, prompt, answer = random_logits(1), random_tokens(7, 1), random_tokens(answer_tokens, 2)
    plain = MinNewTokensLengthLogitsProcessor(len(prompt), 3, list(EOS), device="cpu")
    wanted = plain(torch.tensor([prompt + answer]), logits.clone())
    assert torch.equal(adjust(logits, [row_of(SamplingParams(min_tokens=3), prompt, answer)], EOS), wanted)


MIXED = [
    SamplingParams(),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=-0.7),
    SamplingParams(repetition_penalty=1.4, presence_penalty=-2.0, frequency_penalty=2.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(logit_bias=((3, 7), (0, -100.0), (3, 1.5))),
    SamplingParams(min_tokens=90, max_tokens=99, stop_token_ids=(9, 11)),
    SamplingParams(min_tokens=90, max_tokens=99, stop_token_ids=(9,), ignore_eos=True),
    SamplingParams(repetition_penalty=0.8, logit_bias=((3, 50.0), (12, 2.0)), min_tokens=1),
]


@pytest.mark.parametrize("seed", range(5))
def test_mixed_rows_against_plain_python_token_by_token(seed: int) -> None:
    """Histories are kept from step to step, as a group keeps them; rows without penalties keep their bits."""
    cases = [
        (params, random_tokens(6, seed + n), random_tokens(8, seed + 50 + n))
        for n, params in enumerate(MIXED)
    ]
    rows: list[SamplingRow] = [row_of(params, prompt) for params, prompt, _ in cases]
    for step in range(8):
        logits = random_logits(len(rows), seed * 100 + step)
        before = logits.clone()
        found = adjust(logits, rows, EOS)
        assert torch.equal(logits, before), "the model's logits are not changed"
        for i, (params, prompt, answer) in enumerate(cases):
            wanted = plain_adjusted(before[i].tolist(), params, prompt, answer[:step])
            torch.testing.assert_close(found[i], torch.tensor(wanted), rtol=1e-6, atol=1e-5)
            rows[i].answer.append(answer[step])  # type: ignore[attr-defined]
        for i in (0, 4):
            assert torch.equal(found[i], before[i])


def test_plain_sampling_does_no_extra_work() -> None:
    logits = random_logits(3)
    plain = SamplingParams(temperature=1.0, top_k=3, min_p=0.1, stop_token_ids=(1,), logprobs=3)
    assert adjust(logits, [row_of(plain)] * 3, EOS) is logits
    assert history_of([1], plain) is None


def test_an_eos_outside_the_vocabulary_changes_no_logit() -> None:
    found = adjust(random_logits(1), [row_of(SamplingParams(min_tokens=1))], (VOCAB, VOCAB + 9, 3))
    assert torch.isinf(found).nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_others_tokens_are_unchanged_beside_penalties(temperature: float) -> None:
    logits, answer = random_logits(4), random_tokens(5, 1)
    plain = [SamplingParams(temperature=temperature, seed=n) for n in range(4)]
    alone = next_tokens(logits, [row_of(params, answer=answer) for params in plain], EOS)
    heavy = SamplingParams(temperature=temperature, seed=2, repetition_penalty=9.0, logit_bias=((7, 100.0),))
    rows = [row_of(heavy if n == 2 else params, answer=answer) for n, params in enumerate(plain)]
    mixed = next_tokens(logits, rows, EOS)
    assert [mixed[n] for n in (0, 1, 3)] == [alone[n] for n in (0, 1, 3)]
    assert mixed[2] == Chosen(7, None) != alone[2]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_logprobs_are_of_the_models_own_distribution(temperature: float) -> None:
    logits = random_logits(4)
    counts = [None, 0, 3, 20]
    params = [
        SamplingParams(temperature=temperature, seed=4, logprobs=count, logit_bias=((5, 100.0),))
        for count in counts
    ]
    found = next_tokens(logits, [row_of(one) for one in params], EOS)
    wanted = torch.log_softmax(logits.double(), dim=-1)
    for i, (count, chosen) in enumerate(zip(counts, found, strict=True)):
        assert isinstance(chosen, Chosen)
        assert chosen.token == 5
        if count is None:
            assert chosen.logprobs is None
            continue
        assert chosen.logprobs is not None
        assert (chosen.logprobs.token, len(chosen.logprobs.top)) == (5, count)
        assert chosen.logprobs.logprob == pytest.approx(float(wanted[i, 5]), abs=1e-5)
        best = wanted[i].topk(count)
        assert [token for token, _ in chosen.logprobs.top] == best.indices.tolist()
        assert [value for _, value in chosen.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_more_logprobs_than_tokens_and_bad_rows() -> None:
    logits = torch.randn(2, 4)
    logits[0, 1] = float("nan")
    bad, good = next_tokens(logits, [row_of(SamplingParams(logprobs=20))] * 2, ())
    assert isinstance(bad, RequestError)
    assert isinstance(good, Chosen)
    assert good.logprobs is not None
    assert len(good.logprobs.top) == 4
    assert good.logprobs.top[0] == (good.token, good.logprobs.logprob)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("sampled") / "llama", layers=2, hidden=96, mlp=96)


def plain_answer(model: Any, prompt: list[int], **flags: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, **flags
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def test_greedy_answers_with_penalties_are_those_of_generate(tiny: Path) -> None:
    runner, model = make_runner(tiny), load_plain(tiny)
    params = SamplingParams(max_tokens=12, repetition_penalty=1.8, ignore_eos=True)
    found = generate_unsplit(runner, prompts(), params)
    assert found == [plain_answer(model, prompt, repetition_penalty=1.8) for prompt in prompts()]
    assert found != generate_unsplit(runner, prompts(), SamplingParams(max_tokens=12, ignore_eos=True))


def test_seeds_repeat_with_penalties_whatever_the_chunks(tiny: Path) -> None:
    runner = make_runner(tiny)
    params = SamplingParams(
        max_tokens=12, temperature=1.1, seed=3, presence_penalty=1.0, repetition_penalty=1.2
    )
    first = generate_unsplit(runner, prompts(), params)
    assert generate_unsplit(runner, prompts(), params, chunk_tokens=5) == first
    assert [generate_unsplit(runner, [prompt], params)[0] for prompt in prompts()] == first
