"""Log-probabilities of prompts through whole systems: those of Hugging Face's logits, in every kind of group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from architectures import HYBRIDS, MORE_HYBRIDS, save
from local_groups import (
    Answered,
    Checkpoints,
    LocalGroups,
    ask,
    colocated_config,
    local_groups,
    random_prompts,
    small_config,
)

from disagg.core.config.read import Config
from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.model.load.source import ModelSource
from disagg.router.router import Router

TOKENS = 5
SCORED = SamplingParams(max_tokens=TOKENS, prompt_logprobs=3)
CONFIGS = {
    "split": lambda: small_config(),
    "split, tp 2 to 1": lambda: small_config(2, 1, prefill_page=4),
    "colocated": lambda: colocated_config(),
    "colocated, tp 2": lambda: colocated_config(2, chunk_tokens=17),
}


def check_scores(
    found: Sequence[TokenLogprobs],
    prompt: Sequence[int],
    count: int,
    checkpoints: Checkpoints,
    source: ModelSource,
) -> None:
    """Compares with a float32 log_softmax of the reference's logits."""
    logits = checkpoints.logits(source, prompt)
    right = logits.log_softmax(dim=-1)
    assert [one.token for one in found] == list(prompt[1:])
    for at, one in enumerate(found):
        assert one.logprob == pytest.approx(right[at, one.token].item(), abs=1e-4)
        assert one.rank == int((logits[at] >= logits[at, one.token]).sum())
        assert [value for _, value in one.top] == pytest.approx(
            right[at].topk(count).values.tolist(), abs=1e-4
        )
        assert all(value == pytest.approx(right[at, token].item(), abs=1e-4) for token, value in one.top)


def served(
    groups: LocalGroups, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]
) -> list[Answered]:
    async def work(router: Router) -> list[Answered]:
        both = enumerate(zip(prompts, samplings, strict=True))
        return await asyncio.gather(*(ask(router, f"r{i}", p, s) for i, (p, s) in both))

    answers: list[Answered] = groups.serve(work)
    return answers


@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_those_of_transformers(
    name: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several chunks beside each other, and beside a request without; logits come in parts of 7 tokens."""
    monkeypatch.setattr("disagg.model.sampling.prompt_scores.PART_BYTES", 7 * 4 * 259)
    monkeypatch.setattr("disagg.node.prompt_logprobs.MESSAGE_PAIRS", 50)
    source, prompts = checkpoints.source(), random_prompts(61, 1, 9, 40, 2, seed=4)
    plain = SamplingParams(max_tokens=TOKENS)
    zero = SamplingParams(max_tokens=TOKENS, prompt_logprobs=0)
    samplings = [SCORED, SCORED, zero, plain, SCORED]
    with local_groups(CONFIGS[name](), source) as groups:
        first, again = (served(groups, prompts, samplings) for _ in range(2))
    for answers in (first, again):  # a second time, with a prefix cache that has every prompt
        for answer, prompt, sampling in zip(answers, prompts, samplings, strict=True):
            assert answer.tokens == checkpoints.greedy(source, prompt, TOKENS)
            if sampling is plain:
                assert not answer.prompt_logprobs
            else:
                check_scores(
                    answer.prompt_logprobs, prompt, sampling.prompt_logprobs or 0, checkpoints, source
                )
    assert again[0].report.cached_tokens == 0, "all of a scored prompt is computed"
    assert again[3].report.cached_tokens


@pytest.mark.parametrize(("name", "config"), [("falcon-h1", colocated_config()), ("minimax", small_config())])
def test_models_with_recurrent_layers(
    name: str, config: Config, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Falcon H1's layers are registered, so a step is one model call; MiniMax's prompts are computed one by one."""
    source = ModelSource.from_directory(save((HYBRIDS | MORE_HYBRIDS)[name](), tmp_path))
    prompts = random_prompts(61, 30, seed=4)
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SCORED)
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.tokens == checkpoints.greedy(source, prompt, TOKENS)
        check_scores(answer.prompt_logprobs, prompt, 3, checkpoints, source)
