"""KV that was evicted comes back from host memory, in the whole system: tokens are those of `generate`, or, on a GPU,
those of our engine unsplit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from architectures import HYBRIDS, save
from conditions import until_async
from local_groups import (
    Checkpoints,
    LocalGroups,
    ask,
    colocated_config,
    local_groups,
    random_prompts,
    small_config,
)
from slow_parameters import sampled

from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import SamplingParams
from disagg.kv.host_tier import HostTierStatistics
from disagg.model.collective.base import SingleCollective
from disagg.model.load.source import ModelSource
from disagg.model.unsplit import generate_unsplit
from disagg.node.assemble import make_runner
from disagg.router.router import Router

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
TOKENS = 5
GREEDY = SamplingParams(max_tokens=TOKENS)
POOL_TOKENS = 256
TEXTS = 5
"""Texts of 100 tokens, about twice what a pool holds."""


def with_tiers(config: Config, *roles: str, **more: Any) -> Config:
    for role in roles:
        group = msgspec.structs.replace(
            getattr(config, role),
            pool_tokens=POOL_TOKENS,
            max_context_tokens=POOL_TOKENS,
            host_cache_bytes=16 << 20,
            **more,
        )
        config = msgspec.structs.replace(config, **{role: group})
    return msgspec.structs.replace(config, model=ModelConfig(dtype="float32"))


def prompts_of(seed: int) -> list[list[int]]:
    """Twice the same texts, which go on differently."""
    texts = random_prompts(*[100] * TEXTS, seed=seed)
    tails = random_prompts(*range(1, 2 * TEXTS + 1), seed=seed + 1)
    return [text + tail for text, tail in zip(texts * 2, tails, strict=True)]


def one_by_one(groups: LocalGroups, prompts: list[list[int]]) -> list[Any]:
    """Answers each prompt after the earlier stores have ended: only a quarter of a pool is stored at once."""
    leaders = [ranks[0] for ranks in groups.groups.values()]

    def stored() -> bool:
        tiers = [leader.statistics()["leader"].memory.host for leader in leaders]
        return all(tier is None or not tier.storing_pages for tier in tiers)

    async def work(router: Router) -> list[Any]:
        answers = []
        for number, prompt in enumerate(prompts):
            answers.append(await ask(router, f"r{number}", prompt, GREEDY))
            await until_async(stored)
        return answers

    answers: list[Any] = groups.serve(work)
    return answers


def expected(
    checkpoints: Checkpoints, config: Config, source: ModelSource, device: str, prompts: list[list[int]]
) -> list[list[int]]:
    if device == "cpu":
        return [checkpoints.greedy(source, prompt, TOKENS) for prompt in prompts]
    group = config.colocated if config.cluster.mode == "colocated" else config.decode
    group = msgspec.structs.replace(group, pool_tokens=4096)
    runner = make_runner(config, group, source, SingleCollective(), torch.device(device))
    return [tokens for prompt in prompts for tokens in generate_unsplit(runner, [prompt], GREEDY)]


def tier_of(ranks: list[Any]) -> HostTierStatistics:
    found: HostTierStatistics | None = ranks[0].statistics()["leader"].memory.host
    assert found is not None
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tp", "pages", "at_once"),
    sampled(
        [(*sizes, at_once) for sizes in (((2, 1), (4, 16)), ((1, 2), (16, 8))) for at_once in (False, True)],
        lambda tp, pages, at_once: at_once == (tp == (2, 1)),
    ),
    ids=str,
)
def test_what_was_evicted_comes_back(
    checkpoints: Checkpoints, tp: tuple[int, int], pages: tuple[int, int], at_once: bool, device: str
) -> None:
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], chunk_tokens=100)
    config = with_tiers(config, "prefill", "decode")
    prompts = prompts_of(3)
    with local_groups(config, checkpoints.source(), device=device) as groups:
        answers = groups.answers(prompts, GREEDY) if at_once else one_by_one(groups, prompts)
        tiers, source = [tier_of(groups.prefill), tier_of(groups.decode)], groups.source
        statuses = [group[0].leader.status() for group in (groups.prefill, groups.decode)]
    assert [one.tokens for one in answers] == expected(checkpoints, config, source, device, prompts)
    if not at_once:
        assert all(tier.loaded_pages > 0 for tier in tiers)
        assert all(one.host_load_tokens_per_s > 0 < one.host_load_s_total for one in statuses)
        assert [one.prompt_tokens_per_s > 0 for one in statuses] == [True, False]
        first, again = (sum(one.report.nbytes for one in each) for each in (answers[:TEXTS], answers[TEXTS:]))
        assert again < first / 2, "what a decode group loads is not sent"


@pytest.mark.parametrize("kind", ["split", "colocated"])
def test_what_was_evicted_comes_back_with_write_back(checkpoints: Checkpoints, kind: str) -> None:
    """Nothing is copied while the pool has room for it."""
    split = kind == "split"
    config, roles = (small_config(1, 2), ["prefill", "decode"]) if split else (colocated_config(), [kind])
    config = with_tiers(config, *roles, host_cache_write="back")
    prompts = prompts_of(9)
    with local_groups(config, checkpoints.source()) as groups:
        assert len(one_by_one(groups, prompts[:1])) == 1
        assert not any(tier_of(groups.groups[role]).stored_pages for role in roles)
        answers = one_by_one(groups, prompts)
        tiers = [tier_of(groups.groups[role]) for role in roles]
    assert [one.tokens for one in answers] == expected(checkpoints, config, groups.source, "cpu", prompts)
    assert all(tier.loaded_pages > 0 for tier in tiers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", [pytest.param("qwen3-next", marks=pytest.mark.slow), "falcon-h1"])
def test_states_come_back_too(
    architecture: str, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory, device: str
) -> None:
    source = ModelSource.from_directory(save(HYBRIDS[architecture](), tmp_path_factory.mktemp(architecture)))
    states = {"state_interval_tokens": 16, "cached_states": 3}
    config = with_tiers(small_config(2, 1, prefill_page=4), "prefill", **states)
    prompts = prompts_of(5)
    with local_groups(config, source, device=device) as groups:
        answers = one_by_one(groups, prompts)
        tier = tier_of(groups.prefill)
    assert [one.tokens for one in answers] == expected(checkpoints, config, source, device, prompts)
    assert tier.loaded_pages > 0
    assert tier.cache.hits > 0
    assert tier.cache.cached_states > 3


@pytest.mark.parametrize("device", DEVICES)
def test_a_colocated_group_loads_in_the_same_step(checkpoints: Checkpoints, device: str) -> None:
    config = with_tiers(colocated_config(), "colocated")
    prompts = prompts_of(7)
    with local_groups(config, checkpoints.source(), device=device) as groups:
        answers = one_by_one(groups, prompts)
        tier, source = tier_of(groups.groups["colocated"]), groups.source
    assert [one.tokens for one in answers] == expected(checkpoints, config, source, device, prompts)
    assert tier.loaded_pages > 0
