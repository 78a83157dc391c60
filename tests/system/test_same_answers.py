"""With `model.deterministic`, in 16 bits: tokens and log-probabilities are the same bits whatever else is served, on
whichever way the KV came: over staging or written to the pool, cached, swapped, computed again, of a fork.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from local_groups import Answered, Checkpoints, ask, local_groups, random_prompts, small_config

from disagg.core.config.read import Config, ModelConfig, RouterConfig
from disagg.core.types import SamplingParams
from disagg.model.collective.base import SingleCollective
from disagg.model.unsplit import generate_unsplit
from disagg.node.assemble import make_runner
from disagg.router.router import Router

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
PROMPTS = random_prompts(40, 21, 30, seed=6)
PRESSED = random_prompts(9, 21, 14, 30, seed=6)
TOKENS = 8
SAMPLINGS = (
    SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=2, temperature=0.8, top_p=0.9, seed=5),
)


def config_of(
    tp: tuple[int, int], preemption: str = "swap", *, pool_tokens: int = 512, **more: Any
) -> Config:
    config = small_config(
        *tp, prefill_page=16, decode_page=4, pool_tokens=pool_tokens, chunk_tokens=24, **more
    )
    decode = msgspec.structs.replace(
        config.decode, preemption=preemption, swap_bytes=4 << 20, chunk_tokens=11, watermark=0.0
    )
    prefill = msgspec.structs.replace(config.prefill, pool_tokens=1024)
    model = ModelConfig(dtype="bfloat16", deterministic=True)
    return msgspec.structs.replace(config, prefill=prefill, decode=decode, model=model)


def uncached(config: Config) -> Config:
    sides = {
        side: msgspec.structs.replace(getattr(config, side), prefix_cache=False)
        for side in ("prefill", "decode")
    }
    return msgspec.structs.replace(config, **sides)


def bits(answer: Answered) -> tuple[Any, ...]:
    """Tokens and log-probabilities, which are compared as numbers, not within a bound."""
    assert len(answer.tokens) == len(answer.logprobs) >= TOKENS
    return answer.tokens, [(one.logprob, one.top) for one in answer.logprobs]


def alone(
    config: Config, source: Any, device: str, sampling: SamplingParams, prompts: Sequence[list[int]] = PROMPTS
) -> list[Any]:
    with local_groups(uncached(config), source, device=device) as groups:
        return [bits(groups.answers([prompt], sampling)[0]) for prompt in prompts]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tp", "way", "sampling"),
    [((1, 1), "swap", SAMPLINGS[0]), ((2, 2), "recompute", SAMPLINGS[1])],
    ids=["swap-greedy", "ranks-recompute-drawn"],
)
def test_alone_and_under_pressure(
    checkpoints: Checkpoints, tp: tuple[int, int], way: str, sampling: SamplingParams, device: str
) -> None:
    source = checkpoints.source("qwen3", 2)
    sampling = msgspec.structs.replace(sampling, max_tokens=14)
    expected = alone(config_of(tp), source, device, sampling, PRESSED)
    config = uncached(config_of(tp, way, pool_tokens=64))
    with local_groups(config, source, device=device) as groups:
        answers = groups.answers(PRESSED, sampling)
        statistics = groups.decode[0].statistics()["leader"]
    assert [bits(answer) for answer in answers] == expected
    assert statistics.swapped_total + statistics.recomputed_total > 0


@pytest.mark.parametrize(
    ("device", "peer_memory"),
    [
        ("cpu", False),
        pytest.param("cuda:0", False, marks=pytest.mark.gpu, id="staged"),
        pytest.param("cuda:0", True, marks=pytest.mark.gpu, id="written"),
    ],
)
@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.gpu), "gemma2"])
def test_split_and_unsplit_cached_and_not(
    checkpoints: Checkpoints, architecture: str, peer_memory: bool, device: str
) -> None:
    source = checkpoints.source(architecture, 2)
    config = config_of((1, 1), peer_memory=peer_memory)
    greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    runner = make_runner(config, config.decode, source, SingleCollective(), torch.device(device))
    expected = generate_unsplit(runner, PROMPTS, greedy)
    with local_groups(config, source, device=device) as groups:
        first = groups.answers(PROMPTS, SAMPLINGS[0])
        again = groups.answers(PROMPTS, SAMPLINGS[0])
        longer = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
        beyond = groups.answers(longer, SAMPLINGS[0])
        cached = groups.prefill[0].statistics()["leader"].memory.cache
        fresh = alone(config, source, device, SAMPLINGS[0])
    assert [answer.tokens for answer in first] == expected
    assert [bits(answer) for answer in again] == [bits(answer) for answer in first] == fresh
    with local_groups(uncached(config), source, device=device) as groups:
        assert [bits(a) for a in groups.answers(longer, SAMPLINGS[0])] == [bits(answer) for answer in beyond]
    assert cached.hit_tokens > 0


@pytest.mark.parametrize("device", DEVICES)
def test_forks(checkpoints: Checkpoints, device: str) -> None:
    """Several answers, whose rows read the same pages, are those of requests that are made one by one."""
    source = checkpoints.source("qwen3", 2)
    together = msgspec.structs.replace(SAMPLINGS[1], n=3)

    async def work(router: Router) -> Any:
        return await asyncio.gather(*(ask(router, f"r{i}", p, together) for i, p in enumerate(PROMPTS)))

    config = config_of((1, 1))
    with local_groups(config, source, device=device) as groups:
        busy = groups.serve(work)
    with local_groups(uncached(config), source, device=device) as groups:
        one_by_one = [groups.answers([prompt], together)[0] for prompt in PROMPTS]
    for a, b in zip(busy, one_by_one, strict=True):
        assert sorted(map(str, a.logprobs)) == sorted(map(str, b.logprobs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn"])
def test_prompts_of_decode_groups(checkpoints: Checkpoints, sampling: SamplingParams, device: str) -> None:
    """Their chunks share steps with answers, and the first token is sampled in a decode step."""
    source, config = checkpoints.source("qwen3", 2), config_of((1, 1))
    expected = alone(config, source, device, sampling)
    decode = msgspec.structs.replace(config.decode, local_prefill_tokens=5)
    router = RouterConfig(local_prefill_queue_tokens=0, local_prefill_cost=0.0)
    config = uncached(msgspec.structs.replace(config, decode=decode, router=router))
    with local_groups(config, source, device=device) as groups:
        answers = groups.answers(PROMPTS, sampling)
    assert [one.report.prefill for one in answers] == ["decode"] * len(PROMPTS)
    assert [bits(answer) for answer in answers] == expected
