"""The circuit breaker of a storage counts a stall once, however many calls wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from disagg.storage.breaker import Breaker, PauseSettings
from disagg.storage.counters import Counters


class LateBatch:
    """A batch of one page that does not land within a second; meanwhile, `during` runs."""

    def __init__(self, clock: list[float], during: Callable[[], object] = lambda: None) -> None:
        self._clock, self._during = clock, during

    def wait(self, timeout_s: float) -> list[bool | None]:
        self._during()
        self._clock[0] += timeout_s
        return [None]


def test_calls_that_are_late_at_the_same_time_are_one_fault() -> None:
    clock, counters = [0.0], Counters()
    breaker = Breaker("test", counters, PauseSettings(faults=2), lambda: clock[0])

    def late(during: Callable[[], object] = lambda: None) -> list[bool]:
        batch: Any = LateBatch(clock, during)
        return breaker.wait_for(batch, 1.0)

    assert late(lambda: late(lambda: late())) == [False]
    assert counters.statistics(0, 0, paused=False).late == 3
    assert not breaker.paused, "one stall"
    clock[0] += 0.5
    late()
    assert breaker.paused, "a second one"
    breaker.check()
