"""Many requests at once, of which some are cancelled in the middle; the others must be exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from local_groups import LocalGroups, ask

from disagg.core.types import SamplingParams
from disagg.router.router import Router
from transport.control import messages as m


def answers_with_aborts(
    groups: LocalGroups,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    victims: Mapping[int, int],
) -> list[Any]:
    """What each prompt was answered, or why not. Of `victims`, by index, each is cancelled when that many messages of
    it have passed between any two ranks, a router included.
    """

    async def work(router: Router) -> list[Any]:
        loop, passed = asyncio.get_running_loop(), dict.fromkeys(victims, 0)
        tasks = [
            asyncio.create_task(ask(router, f"r{i}", prompt, sampling)) for i, prompt in enumerate(prompts)
        ]

        def observe(origin: str, destination: str, message: m.Message) -> None:
            key = getattr(message, "key", None)
            index = int(key.request_id[1:]) if key is not None else -1
            if index in passed:
                passed[index] += 1
                if passed[index] == victims[index]:
                    loop.call_soon_threadsafe(tasks[index].cancel)

        groups.observe(observe)
        return await asyncio.gather(*tasks, return_exceptions=True)

    results: list[Any] = groups.serve(work)
    return results


def check_survivors(
    results: Sequence[Any], victims: Mapping[int, int], expected: Callable[[int], Sequence[int]]
) -> list[int]:
    """Nobody but victims was cancelled, all others have the tokens of `expected`. Returns who was cancelled."""
    cancelled = [i for i, result in enumerate(results) if isinstance(result, asyncio.CancelledError)]
    assert set(cancelled) <= set(victims)
    for index, result in enumerate(results):
        if index not in cancelled:
            assert result.tokens == expected(index), index
    return cancelled
