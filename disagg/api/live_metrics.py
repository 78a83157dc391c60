"""Metrics that change with every token. One event loop changes them, without the locks of `prometheus_client`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LiveCounter(Collector):
    """A counter; the same samples as `prometheus_client.Counter`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text, self._created_s = name, text, time.time()
        self.count = 0
        registry.register(self)

    def inc(self, amount: int) -> None:
        """Adds `amount`."""
        self.count += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the family."""
        family = CounterMetricFamily(self._name, self._text)
        family.add_metric([], self.count, created=self._created_s)
        yield family


class LiveHistogram(Collector):
    """A histogram; the same samples as `prometheus_client.Histogram`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry, buckets: Sequence[float]) -> None:
        """`buckets`: largest value of each bucket, ascending; one more bucket has the larger values."""
        self._name, self._text, self._created_s = name, text, time.time()
        self._bounds = (*buckets, inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Adds a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yields the family."""
        family = HistogramMetricFamily(self._name, self._text)
        counts = accumulate(self._counts)
        bounds = map(floatToGoString, self._bounds)
        family.add_metric([], list(zip(bounds, counts, strict=True)), self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created_s)
        yield family
