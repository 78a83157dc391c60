"""When the rest of a ticket's KV will have landed, from the pace at which its layers land."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from decode_node.arriving import take_landed
from disagg.core.ports import Clock
from disagg.core.types import Segment

SOON_S = 0.012
"""A transfer lands soon if its end is expected within this time: about two decode steps of an 8B model, that is, the
one that runs and the one that is launched already."""
MOST_AHEAD_S = 0.1
"""Longest prediction. Layers that land more slowly do not land evenly enough."""


class SoonReport:
    """Reports once that a transfer lands soon; a callback of `LandingPace`."""

    def __init__(self, clock: Clock, report: Callable[[], None]) -> None:
        self._clock, self._report, self._reported = clock, report, False

    def __call__(self, end_s: float) -> None:
        """Takes a predicted end, in seconds on the clock."""
        if not self._reported and end_s - self._clock() <= SOON_S:
            self._reported = True
            self._report()


class LandingPace:
    """Predicts the end of one ticket's transfer. Owned by the transfer thread.

    A layer counts when all its positions have landed. Those of the prompt's last chunk land last, as fast as the
    producer computes or sends layers, whatever the pace of the positions before.
    """

    def __init__(
        self, missing_bytes: Mapping[int, int], clock: Clock, expected: Callable[[float], None]
    ) -> None:
        """`missing_bytes`: bytes of each layer, by layer. `expected`: called with the time of the end in seconds when
        a layer but the last one has landed, if the end is known."""
        self._missing_bytes, self._clock, self._expected = dict(missing_bytes), clock, expected
        self._landed: list[tuple[float, int]] = []
        """Times at which layers have landed, and the number of layers since the first one."""

    def landed(self, segment: Segment) -> None:
        """Records a landed segment."""
        before = len(self._missing_bytes)
        take_landed(self._missing_bytes, segment)
        missing = len(self._missing_bytes)
        if missing == before or not missing:
            return
        now_s = self._clock()
        count = before - missing + (self._landed[-1][1] if self._landed else 0)
        # The slowest pace up to now: layers of a group land together, and the next group only after its computation.
        pace_s = max(((now_s - at_s) / (count - known) for at_s, known in self._landed), default=None)
        self._landed.append((now_s, count))
        if pace_s is not None and missing * pace_s <= MOST_AHEAD_S:
            self._expected(now_s + missing * pace_s)
