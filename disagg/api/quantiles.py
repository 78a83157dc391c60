"""Quantiles of the last minute's values in bounded memory: counts in logarithmic buckets of 5 % width."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

WIDTH = math.log(1.05)
"""Logarithmic width of a bucket; the error of a quantile is at most 2.5 %."""
SPAN_S = 60
LEAST_S, MOST_S = 1e-6, 1e5
"""Range to which values are clamped. It limits the `Counter` of one second to 520 buckets."""


class RollingQuantiles:
    """Quantiles of the values of the last minute, with one `Counter` per second; `add` is O(1). Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, Counter[int]]] = deque(maxlen=SPAN_S)
        self._second, self._counts = -1, Counter[int]()
        """The latest second with values, and its counts."""

    @property
    def held_s(self) -> int:
        """Number of seconds whose values are held."""
        return len(self._seconds)

    def add(self, value_s: float) -> None:
        """Adds a value in seconds."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._counts = second, Counter()
            self._seconds.append((second, self._counts))
        if not LEAST_S <= value_s <= MOST_S:
            value_s = min(max(value_s, LEAST_S), MOST_S)
        self._counts[round(math.log(value_s) / WIDTH)] += 1

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Returns the quantiles `shares` of the last minute's values, in seconds; 0 without values."""
        return quantiles(self.counts(), shares)

    def counts(self) -> Counter[int]:
        """Returns the number of the last minute's values in each bucket."""
        oldest = int(self._clock()) - SPAN_S
        counts: Counter[int] = Counter()
        for second, found in self._seconds:
            if second > oldest:
                counts.update(found)
        return counts


def quantiles(counts: Counter[int], shares: Sequence[float]) -> list[float]:
    """Returns the quantiles `shares` of the values in buckets, in seconds; 0 without values."""
    return [_quantile(counts, share) for share in shares]


def _quantile(counts: Counter[int], share: float) -> float:
    wanted, seen = share * counts.total(), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return math.exp(bucket * WIDTH)
    return 0.0
