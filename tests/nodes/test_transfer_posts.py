"""What is posted to a transfer thread: its order, and whether the thread is woken for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from conditions import PATIENCE_S
from local_groups import Checkpoints, local_groups, random_prompts, small_config

from disagg.core.errors import RequestTimeoutError
from disagg.core.types import SamplingParams
from disagg.node.transfer_loop import TransferLoop


class Waiting:
    """A transport on which nothing comes: `wait` returns when woken, and counts how often it was."""

    def __init__(self) -> None:
        self.woken, self._news = 0, threading.Event()

    def wake(self) -> None:
        self.woken += 1
        self._news.set()

    def wait(self, timeout_s: float) -> None:
        self._news.wait(timeout_s)
        self._news.clear()

    def progress(self) -> list[Any]:
        return []

    arrivals = lost_peers = progress

    def close(self) -> None: ...


class Idle:
    """An agent with nothing to do for an hour."""

    def poll(self, now_s: float) -> float:
        return 3600.0

    def begin_turn(self) -> None: ...

    def may_block(self) -> bool:
        return True


class Found(Idle):
    """An agent that finds work each time before its thread blocks, until it has found some."""

    def __init__(self) -> None:
        self.left, self.found = 5, threading.Event()

    def may_block(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.found.set()
        return self.left <= 0


def test_a_thread_does_not_block_while_its_agent_finds_work() -> None:
    transport, agent = Waiting(), Found()
    loop = TransferLoop("test", transport, agent)  # type: ignore[arg-type] # of each, what the loop uses
    loop.start()
    assert agent.found.wait(PATIENCE_S)
    loop.stop()


def test_what_wakes_nobody_runs_before_what_is_posted_next() -> None:
    transport, ran = Waiting(), list[int]()
    loop = TransferLoop("test", transport, Idle())  # type: ignore[arg-type] # of each, what the loop uses

    def work(number: int) -> Callable[[], None]:
        return lambda: ran.append(number)

    loop.post(work(0), wake=False)
    loop.post(work(1), wake=False)
    assert transport.woken == 0
    loop.post(work(2))
    assert transport.woken == 1
    loop.start()
    loop.call(work(3))
    loop.post(work(4), wake=False)
    loop.stop()
    assert ran == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("peer_memory", [False, True], ids=["staged", "written"])
def test_a_prompt_that_is_never_computed_is_closed(checkpoints: Checkpoints, peer_memory: bool) -> None:
    """Told of without waking anybody, and closed: the close comes behind it. The book-keeping is `local_groups`'."""
    (prompt,) = random_prompts(40)
    with local_groups(small_config(peer_memory=peer_memory), checkpoints.source()) as groups:
        leader = groups.prefill[0].leader
        leader.scheduler.next_step = lambda: None

        async def work(router: Any) -> None:
            outputs = router.generate("r", prompt, SamplingParams(max_tokens=2), timeout_s=0.3)
            with pytest.raises(RequestTimeoutError):
                await anext(outputs)

        groups.serve(work)
