"""When the rest of a ticket's KV will have landed, from the pace at which its layers land."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

from decode_node.arriving import take_landed
from disagg.core.ports import Clock
from disagg.core.types import Segment

SOON_S = 0.012
"""A transfer lands soon if its end is expected within this time: about two decode steps of an 8B model, that is, the
one that runs and the one that is launched already."""
MOST_AHEAD_S = 0.1
"""Longest prediction. Layers that land more slowly do not land evenly enough."""
TOGETHER_S = 1e-3
"""Layers that land within this time count as one group: one poll may find several groups."""
OVERDUE = 1.5
"""The next group is overdue after this multiple of its expected time."""


class SoonReport:
    """Reports once that a transfer lands soon; a callback of `LandingPace`."""

    def __init__(self, clock: Clock, report: Callable[[], None]) -> None:
        self._clock, self._report, self._reported = clock, report, False

    def __call__(self, end_s: float, overdue_s: float) -> None:
        """Takes a predicted end, in seconds on the clock; infinite if it is too far ahead."""
        if not self._reported and end_s - self._clock() <= SOON_S:
            self._reported = True
            self._report()


class LandingPace:
    """Predicts the end of one ticket's transfer. Owned by the transfer thread.

    A layer counts when all its positions have landed. Those of the prompt's last chunk land last, as fast as the
    producer computes or sends layers, whatever the pace of the positions before.
    """

    def __init__(
        self, missing_bytes: Mapping[int, int], clock: Clock, expected: Callable[[float, float], None]
    ) -> None:
        """`missing_bytes`: bytes of each layer, by layer.

        `expected`: called when a layer but the last one has landed and the pace is known, with two times in seconds:
        that of the end, infinite if it is too far ahead, and that at which the next layer is overdue. Nothing is
        known of the end from then on. Each call replaces the one before.
        """
        self._missing_bytes, self._clock, self._expected = dict(missing_bytes), clock, expected
        self._landed: list[tuple[float, int]] = []
        """For each group, the time at which its first layer has landed, and the number of layers with it."""

    def landed(self, segment: Segment) -> None:
        """Records a landed segment."""
        before = len(self._missing_bytes)
        take_landed(self._missing_bytes, segment)
        missing = len(self._missing_bytes)
        if missing == before or not missing:
            return
        now_s = self._clock()
        first_s, count = self._landed[-1] if self._landed else (-math.inf, 0)
        if now_s - first_s < TOGETHER_S:
            self._landed.pop()
        else:
            first_s = now_s
        self._landed.append((first_s, count + before - missing))
        self._predict(now_s, missing)

    def _predict(self, now_s: float, missing: int) -> None:
        *earlier, (_, count) = self._landed
        if not earlier:
            return
        # The slowest pace up to now: layers of a group land together, and the next group only after its computation.
        pace_s = max((now_s - at_s) / (count - known) for at_s, known in earlier)
        group = max(stop - start for start, stop in pairwise([0, *(known for _, known in self._landed)]))
        left_s = missing * pace_s
        end_s = now_s + left_s if left_s <= MOST_AHEAD_S else math.inf
        self._expected(end_s, now_s + OVERDUE * group * pace_s)
