"""Unions, gaps and clips of intervals `(start, stop)` in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Interval(NamedTuple):
    """A time from `start` to `stop`."""

    start: float
    stop: float

    @property
    def length(self) -> float:
        """The length in microseconds."""
        return self.stop - self.start


class Event(NamedTuple):
    """A named interval of a trace."""

    start: float
    stop: float
    name: str


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union as disjoint intervals in order. Intervals that touch become one."""
    found: list[Interval] = []
    for one in sorted(intervals):
        if found and one.start <= found[-1].stop:
            if one.stop > found[-1].stop:
                found[-1] = Interval(found[-1].start, one.stop)
        else:
            found.append(one)
    return found


def gaps(disjoint: Iterable[Interval], window: Interval) -> list[Interval]:
    """Returns the parts of `window` outside of `disjoint`, which is in order and within the window."""
    found, at = [], window.start
    for one in disjoint:
        if one.start > at:
            found.append(Interval(at, one.start))
        at = one.stop
    if at < window.stop:
        found.append(Interval(at, window.stop))
    return found


def clipped(events: Iterable[Event], window: Interval) -> Iterator[Event]:
    """Yields the parts of the events within `window`; drops events without such a part."""
    for one in events:
        start, stop = max(one.start, window.start), min(one.stop, window.stop)
        if start < stop:
            yield Event(start, stop, one.name)


def innermost(events: Iterable[Event]) -> list[Event]:
    """Returns the innermost running event of each time, as disjoint events in order.

    `events` are the calls of one thread: two of them are nested or disjoint. The name joins the names of the nested
    events, from the outside to the inside, with newlines.
    """
    found: list[Event] = []
    stack: list[Event] = []
    at = 0.0

    def run_until(stop: float) -> None:
        nonlocal at
        if stack and stop > at:
            found.append(Event(at, stop, "\n".join(one.name for one in stack)))
        at = max(at, stop)

    for event in sorted(events, key=lambda one: (one.start, -one.stop)):
        while stack and stack[-1].stop <= event.start:
            run_until(stack[-1].stop)
            stack.pop()
        run_until(event.start)
        stack.append(event)
    while stack:
        run_until(stack[-1].stop)
        stack.pop()
    return found
