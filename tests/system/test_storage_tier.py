"""KV comes back from a storage, after a restart and in groups of another size: tokens are those of `generate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
from local_groups import (
    TIMEOUT_S,
    Checkpoints,
    LocalGroups,
    ask,
    local_groups,
    random_prompts,
    small_config,
)

from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import SamplingParams
from disagg.kv.storage_tier import StorageTierStatistics
from disagg.router.router import Router

TOKENS = 4
GREEDY = SamplingParams(max_tokens=TOKENS)
PROMPTS = random_prompts(100, 90, seed=11)


def with_storage(folder: Path, config: Config, *roles: str, **more: Any) -> Config:
    settings = {
        "host_cache_bytes": 16 << 20,
        "storage": str(folder),
        "storage_bytes": 4 << 20,
        "prefetch_base_s": TIMEOUT_S,
        "prefetch_min_tokens": 1,
        **more,
    }
    for role in roles:
        group = msgspec.structs.replace(getattr(config, role), **settings)
        config = msgspec.structs.replace(config, **{role: group})
    return msgspec.structs.replace(config, model=ModelConfig(dtype="float32"))


def tier_of(ranks: list[Any]) -> StorageTierStatistics:
    found: StorageTierStatistics = ranks[0].statistics()["leader"].memory.host.storage
    return found


def serve(groups: LocalGroups, prompts: list[list[int]]) -> list[list[int]]:
    async def work(router: Router) -> list[list[int]]:
        return [(await ask(router, f"r{i}", prompt, GREEDY)).tokens for i, prompt in enumerate(prompts)]

    answers: list[list[int]] = groups.serve(work)
    return answers


def wait_until_written(ranks: list[Any], pages: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while tier_of(ranks).written_pages < pages:
        assert time.monotonic() < deadline_s, tier_of(ranks)
        time.sleep(0.005)


def test_a_restarted_group_of_another_size_reads_the_pages(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints.source()
    expected = [checkpoints.greedy(source, prompt, TOKENS) for prompt in PROMPTS]
    config = with_storage(tmp_path, small_config(2, 1), "prefill")
    with local_groups(config, source) as groups:
        assert serve(groups, PROMPTS) == expected
        wait_until_written(groups.prefill, 6 + 5)
    config = with_storage(tmp_path, small_config(1, 1), "prefill")
    with local_groups(config, source) as groups:
        assert serve(groups, PROMPTS) == expected
        tier = tier_of(groups.prefill)
        assert tier.fetched_pages == 6 + 5
        memory = groups.prefill[0].statistics()["leader"].memory
        assert memory.host.loaded_pages == 6 + 5
