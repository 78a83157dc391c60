"""Metrics without locks have the samples of `prometheus_client`'s own."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from disagg.api.live_metrics import LiveCounter, LiveHistogram
from disagg.api.metrics import FINE_S, Metrics


def exposed(registry: CollectorRegistry) -> str:
    """The text of a scrape, without the times of creation."""
    return re.sub(r"(_created) .*", r"\1", generate_latest(registry).decode())


@given(st.lists(st.floats(0, 5) | st.sampled_from(FINE_S)))
def test_a_histogram_of_any_values(values: list[float]) -> None:
    live, locked = CollectorRegistry(), CollectorRegistry()
    ours = LiveHistogram("latency_seconds", "Time", live, FINE_S)
    theirs = Histogram("latency_seconds", "Time", registry=locked, buckets=FINE_S)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    assert exposed(live) == exposed(locked)


@given(st.lists(st.integers(0, 9)))
def test_a_counter_of_any_amounts(amounts: list[int]) -> None:
    live, locked = CollectorRegistry(), CollectorRegistry()
    ours, theirs = LiveCounter("tokens", "Tokens", live), Counter("tokens", "Tokens", registry=locked)
    for amount in amounts:
        ours.inc(amount)
        theirs.inc(amount)
    assert exposed(live) == exposed(locked)
    assert Metrics.total(ours) == sum(amounts)
