"""Groups with a storage, for tests: their settings, what they have stored, and requests one after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from conditions import PATIENCE_S, until, until_async
from local_groups import LocalGroups, ask, random_prompts

from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import SamplingParams
from disagg.kv.storage_tier import StorageTierStatistics
from disagg.router.router import Router

TOKENS = 4
GREEDY = SamplingParams(max_tokens=TOKENS)
PROMPTS = random_prompts(100, 90, seed=11)


def with_storage(where: Path | str, config: Config, *roles: str, **more: Any) -> Config:
    """`where`: a folder or a URL. Prompts wait for all pages that are stored."""
    settings = {
        "host_cache_bytes": 16 << 20,
        "storage": str(where),
        "storage_bytes": 4 << 20,
        "prefetch_base_s": PATIENCE_S,
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


def serve(groups: LocalGroups, prompts: Sequence[list[int]]) -> list[list[int]]:
    async def work(router: Router) -> list[list[int]]:
        return [(await ask(router, f"r{i}", prompt, GREEDY)).tokens for i, prompt in enumerate(prompts)]

    answers: list[list[int]] = groups.serve(work)
    return answers


def serve_one_by_one(groups: LocalGroups, ranks: list[Any], prompts: Sequence[list[int]]) -> list[list[int]]:
    """Like `serve`; between two requests, stores and writes of `ranks` end."""

    async def work(router: Router) -> list[list[int]]:
        answers = []
        for i, prompt in enumerate(prompts):
            answers.append((await ask(router, f"r{i}", prompt, GREEDY)).tokens)
            await until_async(lambda: all_written(ranks))
        return answers

    answers: list[list[int]] = groups.serve(work)
    return answers


def all_written(ranks: list[Any], pages: int = 0, states: int = 0) -> bool:
    """Whether so many are written, and no store or write is under way."""
    host = ranks[0].statistics()["leader"].memory.host
    enough = host.storage.written_pages >= pages and host.storage.written_states >= states
    return enough and not (host.storing_pages or host.storage.writing_pages)


def wait_until_written(ranks: list[Any], pages: int, states: int = 0) -> None:
    until(lambda: all_written(ranks, pages, states), lambda: tier_of(ranks))
