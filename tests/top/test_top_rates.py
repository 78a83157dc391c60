"""Rates from pictures: known growth, restarts, groups that come and go, reports that come in steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from status_pictures import DECODE_TOKENS_PER_S, PREFILL_TOKENS_PER_S, ROUTE_BYTES_PER_S, service

from disagg.core.status import ServiceStatus
from disagg.top.rates import MOST_LINES, WINDOW_S, append, group_of, paired, rates


def after(*seconds: float) -> list[ServiceStatus]:
    pictures: list[ServiceStatus] = []
    for at_s in seconds:
        pictures = append(pictures, service(at_s))
    return pictures


def test_every_rate_is_what_grew() -> None:
    found = rates(after(100.0, 101.0, 102.0))
    assert found.seconds == 2.0
    assert found.prompt_tokens_per_s == pytest.approx(PREFILL_TOKENS_PER_S)
    assert found.generated_tokens_per_s == pytest.approx(DECODE_TOKENS_PER_S)
    assert found.groups["prefill"].tokens_per_s == pytest.approx(PREFILL_TOKENS_PER_S)
    assert found.groups["prefill"].cached_tokens_per_s == pytest.approx(200.0)
    assert found.groups["prefill"].busy == pytest.approx(0.6)
    assert found.groups["decode-2"].tokens_per_s == pytest.approx(DECODE_TOKENS_PER_S)
    assert [(one.source, one.target, one.path) for one in found.flows] == [
        ("prefill r0", "decode r0", "staged"),
        ("prefill r0", "decode-2 r0", "peer"),
        ("prefill r1", "decode r0", "peer"),
        ("prefill r1", "decode-2 r0", "staged"),
    ]
    assert all(one.bytes_per_s == pytest.approx(ROUTE_BYTES_PER_S) for one in found.flows)
    assert all(one.busy == pytest.approx(0.25) for one in found.flows)
    assert found.bytes_per_s == pytest.approx(4 * ROUTE_BYTES_PER_S)


def test_one_picture_has_no_rates() -> None:
    found = rates(after(100.0))
    assert (found.seconds, found.bytes_per_s, found.generated_tokens_per_s) == (0.0, 0.0, 0.0)


def test_only_the_last_seconds_count_but_a_slow_look_has_one_before() -> None:
    assert [one.uptime_s for one in after(1, 2, 3, 4, 5, 6, 7, 8)] == [3, 4, 5, 6, 7, 8]
    assert rates(after(1, 2, 3, 8 + WINDOW_S)).seconds == 5 + WINDOW_S


def test_a_picture_that_comes_twice_or_late_is_not_an_older_one() -> None:
    assert [one.uptime_s for one in after(1, 3, 3)] == [1, 3]
    assert [one.uptime_s for one in after(1, 3, 2.5)] == [1, 2.5]


def test_another_process_begins_anew() -> None:
    old = service(100.0)
    new = replace(service(3.0), unix_s=old.unix_s + 4.0)
    assert append([old], new) == [new]
    longer = replace(service(150.0), unix_s=old.unix_s + 4000.0)
    assert append([old], longer) == [longer], "it runs for longer than the old one did when it was seen last"


def test_a_group_that_comes_grows_from_its_first_picture() -> None:
    pictures = [service(10.0, decode=(1,)), service(11.0), service(12.0)]
    found = rates(pictures)
    assert found.groups["decode-2"].tokens_per_s == pytest.approx(DECODE_TOKENS_PER_S)
    assert {one.bytes_per_s for one in found.flows} == {ROUTE_BYTES_PER_S}
    assert rates(pictures[:2]).groups["decode-2"].tokens_per_s == 0.0, (
        "its past is not the last second's doing"
    )


def test_a_removed_group_has_no_rates() -> None:
    found = rates([service(10.0), service(11.0, decode=(1,))])
    assert set(found.groups) == {"prefill", "decode"}
    assert {one.target for one in found.flows} == {"decode r0"}


def test_flows_are_summed_by_pairs_of_groups_and_path() -> None:
    many = rates([service(10.0, (8,), (8,)), service(12.0, (8,), (8,))]).flows
    assert len(many) == 64 > MOST_LINES
    pairs = paired(many)
    assert [(one.source, one.target, one.path) for one in pairs] == [
        ("prefill", "decode", "staged"),
        ("prefill", "decode", "peer"),
    ]
    assert sum(one.bytes_per_s for one in pairs) == pytest.approx(64 * ROUTE_BYTES_PER_S)
    assert sum(one.bytes_total for one in pairs) == sum(one.bytes_total for one in many)
    assert [one.busy for one in pairs] == pytest.approx([0.25, 0.25])
    assert group_of("decode-2 r11") == "decode-2"


@given(phase=st.floats(0, 1), looks=st.integers(6, 20))
def test_a_report_each_second_seen_each_second_keeps_near_the_truth(phase: float, looks: int) -> None:
    """The group's totals stand still between its reports, which come at any phase and a little late."""
    pictures: list[ServiceStatus] = []
    for look in range(looks):
        status = service(100 + (look * 1.02 + phase) // 1)
        pictures = append(pictures, replace(service(100 + look * 1.02), groups=status.groups))
    found = rates(pictures).groups["decode"].tokens_per_s
    assert DECODE_TOKENS_PER_S * 0.7 < found < DECODE_TOKENS_PER_S * 1.3
