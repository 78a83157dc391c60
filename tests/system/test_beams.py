"""Beam search through the whole system: answer for answer what transformers' own finds."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from local_groups import Answered, Checkpoints, LocalGroups, ask, local_groups, random_prompts, small_config
from slow_parameters import sampled

from disagg.core.config.read import ModelConfig
from disagg.core.types import SamplingParams
from disagg.router.router import Router


def searched(groups: LocalGroups, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[Answered]:
    """All at once."""

    async def work(router: Router) -> list[Answered]:
        asks = [ask(router, f"{i}", *one) for i, one in enumerate(zip(prompts, sampling, strict=True))]
        return list(await asyncio.gather(*asks))

    return groups.serve(work)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "beams": 3, "n": 2, **fields})


SEARCHES = [
    params(),
    params(beams=1, n=1),
    params(beams=5, n=5),
    params(beams=4, n=1, ignore_eos=True),
    params(length_penalty=0.0),
    params(length_penalty=2.5, early_stopping="never"),
    params(length_penalty=-1.0),
    params(early_stopping=True),
    params(max_tokens=1, beams=4, n=3),
    params(max_tokens=30, stop_token_ids=tuple(range(32, 60))),
    params(max_tokens=30, stop_token_ids=tuple(range(32, 60)), early_stopping=True, beams=4),
    params(max_tokens=30, stop_token_ids=tuple(range(32, 60)), early_stopping="never", length_penalty=0.0),
    params(max_tokens=20, stop_token_ids=tuple(range(32, 100)), min_tokens=6),
    params(
        max_tokens=30,
        stop_token_ids=tuple(range(32, 100)),
        beams=1,
        n=1,
        early_stopping="never",
        length_penalty=2.0,
    ),
]


@pytest.mark.parametrize(
    ("tp", "pages"),
    sampled(
        itertools.product([(1, 1), (2, 3)], [(16, 16), (4, 1), (2, 8)]),
        lambda tp, pages: (tp == (1, 1)) == (pages == (16, 16)),
    ),
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_beams_are_those_of_transformers(
    checkpoints: Checkpoints, tp: tuple[int, int], pages: tuple[int, int], device: str
) -> None:
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], max_requests=40, pool_tokens=8192)
    config = msgspec.structs.replace(config, model=ModelConfig(dtype="float32"))
    prompts = random_prompts(*range(7, 7 + 5 * len(SEARCHES), 5), seed=11)
    with local_groups(config, checkpoints.source(), device) as groups:
        answers = searched(groups, prompts, SEARCHES)
        source = groups.source
    for prompt, sampling, answer in zip(prompts, SEARCHES, answers, strict=True):
        assert answer.report.answers == checkpoints.beams(source, prompt, sampling), sampling
