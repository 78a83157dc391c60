"""Cost model of the wire between two ranks, fitted to a few timed messages, and the segment size chosen by this
model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

KIB, MIB = 1 << 10, 1 << 20
PROBE_SIZES_BYTES = (64 * KIB, MIB, 16 * MIB)
"""Sizes of the timed messages; far enough apart that two of them separate overhead and rate."""
PROBE_REPEATS = 3
"""Timed messages of each size, after one untimed message that sets up connections and mappings."""
PROBE_BUDGET_S = 1.0
"""Time limit for all messages of a probe; message sizes that would exceed this limit are skipped."""
PROBE_LIMIT_S = 2.0
"""Time after which a probe is cancelled."""
LEAST_SEGMENT_BYTES = MIB
"""Smallest segment size that the wire model may choose: each segment also costs two kernel launches."""
_OVERHEAD_S = (1e-6, 1e-2)
_BYTES_PER_S = (1e6, 1e13)
_GAIN = 1.05


@dataclass(frozen=True, slots=True)
class Wire:
    """Cost model: a message of n bytes takes `overhead_s + n / bytes_per_s`."""

    overhead_s: float
    """Additional time for each message; 0 when not modelled."""
    bytes_per_s: float

    @property
    def is_sane(self) -> bool:
        """Whether both values are plausible: 1 us to 10 ms, 1 MB/s to 10 TB/s."""
        return _within(self.overhead_s, _OVERHEAD_S) and _within(self.bytes_per_s, _BYTES_PER_S)


def probe_sizes(limit_bytes: int) -> tuple[int, ...]:
    """Returns the message sizes to time, in bytes, ascending, up to `limit_bytes`. `fit_wire` needs at least two
    sizes."""
    return tuple(size for size in PROBE_SIZES_BYTES if size <= limit_bytes)


def fit_wire(samples: Mapping[int, Sequence[float]]) -> Wire | None:
    """Returns the cost model fitted to timed messages; None when fewer than two sizes were timed.

    `samples` maps each message size in bytes to its times in seconds, all above 0.

    The fit minimizes the squared relative errors of the median time of each size. Noise grows with the time: with
    absolute errors, the largest message alone would determine the fit. Values outside the bounds of `Wire.is_sane`
    (such as a negative overhead) are clamped.
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
    if mean_t <= slope * mean_n or slope <= 0:  # not a plausible line: use the rate of the largest message
        slope = longest / largest
    overhead_s = mean_t - slope * mean_n
    return Wire(_clamped(overhead_s, _OVERHEAD_S), _clamped(1 / slope, _BYTES_PER_S))


def best_segment_bytes(wire: Wire, limit_bytes: int) -> int:
    """Returns the smallest segment size whose doubling gains less than 5 % of throughput; at most
    `limit_bytes`.

    With an overhead of `o` seconds, a segment of `x` seconds on the wire reaches `x / (o + x)` of the wire's rate. A
    segment of twice the size reaches `2 x / (o + 2 x)`. The gain of doubling falls below 5 % at `x = 9.5 o`. The
    result is at least `LEAST_SEGMENT_BYTES`, unless the limit is smaller.
    """
    wanted = math.ceil((2 - _GAIN) / (2 * (_GAIN - 1)) * wire.overhead_s * wire.bytes_per_s)
    return min(limit_bytes, max(LEAST_SEGMENT_BYTES, wanted))


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _clamped(value: float, bounds: tuple[float, float]) -> float:
    return max(bounds[0], min(bounds[1], value))
