"""Send times of an open loop, drawn before the first request so that answers cannot influence them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal

import numpy as np

ArrivalKind = Literal["poisson", "fixed", "burst"]


@dataclass(frozen=True)
class Arrivals:
    """An arrival process. For every kind, `rate` is the mean rate in requests per second."""

    kind: ArrivalKind
    """poisson: independent arrivals. fixed: evenly spaced. burst: groups of `burst_requests` at once, with
    the groups as a Poisson process."""
    rate: float
    burst_requests: int
    seed: int

    def first(self, requests: int) -> list[float]:
        """Returns the send times of the first `requests`, in seconds from the start, in order."""
        return list(islice(self._times(), requests))

    def until(self, duration_s: float) -> list[float]:
        """Returns all send times before `duration_s`, in order."""
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
