"""Quantiles of the last minute in bounded memory, however many values there are: counts in buckets of 5 %."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

WIDTH = math.log(1.05)
"""Of a bucket, in the logarithm: a quantile is off by 2.5 % at most."""
SPAN_S = 60
LEAST_S, MOST_S = 1e-6, 1e5
"""What is outside counts as these: so there are at most 520 buckets a second."""


class RollingQuantiles:
    """Adds in O(1); one `Counter` of buckets for each second. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, Counter[int]]] = deque(maxlen=SPAN_S)

    def add(self, value_s: float) -> None:
        """A value, in seconds."""
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter()))
        bucket = round(math.log(min(max(value_s, LEAST_S), MOST_S)) / WIDTH)
        self._seconds[-1][1][bucket] += 1

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """The least values, in seconds, that so large shares of the last minute's do not exceed; 0 without any."""
        oldest = int(self._clock()) - SPAN_S
        counts: Counter[int] = Counter()
        for second, found in self._seconds:
            if second > oldest:
                counts.update(found)
        return [_quantile(counts, share) for share in shares]


def _quantile(counts: Counter[int], share: float) -> float:
    wanted, seen = share * counts.total(), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return math.exp(bucket * WIDTH)
    return 0.0
