"""The predicted end of a transfer, from the times at which layers land."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from decode_node.landing_pace import MOST_AHEAD_S, OVERDUE, SOON_S, TOGETHER_S, LandingPace, SoonReport
from disagg.core.types import Segment, Span

LAYER_BYTES = 20


def predictions(landings: Sequence[tuple[float, int, int, int]], layers: int = 8) -> dict[float, float]:
    """The predicted end by the time of the prediction, in milliseconds; see `calls`."""
    return {at_ms: end_ms for at_ms, (end_ms, _) in calls(landings, layers).items()}


def calls(
    landings: Sequence[tuple[float, int, int, int]], layers: int = 8
) -> dict[float, tuple[float, float]]:
    """The predicted end, and when the next layer is overdue, by the time of the prediction, in milliseconds.
    `landings`: time, first layer, end of the layers, bytes of each layer."""
    now_ms, found = [0.0], dict[float, tuple[float, float]]()

    def expected(end_s: float, overdue_s: float) -> None:
        found[now_ms[0]] = round(end_s * 1e3, 6), round(overdue_s * 1e3, 6)

    pace = LandingPace(dict.fromkeys(range(layers), LAYER_BYTES), lambda: now_ms[0] / 1e3, expected)
    for at_ms, first, stop, nbytes in landings:
        now_ms[0], span = at_ms, Span(first, stop)
        pace.landed(Segment(0, 0, 0, span, Span(0, 1), Span(0, 4), nbytes * len(span)))
    return found


def test_groups_of_layers_land_at_equal_intervals() -> None:
    groups = [(10.0, 0, 2, 20), (14.0, 2, 4, 20), (18.0, 4, 6, 20), (22.0, 6, 8, 20)]
    assert predictions(groups) == {14.0: 22.0, 18.0: 22.0}


def test_layers_of_a_group_land_together_but_the_next_group_does_not() -> None:
    """The end is never predicted from the short time between two layers of one group."""
    single = [
        (at + layer / 100, layer, layer + 1, 20) for at, layer in ((10.0, 0), (10.0, 1), (14.0, 2), (14.0, 3))
    ]
    found = predictions([*single, (18.0, 4, 6, 20)])
    assert found[18.0] == pytest.approx(22.0, abs=0.1)
    assert min(end for at, end in found.items() if at > 14.0) > 21.9


def test_positions_before_the_last_chunk_say_nothing() -> None:
    """They come as fast as the wire is; the last chunk's KV comes with its computation."""
    early = [(1.0 + layer / 1000, layer, layer + 1, 15) for layer in range(8)]
    assert predictions(early) == {}
    assert predictions([*early, (10.0, 0, 4, 5), (20.0, 4, 6, 5)]) == {20.0: 30.0}


def test_the_slowest_pace_counts() -> None:
    groups = [(0.0, 0, 2, 20), (2.0, 2, 4, 20), (8.0, 4, 6, 20)]
    assert predictions(groups)[8.0] == 14.0


def test_one_group_and_slow_layers_have_no_prediction() -> None:
    assert predictions([(5.0, 0, 8, 20)]) == {}
    assert predictions([(5.0, 0, 7, 20)]) == {}
    slow_ms = MOST_AHEAD_S * 1e3
    slow = [(0.0, 0, 4, 20), (1.1 * slow_ms, 4, 6, 20)]
    assert predictions(slow) == {1.1 * slow_ms: math.inf}
    assert predictions([*slow, (1.2 * slow_ms, 6, 7, 20)])[1.2 * slow_ms] == 1.6 * slow_ms


def test_a_late_group_withdraws_the_prediction() -> None:
    """The end is too far ahead then, and the prediction of the first two groups was wrong."""
    groups = [(0.0, 0, 1, 20), (10.0, 1, 2, 20), (50.0, 2, 3, 20)]
    assert predictions(groups) == {10.0: 70.0, 50.0: math.inf}


def test_groups_that_one_poll_finds_have_no_pace() -> None:
    together_ms = TOGETHER_S * 1e3
    burst = [(0.0, 0, 1, 20), (0.0, 1, 2, 20), (0.9 * together_ms, 2, 4, 20)]
    assert predictions(burst) == {}
    assert predictions([*burst, (10.0, 4, 5, 20)]) == {10.0: 40.0}


def test_a_group_is_overdue_after_the_time_of_the_largest_one() -> None:
    found = calls([(0.0, 0, 3, 20), (4.0, 3, 5, 20), (8.0, 5, 7, 20)])
    assert found == {4.0: (10.0, 4.0 + OVERDUE * 6.0), 8.0: (10.0, 8.0 + OVERDUE * 6.0)}


def test_a_transfer_that_lands_soon_is_reported_once() -> None:
    now_s, reports = [5.0], list[float]()
    soon = SoonReport(lambda: now_s[0], lambda: reports.append(now_s[0]))
    ends_s = (math.inf, 5.0 + 2 * SOON_S, 5.001 + SOON_S / 2, math.inf, 5.003)
    for now_s[0], end_s in zip((5.0, 5.0, 5.001, 5.001, 5.002), ends_s, strict=True):
        soon(end_s, now_s[0])
    assert reports == [5.001]
