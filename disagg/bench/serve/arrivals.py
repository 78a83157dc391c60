"""When requests are sent in an open loop: drawn before the first one is, so that answers cannot change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal

import numpy as np

ArrivalKind = Literal["poisson", "fixed", "burst"]


@dataclass(frozen=True)
class Arrivals:
    """A process of arrivals; `rate` is its mean, in requests a second, whatever the kind."""

    kind: ArrivalKind
    """poisson: independent of each other. fixed: evenly spaced. burst: `burst_requests` at once, the groups of
    them as a Poisson process."""
    rate: float
    burst_requests: int
    seed: int

    def first(self, requests: int) -> list[float]:
        """When the first `requests` are due, seconds from the start, in order."""
        return list(islice(self._times(), requests))

    def until(self, duration_s: float) -> list[float]:
        """When those that are due before `duration_s` are, in order."""
        return list(takewhile(lambda due_s: due_s < duration_s, self._times()))

    def _times(self) -> Iterator[float]:
        random = np.random.default_rng([self.seed, 0])
        together = self.burst_requests if self.kind == "burst" else 1
        gap_s, due_s = together / self.rate, 0.0
        while True:
            if self.kind != "fixed":
                due_s += float(random.exponential(gap_s))
            for _ in range(together):
                yield due_s
            if self.kind == "fixed":
                due_s += gap_s
