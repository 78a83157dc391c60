"""Sampling's options through the whole split system: both sides apply the same rules, and logprobs come along."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from local_groups import Answered, Checkpoints, ask, local_groups, random_prompts, small_config

from disagg.core.errors import InvalidRequestError
from disagg.core.types import SamplingParams
from disagg.model.collective.base import SingleCollective
from disagg.model.load.source import ModelSource
from disagg.model.load.tiny import EOS_ID, VOCAB_SIZE
from disagg.model.unsplit import generate_unsplit
from disagg.node.assemble import make_runner
from disagg.router.router import Router

TOKENS = 10
PENALISED = SamplingParams(
    max_tokens=TOKENS, repetition_penalty=1.3, presence_penalty=0.9, frequency_penalty=1.1, logprobs=2
)


def served(
    source: ModelSource,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    tp: tuple[int, int] = (2, 1),
) -> list[Answered]:
    """All at once, each with its own sampling."""

    async def work(router: Router) -> list[Answered]:
        return await asyncio.gather(
            *(ask(router, f"r{i}", p, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True)))
        )

    with local_groups(small_config(*tp), source) as groups:
        answers: list[Answered] = groups.serve(work)
        return answers


def plain_best(logits: torch.Tensor, params: SamplingParams, prompt: list[int], answer: list[int]) -> int:
    """The likeliest token behind `answer`, by the penalties' definitions; `logits`: `[vocab]`."""
    scores = logits.tolist()
    for token in {*prompt, *answer}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token, count in Counter(answer).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    return max(range(len(scores)), key=scores.__getitem__)


def test_penalties_and_logprobs_beside_requests_without(checkpoints: Checkpoints) -> None:
    """Tokens are the reference's, logprobs those of a float32 log_softmax over Hugging Face's logits."""
    source = checkpoints.source()
    prompts = random_prompts(40, 33, 9, 25, seed=11)
    plain = SamplingParams(max_tokens=TOKENS)
    with_logprobs = SamplingParams(max_tokens=TOKENS, logprobs=5)
    penalised, other, silent, greedy = served(
        source, prompts, [PENALISED, plain, plain, with_logprobs], (2, 3)
    )
    for prompt, answer in ((prompts[1], other), (prompts[2], silent), (prompts[3], greedy)):
        assert answer.tokens == checkpoints.greedy(source, prompt, TOKENS)
    assert other.logprobs == silent.logprobs == []
    assert penalised.tokens != checkpoints.greedy(source, prompts[0], TOKENS)
    for prompt, answer, count in ((prompts[0], penalised, 2), (prompts[3], greedy, 5)):
        logits = checkpoints.logits(source, [*prompt, *answer.tokens[:-1]])[-TOKENS:]
        wanted = torch.log_softmax(logits, dim=-1)
        assert [one.token for one in answer.logprobs] == answer.tokens
        for i, one in enumerate(answer.logprobs):
            if answer is penalised:
                assert one.token == plain_best(logits[i], PENALISED, prompt, answer.tokens[:i])
            assert one.logprob == pytest.approx(float(wanted[i, one.token]), abs=1e-4)
            assert [token for token, _ in one.top] == wanted[i].topk(count).indices.tolist()
            for token, logprob in one.top:
                assert logprob == pytest.approx(float(wanted[i, token]), abs=1e-4)


def test_seeds_and_every_option_at_once_split_as_unsplit(checkpoints: Checkpoints) -> None:
    source = checkpoints.source()
    prompts = random_prompts(33, 18, 50, seed=4)
    params = SamplingParams(
        max_tokens=TOKENS,
        temperature=1.1,
        top_k=50,
        top_p=0.97,
        min_p=0.02,
        seed=7,
        min_tokens=4,
        presence_penalty=0.5,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias=((EOS_ID, 8.0), (65, 2.0)),
    )
    samplings = [params, SamplingParams(max_tokens=TOKENS, temperature=1.1, seed=7), params]
    config = small_config()
    runner = make_runner(config, config.decode, source, SingleCollective(), torch.device("cpu"))
    expected = generate_unsplit(runner, prompts, samplings)
    assert [a.tokens for a in served(source, prompts, samplings)] == expected
    assert len(expected[0]) >= 4


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_nothing_ends_an_answer_before_its_shortest_length(checkpoints: Checkpoints, min_tokens: int) -> None:
    """The bias makes EOS the likeliest token; token 0 is chosen by the prefill side, the next ones by the other."""
    params = SamplingParams(max_tokens=6, min_tokens=min_tokens, logit_bias=((EOS_ID, 100.0),))
    [answer] = served(checkpoints.source(), random_prompts(20), [params], (1, 1))
    assert len(answer.tokens) == min_tokens + 1
    assert answer.tokens.index(EOS_ID) == min_tokens
    assert answer.finish == "stop"


@pytest.mark.parametrize(
    ("params", "what"),
    [
        (SamplingParams(min_p=2.0), "min_p = 2.0 is not allowed; it must be 0"),
        (
            SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)),
            f"logit_bias has token {VOCAB_SIZE}.* 0 to {VOCAB_SIZE - 1}",
        ),
        (SamplingParams(stop_token_ids=(5, 1 << 40)), f"stop_token_ids has token {1 << 40}"),
    ],
)
def test_bad_values_are_refused_and_others_go_on(
    checkpoints: Checkpoints, params: SamplingParams, what: str
) -> None:
    source, prompts = checkpoints.source(), random_prompts(20, 20)

    async def work(router: Router) -> Answered:
        with pytest.raises(InvalidRequestError, match=what):
            await ask(router, "bad", prompts[0], params)
        return await ask(router, "good", prompts[1], SamplingParams(max_tokens=3))

    with local_groups(small_config(), source) as groups:
        assert groups.serve(work).tokens == checkpoints.greedy(source, prompts[1], 3)
