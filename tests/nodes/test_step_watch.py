"""Which steps count as hanging, and what a hanging step does to its group."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from typing import Any

import msgspec
import pytest
from local_groups import Checkpoints, LocalGroups, ask, random_prompts, small_config
from slow_parameters import sampled

from disagg.core.config.read import ClusterConfig
from disagg.core.errors import PeerLostError
from disagg.core.types import SamplingParams
from disagg.node.step_watch import FACTOR, PAUSE_S, StepWatch
from disagg.router.router import Router

LONG_S = 60.0


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def looks(watch: StepWatch, time: Time, seconds: float) -> float:
    """Looks once a second for a while; returns what the last look found."""
    found = 0.0
    for _ in range(round(seconds)):
        time.now_s += 1.0
        found = watch.overdue_s()
    return found


def step(watch: StepWatch, time: Time, seconds: float) -> None:
    watch.begins()
    looks(watch, time, seconds)
    watch.ended()


def test_the_limit_is_a_multiple_of_the_longest_step_with_a_floor() -> None:
    time = Time()
    watch = StepWatch(30.0, time)
    step(watch, time, 1)
    assert watch.limit_s == 30.0
    watch.begins()
    assert looks(watch, time, 30) == 0.0
    assert looks(watch, time, 1) == 31.0
    watch.ended()
    assert watch.limit_s == FACTOR * 31.0
    step(watch, time, 2)
    assert watch.limit_s == FACTOR * 31.0, "the longest, not the latest"


def test_without_a_step_nothing_is_overdue() -> None:
    time = Time()
    watch = StepWatch(30.0, time)
    assert looks(watch, time, 100) == 0.0
    watch.begins()
    assert looks(watch, time, 30) == 0.0, "the time before the step does not count"


def test_a_pause_of_the_process_does_not_count() -> None:
    time = Time()
    watch = StepWatch(30.0, time)
    watch.begins()
    assert looks(watch, time, 5) == 0.0
    time.now_s += 1000.0 + PAUSE_S
    assert looks(watch, time, 25) == 0.0
    assert looks(watch, time, 2) > 30.0
    watch.ended()
    watch.begins()
    assert looks(watch, time, 30) == 0.0


@pytest.mark.parametrize(
    ("role", "rank"),
    sampled(
        itertools.product(["prefill", "decode"], [0, 1]),
        lambda role, rank: (role == "prefill") == (rank == 1),
    ),
)
def test_a_step_that_never_ends_breaks_the_group(checkpoints: Checkpoints, role: str, rank: int) -> None:
    """The other rank waits in a collective meanwhile; the request ends long before its time is up."""
    config = msgspec.structs.replace(small_config(2, 2), cluster=ClusterConfig(step_timeout_s=0.5))
    groups = LocalGroups(config, checkpoints.source())
    hanging, goes_on = getattr(groups, role)[rank], threading.Event()
    reasons: queue.Queue[str] = queue.Queue()
    hanging.on_broken = reasons.put

    async def work(router: Router) -> None:
        with pytest.raises(PeerLostError, match=f"{role} r. hangs: a step has not ended after"):
            await ask(
                router, "victim", random_prompts(40)[0], SamplingParams(max_tokens=4), timeout_s=4 * LONG_S
            )

    def hang(*arguments: Any) -> Any:
        goes_on.wait()
        raise RuntimeError("the test is over")

    try:
        hanging.executor.run = hang
        groups.serve(lambda router: asyncio.wait_for(work(router), LONG_S))
        assert "hangs" in reasons.get(timeout=LONG_S)
    finally:
        goes_on.set()
        groups.kill(
            f"{role}-{rank}"
        )  # a hanging process is killed; its group's other rank leaves the collective
        groups.stop()
