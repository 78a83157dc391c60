"""Requests with `priority` through whole systems: a full group admits the lowest number first."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from conditions import PATIENCE_S, until_async
from local_groups import Checkpoints, colocated_config, local_groups, random_prompts, small_config

from disagg.core.config.read import Config
from disagg.core.types import SamplingParams
from disagg.router.answers import Output, RouterRequest
from disagg.router.router import Router

QUEUED = {"batch-1": 5, "batch-2": 5, "interactive": 0, "batch-3": 5, "urgent": -1}


def one_request(config: Config, role: str) -> Config:
    """The group has room for one request."""
    return msgspec.structs.replace(
        config, **{role: msgspec.structs.replace(getattr(config, role), max_requests=1)}
    )


@pytest.mark.parametrize("role", ["decode", "colocated"])
def test_a_full_group_admits_by_priority(role: str, checkpoints: Checkpoints) -> None:
    """The first request decodes, and its step is held until all others wait."""
    config = one_request(small_config() if role == "decode" else colocated_config(async_steps=False), role)
    source, go, begun = checkpoints.source(), threading.Event(), list[str]()
    (prompt,) = random_prompts(20)

    async def run(router: Router, name: str, priority: int) -> list[int]:
        tokens: list[int] = []

        def emit(output: Output) -> None:
            begun.extend([name] * (output.index == 0))
            tokens.extend(output.tokens)

        sampling = SamplingParams(max_tokens=4)
        await router.run(RouterRequest(name, prompt, sampling, PATIENCE_S, priority=priority), emit)
        return tokens

    with local_groups(config, source) as groups:
        rank = groups.groups[role][0]
        compute = rank.executor.run

        def held(plan: Any, *rest: Any) -> Any:
            if any(work.start >= work.prompt_tokens for work in plan.work):
                assert go.wait(PATIENCE_S)
            return compute(plan, *rest)

        rank.executor.run = held

        async def work(router: Router) -> list[list[int]]:
            tasks = [asyncio.create_task(run(router, "first", 9))]
            await until_async(lambda: begun)
            for count, (name, priority) in enumerate(QUEUED.items(), 1):
                tasks.append(asyncio.create_task(run(router, name, priority)))
                await until_async(lambda count=count: len(rank.leader.waiting) >= count)  # type: ignore[misc]
            go.set()
            return await asyncio.gather(*tasks)

        answers = groups.serve(work)
    assert begun == ["first", "urgent", "interactive", "batch-1", "batch-2", "batch-3"]
    assert answers == [checkpoints.greedy(source, prompt, 4)] * len(begun)
