"""The wire's two figures out of timed messages, and the segment that pays on it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staging.planner import group_count
from staging.wire import (
    LEAST_SEGMENT_BYTES,
    PROBE_SIZES_BYTES,
    Wire,
    best_segment_bytes,
    fit_wire,
    probe_sizes,
)

MIB = 1 << 20


def timed(wire: Wire, *factors: float, sizes: tuple[int, ...] = PROBE_SIZES_BYTES) -> dict[int, list[float]]:
    """What `wire` takes for each size, times each factor."""
    return {n: [(wire.overhead_s + n / wire.bytes_per_s) * f for f in factors or (1.0,)] for n in sizes}


@given(st.floats(2e-6, 5e-3), st.floats(1e7, 1e12))
def test_a_straight_line_is_found(overhead_s: float, bytes_per_s: float) -> None:
    wire = Wire(overhead_s, bytes_per_s)
    for sizes in (PROBE_SIZES_BYTES, PROBE_SIZES_BYTES[:2]):
        found = fit_wire(timed(wire, sizes=sizes))
        assert found is not None
        if overhead_s > 1e-3 * sizes[0] / bytes_per_s:  # else it drowns
            assert found.overhead_s == pytest.approx(overhead_s, rel=0.01)
        if sizes[-1] / bytes_per_s > 1e-3 * overhead_s:
            assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)


def test_one_slow_message_changes_nothing() -> None:
    wire = Wire(20e-6, 300e9)
    assert fit_wire(timed(wire, 1.0, 1.0, 50.0)) == fit_wire(timed(wire))


def test_noise_on_the_largest_message_does_not_become_overhead() -> None:
    """A rate that still grows: 16 MiB take a tenth less than the line says."""
    samples = timed(Wire(20e-6, 10e9))
    samples[16 * MIB] = [seconds * 0.9 for seconds in samples[16 * MIB]]
    found = fit_wire(samples)
    assert found is not None
    assert 10e-6 < found.overhead_s < 30e-6
    assert 9e9 < found.bytes_per_s < 12e9


@given(st.lists(st.floats(1e-9, 100.0), min_size=3, max_size=3))
def test_whatever_was_timed_gives_a_sane_wire(times: list[float]) -> None:
    found = fit_wire({n: [t] for n, t in zip(PROBE_SIZES_BYTES, times, strict=True)})
    assert found is not None
    assert found.is_sane


def test_more_for_less_time_has_the_rate_of_the_largest() -> None:
    falling = {64 << 10: [4e-3], MIB: [2e-3], 16 * MIB: [1e-3]}
    found = fit_wire(falling)
    assert found is not None
    assert found.bytes_per_s == pytest.approx(16 * MIB / 1e-3)


@pytest.mark.parametrize("samples", [{}, {MIB: [1e-3]}, {MIB: [1e-3], 16 * MIB: []}])
def test_one_size_is_not_enough_for_a_fit(samples: dict[int, list[float]]) -> None:
    assert fit_wire(samples) is None


def test_sizes_fit_where_they_go() -> None:
    assert probe_sizes(1 << 40) == PROBE_SIZES_BYTES
    assert probe_sizes(16 * MIB - 1) == PROBE_SIZES_BYTES[:2]
    assert probe_sizes(4096) == ()


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
def test_twice_the_best_segment_gains_less_than_five_percent(overhead_s: float, bytes_per_s: float) -> None:
    wire = Wire(overhead_s, bytes_per_s)

    def rate(nbytes: float) -> float:
        return nbytes / (overhead_s + nbytes / bytes_per_s)

    best = best_segment_bytes(wire, 1 << 62)
    assert rate(2 * best) / rate(best) <= 1.05 + 1e-9
    if best > LEAST_SEGMENT_BYTES:
        assert rate(1.98 * best) / rate(0.99 * best) > 1.05 - 1e-9, "and a smaller one gains more"


def test_a_segment_stays_within_its_limit() -> None:
    assert best_segment_bytes(Wire(1e-3, 1e12), 8 * MIB) == 8 * MIB
    assert best_segment_bytes(Wire(1e-6, 1e6), 8 * MIB) == LEAST_SEGMENT_BYTES
    assert best_segment_bytes(Wire(1e-6, 1e6), 4096) == 4096


def test_a_slower_wire_is_worth_more_groups() -> None:
    """The figures of a 100 Gbit/s wire between hosts, beside those of NVLink, for 64 MiB."""
    counts = [
        group_count(64 * MIB, 32, w.overhead_s, w.bytes_per_s) for w in (Wire(2e-5, 350e9), Wire(2e-5, 12e9))
    ]
    assert counts == [3, 17]


def test_what_no_wire_is_like() -> None:
    assert Wire(1e-4, 350e9).is_sane
    for odd in (Wire(0.0, 1e9), Wire(-1.0, 1e9), Wire(1.0, 1e9), Wire(1e-5, 0.0), Wire(1e-5, float("inf"))):
        assert not odd.is_sane
    assert not Wire(float("nan"), 1e9).is_sane
