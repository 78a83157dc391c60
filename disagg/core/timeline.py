"""What happened when, for drawing one request's way through the ranks.

Times are `time.monotonic()` seconds. On Linux that clock is one for all processes of a host, so spans
recorded by different ranks line up without any correction; between hosts they do not, and are not compared.
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
    """One stretch of work.

    `name` is its kind (`compute`, `gather`, `send`, `receive`, `scatter`, `decode`), `lane` who did it
    (`prefill r0`), `request` for whom ('' when for no one request), `nbytes` how much moved.
    """

    name: str
    lane: str
    request: str
    start_s: float
    stop_s: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.stop_s - self.start_s


class TimelineStatistics(msgspec.Struct, frozen=True):
    """Counts since the timeline was made."""

    held: int
    """Spans waiting for `drain`."""
    recorded: int
    """Spans ever recorded."""
    dropped: int
    """Oldest spans thrown away because nobody drained in time."""


class Timeline:
    """Thread-safe, bounded recorder of spans; when full the oldest span makes room, and is counted."""

    def __init__(self, capacity: int = 65536, clock: Clock = time.monotonic) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: a timeline holds at least 1 span")
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: deque[TimelineSpan] = deque(maxlen=capacity)
        self._recorded = 0
        self._drained = 0

    def now(self) -> float:
        """The timeline's clock, in seconds."""
        return self._clock()

    @contextmanager
    def span(self, name: str, lane: str, *, request: str = "", nbytes: int = 0) -> Iterator[None]:
        """Records the body's duration, also when it raises."""
        start_s = self._clock()
        try:
            yield
        finally:
            self.record(name, lane, request, start_s, self._clock(), nbytes)

    def record(
        self, name: str, lane: str, request: str, start_s: float, stop_s: float, nbytes: int = 0
    ) -> None:
        """Adds a span whose ends were measured elsewhere; `ValueError` when it ends before it starts."""
        if stop_s < start_s:
            raise ValueError(f"span {name} of {lane} stops at {stop_s} before it starts at {start_s}")
        span = TimelineSpan(name, lane, request, start_s, stop_s, nbytes)
        with self._lock:
            self._spans.append(span)
            self._recorded += 1

    def drain(self) -> list[TimelineSpan]:
        """Takes all spans out, oldest recorded first; the caller owns them."""
        with self._lock:
            spans = list(self._spans)
            self._spans.clear()
            self._drained += len(spans)
        return spans

    def statistics(self) -> TimelineStatistics:
        """A consistent snapshot."""
        with self._lock:
            held, recorded, drained = len(self._spans), self._recorded, self._drained
        return TimelineStatistics(held=held, recorded=recorded, dropped=recorded - drained - held)

    def check(self) -> None:
        """Raises `InvariantError` unless each span recorded is held, was drained or was dropped when full."""
        statistics = self.statistics()
        capacity = self._spans.maxlen or 0
        if statistics.dropped < 0 or statistics.held > capacity:
            raise InvariantError(f"timeline of {capacity} spans: {statistics}")
