"""The arithmetic of `disagg bench handoff`: moments in, seconds and shares out. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from disagg.core.timeline import TimelineSpan

LANDINGS = ("scatter", "land")
"""Spans at whose end bytes are in their pages: through the ring, and written there."""
ARRIVALS = ("receive", "scatter", "write", "land")
"""Spans in which a decode rank's memory is being written."""


class Window(NamedTuple):
    """A stretch of time, `time.monotonic()` seconds."""

    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.stop_s - self.start_s

    def meets(self, other: Window) -> bool:
        """Whether the two have a moment in common."""
        return self.start_s < other.stop_s and other.start_s < self.stop_s


class Moved(NamedTuple):
    """One request's transfer, over all ranks."""

    whole: Window
    """From the first gather's or write's begin on a device to the last landing."""
    moving_s: float
    """How long of it at least one segment was gathered, sent, received, scattered or written."""
    nbytes: int
    """Bytes that landed; heads that several decode ranks hold count on each."""

    def exposed_s(self, computed_s: float) -> float:
        """From `computed_s`, when the prompt was computed, to the last byte's landing; 0 when it landed before."""
        return max(0.0, self.whole.stop_s - max(computed_s, self.whole.start_s))


def moved(spans: Iterable[TimelineSpan], request: str) -> Moved:
    """The transfer of the request named so in the spans of all ranks. Raises `ValueError` when none landed."""
    ours = [span for span in spans if span.request == request]
    landed = [span for span in ours if span.name in LANDINGS]
    if not landed:
        raise ValueError(f"no span of {request} says that anything landed")
    whole = Window(min(span.start_s for span in ours), max(span.stop_s for span in landed))
    moving_s = union_s(Window(span.start_s, span.stop_s) for span in ours)
    return Moved(whole, moving_s, sum(span.nbytes for span in landed))


def arrival(spans: Iterable[TimelineSpan], request: str) -> Window:
    """From the first receive's or write's begin to the last landing. Raises `ValueError` when nothing came."""
    ours = [span for span in spans if span.request == request and span.name in ARRIVALS]
    if not ours:
        raise ValueError(f"no span of {request} says that anything arrived")
    return Window(min(span.start_s for span in ours), max(span.stop_s for span in ours))


def union_s(windows: Iterable[Window]) -> float:
    """Seconds that at least one window covers."""
    total_s, reached_s = 0.0, -math.inf
    for window in sorted(windows):
        total_s += max(0.0, window.stop_s - max(window.start_s, reached_s))
        reached_s = max(reached_s, window.stop_s)
    return total_s


def with_a_moment(windows: Iterable[Window], moments_s: Iterable[float]) -> list[Window]:
    """The windows in which one of the moments lies."""
    ordered = [*sorted(moments_s), math.inf]
    return [window for window in windows if ordered[bisect_left(ordered, window.start_s)] <= window.stop_s]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of 100 values do not exceed. Raises `ValueError` without values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


class Sorted(NamedTuple):
    """Seconds of decode steps, by what happened beside them."""

    quiet: list[float]
    """Nothing."""
    prefill: list[float]
    """The prefill group computed a prompt that it did not send."""
    arriving: list[float]
    """Another request's KV arrived."""


def sort_steps(
    steps: Iterable[Window],
    arrivals: Collection[Window],
    prefills: Collection[Window],
    others: Collection[Window],
) -> Sorted:
    """Sorts steps by which windows they meet; what meets only `others` (of requests not arriving yet) is left out."""
    found = Sorted([], [], [])
    for step in steps:
        if any(map(step.meets, arrivals)):
            found.arriving.append(step.seconds)
        elif any(map(step.meets, prefills)):
            found.prefill.append(step.seconds)
        elif not any(map(step.meets, others)):
            found.quiet.append(step.seconds)
    return found
