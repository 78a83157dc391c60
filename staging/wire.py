"""What the wire between two ranks costs, from a few timed messages; and how large a segment pays. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

KIB, MIB = 1 << 10, 1 << 20
PROBE_SIZES_BYTES = (64 * KIB, MIB, 16 * MIB)
"""Of the messages that are timed; far apart, so that two of them already tell overhead and rate apart."""
PROBE_REPEATS = 3
"""Timed messages of each size, behind one that is not: connections and mappings are made by the first."""
PROBE_BUDGET_S = 1.0
"""Larger sizes are left out when they would take longer than this, all together."""
PROBE_LIMIT_S = 2.0
"""A probe that is not over by then is given up."""
LEAST_SEGMENT_BYTES = MIB
"""Segments are never made smaller than this for the wire's sake: each also costs two kernel launches."""
_OVERHEAD_S = (1e-6, 1e-2)
_BYTES_PER_S = (1e6, 1e13)
_GAIN = 1.05


@dataclass(frozen=True, slots=True)
class Wire:
    """A message of n bytes takes `overhead_s + n / bytes_per_s`."""

    overhead_s: float
    """Of one more segment; 0 where it is not to be counted."""
    bytes_per_s: float

    @property
    def is_sane(self) -> bool:
        """Whether a measurement could have found it: from 1 us to 10 ms, from 1 MB/s to 10 TB/s."""
        return _within(self.overhead_s, _OVERHEAD_S) and _within(self.bytes_per_s, _BYTES_PER_S)


def probe_sizes(limit_bytes: int) -> tuple[int, ...]:
    """The sizes to time, in bytes, ascending, where a message may have `limit_bytes`. Fewer than two tell nothing."""
    return tuple(size for size in PROBE_SIZES_BYTES if size <= limit_bytes)


def fit_wire(samples: Mapping[int, Sequence[float]]) -> Wire | None:
    """A straight line through seconds over bytes; `samples` maps each size to its times, all above 0.

    Least squares of the relative errors through the median of each size: noise grows with the time, so the largest
    message must not decide alone. What the line has below the bounds of `Wire.is_sane` (a negative overhead among
    it) is moved to them. None when fewer than two sizes were timed.
    """
    points = [(nbytes, median(times)) for nbytes, times in samples.items() if times]
    if len(points) < 2:
        return None
    # Weights 1 / t**2: sums of w, w n, w t, w n n, w n t.
    weights = [1 / t**2 for _, t in points]
    s = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / s
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / s
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True)) / spread
    largest, longest = max(points)
    if mean_t <= slope * mean_n or slope <= 0:  # no line that wires have: the largest message tells its rate
        slope = longest / largest
    overhead_s = mean_t - slope * mean_n
    return Wire(_clamped(overhead_s, _OVERHEAD_S), _clamped(1 / slope, _BYTES_PER_S))


def best_segment_bytes(wire: Wire, limit_bytes: int) -> int:
    """The smallest segment that a doubling would make less than 5 % quicker for each byte; at most `limit_bytes`.

    A segment of x seconds on the wire moves its bytes at `x / (o + x)` of the wire's rate, and twice as many at
    `2 x / (o + 2 x)`: the gain falls below 1.05 at `x = 9.5 o`. `LEAST_SEGMENT_BYTES` at least, as far as the limit
    lets it.
    """
    wanted = math.ceil((2 - _GAIN) / (2 * (_GAIN - 1)) * wire.overhead_s * wire.bytes_per_s)
    return min(limit_bytes, max(LEAST_SEGMENT_BYTES, wanted))


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _clamped(value: float, bounds: tuple[float, float]) -> float:
    return max(bounds[0], min(bounds[1], value))
