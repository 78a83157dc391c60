"""Computes the figures of `disagg bench handoff`, seconds and shares, from time stamps. All functions are pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from disagg.core.timeline import TimelineSpan

LANDINGS = ("scatter", "land")
"""Names of the timeline spans that end when bytes are in their pages: through the ring, and by direct writes."""
ARRIVALS = ("receive", "scatter", "write", "land")
"""Names of the timeline spans during which a decode rank's memory is being written."""


class Window(NamedTuple):
    """A time interval, in `time.monotonic()` seconds."""

    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.stop_s - self.start_s

    def meets(self, other: Window) -> bool:
        """Returns whether the two intervals overlap."""
        return self.start_s < other.stop_s and other.start_s < self.stop_s


class RequestTransfer(NamedTuple):
    """One request's transfer, over all ranks."""

    whole: Window
    """Interval from the start of the first gather or write on a device to the last landing."""
    moving_s: float
    """Time during which at least one segment was gathered, sent, received, scattered or written."""
    nbytes: int
    """Bytes that landed; heads replicated on several decode ranks count on each."""

    def exposed_s(self, computed_s: float) -> float:
        """Returns the seconds from `computed_s`, the end of the prompt's computation, to the last landing; 0 if the
        last landing was earlier."""
        return max(0.0, self.whole.stop_s - max(computed_s, self.whole.start_s))


def moved(spans: Iterable[TimelineSpan], request: str) -> RequestTransfer:
    """Returns the transfer of `request` from the spans of all ranks. Raises `ValueError` without a landing."""
    ours = [span for span in spans if span.request == request]
    landed = [span for span in ours if span.name in LANDINGS]
    if not landed:
        raise ValueError(f"no span of {request} shows a landing")
    whole = Window(min(span.start_s for span in ours), max(span.stop_s for span in landed))
    moving_s = union_s(Window(span.start_s, span.stop_s) for span in ours)
    return RequestTransfer(whole, moving_s, sum(span.nbytes for span in landed))


def arrival(spans: Iterable[TimelineSpan], request: str) -> Window:
    """Returns the interval from the first receive or write to the last landing. Raises `ValueError` without an
    arrival."""
    ours = [span for span in spans if span.request == request and span.name in ARRIVALS]
    if not ours:
        raise ValueError(f"no span of {request} shows an arrival")
    return Window(min(span.start_s for span in ours), max(span.stop_s for span in ours))


def union_s(windows: Iterable[Window]) -> float:
    """Returns the seconds covered by at least one window."""
    total_s, reached_s = 0.0, -math.inf
    for window in sorted(windows):
        total_s += max(0.0, window.stop_s - max(window.start_s, reached_s))
        reached_s = max(reached_s, window.stop_s)
    return total_s


def with_a_moment(windows: Iterable[Window], moments_s: Iterable[float]) -> list[Window]:
    """Returns the windows that contain at least one of `moments_s`."""
    ordered = [*sorted(moments_s), math.inf]
    return [window for window in windows if ordered[bisect_left(ordered, window.start_s)] <= window.stop_s]


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest of the values for which at least `percent` % of the values are equal or smaller. Raises
    `ValueError` without values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


class Sorted(NamedTuple):
    """Durations of decode steps in seconds, by concurrent activity."""

    quiet: list[float]
    """Durations of steps without concurrent activity."""
    prefill: list[float]
    """Durations of steps during which the prefill group computed a prompt without sending its KV."""
    arriving: list[float]
    """Durations of steps during which another request's KV arrived."""


def sort_steps(
    steps: Iterable[Window],
    arrivals: Collection[Window],
    prefills: Collection[Window],
    others: Collection[Window],
) -> Sorted:
    """Returns the durations of `steps` by concurrent activity: the kind of window that a step overlaps.

    Steps that overlap only windows of `others` are omitted: another request was running then, but its KV was not
    arriving.
    """
    found = Sorted([], [], [])
    for step in steps:
        if any(map(step.meets, arrivals)):
            found.arriving.append(step.seconds)
        elif any(map(step.meets, prefills)):
            found.prefill.append(step.seconds)
        elif not any(map(step.meets, others)):
            found.quiet.append(step.seconds)
    return found
