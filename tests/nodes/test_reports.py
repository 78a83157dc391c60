"""Whom a leader tells, and when it stops to."""

from __future__ import annotations

import pytest

from disagg.core.status import GroupStatus, RankStatus
from disagg.node.reports import FORGET_AFTER, Reports
from transport.control import messages as m

STATUS = GroupStatus("decode", "decode")


class Leader:
    """Its reports, what they send, and a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.reported: list[str] = []
        self.reports = Reports(self._send, lambda: self.now_s)

    def _send(self, router: str, message: m.Message) -> None:
        assert message == m.GroupReport(STATUS)
        self.reported.append(router)

    def publish(self) -> list[str]:
        self.reported.clear()
        self.reports.publish(STATUS)
        return self.reported


def test_a_router_that_watches_is_sent_reports_for_five_of_its_intervals() -> None:
    leader = Leader()
    assert leader.publish() == []
    leader.reports.watch("fast", m.Watch(1.0), STATUS)
    leader.reports.watch("slow", m.Watch(10.0), STATUS)
    assert leader.reported == ["fast", "slow"], "a new router receives a report at once"
    leader.reports.watch("fast", m.Watch(1.0), STATUS)
    assert leader.reported == ["fast", "slow"]
    leader.now_s += FORGET_AFTER
    assert leader.publish() == ["fast", "slow"]
    leader.now_s += 0.01
    assert leader.publish() == ["slow"]
    leader.reports.lost("slow")
    leader.reports.lost("nobody")
    assert leader.publish() == []
    leader.reports.watch("fast", m.Watch(1.0), STATUS)
    assert leader.reported == ["fast"], "the router is new again"
    leader.reports.watch("fast", m.Watch(0.0), STATUS)
    leader.reports.watch("never", m.Watch(0.0), STATUS)
    assert leader.publish() == []


def test_ranks_are_kept_in_their_order_and_no_others() -> None:
    reports = Leader().reports
    for rank in (1, 0, 5):
        reports.update_rank(RankStatus(f"decode r{rank}", rank), ranks=2)
    reports.update_rank(RankStatus("decode r1", 1, faults_total=3), ranks=2)
    assert [rank.name for rank in reports.ranks] == ["decode r0", "decode r1"]
    assert reports.ranks[1].faults_total == 3


def test_steps_are_timed_from_their_plan() -> None:
    leader = Leader()
    for length_s, tokens in ((0.5, 3), (0.25, 4)):
        leader.now_s += 7.0  # idle
        leader.reports.step_begins()
        leader.now_s += length_s
        leader.reports.step_ended(tokens)
    assert (leader.reports.steps, leader.reports.tokens) == (2, 7)
    assert leader.reports.step_s == pytest.approx(0.75)
    assert leader.reports.prompt_tokens_per_s == 0.0


def test_steps_that_measure_prompts_give_their_rate() -> None:
    leader = Leader()
    for length_s, tokens, prompt_tokens in ((0.5, 100, 100), (1.0, 700, 0)):
        leader.reports.step_begins()
        leader.now_s += length_s
        leader.reports.step_ended(tokens, prompt_tokens)
    assert leader.reports.prompt_tokens_per_s == 200.0
