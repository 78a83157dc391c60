"""Recorder of time spans, for charts that show the work of each rank for a request.

Times are `time.monotonic()` seconds. On Linux all processes of a host share that clock, so spans of different ranks
need no correction. Spans of different hosts are not comparable.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from disagg.core.errors import InvariantError
from disagg.core.ports import Clock


class TimelineSpan(msgspec.Struct, frozen=True):
    """One span of work.

    `name`: kind of work (`compute`, `gather`, `send`, `receive`, `scatter`, `decode`). `lane`: rank (`prefill r0`).
    `request`: request id, '' for work of several requests. `nbytes`: bytes moved.
    """

    name: str
    lane: str
    request: str
    start_s: float
    stop_s: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.stop_s - self.start_s


class TimelineStatistics(msgspec.Struct, frozen=True):
    """Counts since the construction of the timeline."""

    held: int
    """Number of spans not yet drained."""
    recorded: int
    """Number of spans ever recorded."""
    dropped: int
    """Number of spans that newer ones overwrote before `drain`."""


class Timeline:
    """Thread-safe ring of spans: when full, a new span overwrites the oldest one, which is counted as dropped."""

    def __init__(self, capacity: int = 65536, clock: Clock = time.monotonic) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: a timeline holds at least 1 span")
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: deque[TimelineSpan] = deque(maxlen=capacity)
        self._recorded = 0
        self._drained = 0

    def now(self) -> float:
        """Returns the current time of the timeline's clock, in seconds."""
        return self._clock()

    @contextmanager
    def span(self, name: str, lane: str, *, request: str = "", nbytes: int = 0) -> Iterator[None]:
        """Records the duration of the block, also if the block raises."""
        start_s = self._clock()
        try:
            yield
        finally:
            self.record(name, lane, request, start_s, self._clock(), nbytes)

    def record(
        self, name: str, lane: str, request: str, start_s: float, stop_s: float, nbytes: int = 0
    ) -> None:
        """Adds a measured span. Raises `ValueError` if `stop_s` is before `start_s`."""
        if stop_s < start_s:
            raise ValueError(f"span {name} of {lane} stops at {stop_s} before it starts at {start_s}")
        span = TimelineSpan(name, lane, request, start_s, stop_s, nbytes)
        with self._lock:
            self._spans.append(span)
            self._recorded += 1

    def drain(self) -> list[TimelineSpan]:
        """Removes and returns all spans, oldest first."""
        with self._lock:
            spans = list(self._spans)
            self._spans.clear()
            self._drained += len(spans)
        return spans

    def statistics(self) -> TimelineStatistics:
        """Returns a consistent snapshot of the counts."""
        with self._lock:
            held, recorded, drained = len(self._spans), self._recorded, self._drained
        return TimelineStatistics(held=held, recorded=recorded, dropped=recorded - drained - held)

    def check(self) -> None:
        """Raises `InvariantError` unless the counts of held, drained and dropped spans are consistent."""
        statistics = self.statistics()
        capacity = self._spans.maxlen or 0
        if statistics.dropped < 0 or statistics.held > capacity:
            raise InvariantError(f"timeline of {capacity} spans: {statistics}")
