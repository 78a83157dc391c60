"""Which ranks count as hanging: the calls, their answers, pauses of either process."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.cluster import pulses
from disagg.cluster.group import Group
from disagg.cluster.host_reach import HostReach
from disagg.cluster.pulses import CUT_TIMEOUTS, PAUSE_S, PER_TIMEOUT, Pulses
from disagg.cluster.ranks import UnavailableError
from disagg.node.ownership import NO_COUNTS, GroupCounts

TIMEOUT_S = 10.0


class Answers:
    """Stands in for `Ranks`: calls end when a rank answers."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.tokens: set[str] = set()
        self.ended_calls: set[Any] = set()
        self.calls: list[Any] = []
        self.error: Exception | None = None
        self.silent: set[str] = set()
        self.counts = NO_COUNTS

    def actor(self, name: str) -> Any:
        def remote(token: str, counts: GroupCounts) -> Any:
            assert counts == self.counts
            self.sent.append(name)
            self.tokens.add(token)
            call = object()
            self.calls.append(call)
            if name not in self.silent:
                self.ended_calls.add(call)
            return call

        return SimpleNamespace(pulse=SimpleNamespace(remote=remote))

    def results(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [True for _ in calls]

    def all_end(self) -> None:
        self.ended_calls.update(self.calls)

    def ended(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        assert timeout_s == 0.0, "it never blocks"
        return [call for call in calls if call in self.ended_calls]


class Rig:
    def __init__(self, token: str = "") -> None:
        self.now_s = 100.0
        self.reasons: list[str] = []
        self.needed: set[Group] = set()
        self.answers = Answers()
        actors = [self.answers.actor("a"), self.answers.actor("b")]
        self.group = Group("decode", "decode", None, actors, None)  # type: ignore[arg-type]
        infos = [SimpleNamespace(control_address=f"tcp://127.0.0.1:{port}") for port in (1, 2)]
        self.group.started = [SimpleNamespace(info=info) for info in infos]  # type: ignore[misc]
        self.pulses = Pulses(self.answers, TIMEOUT_S, lambda: self.now_s, token)  # type: ignore[arg-type]

    def look(self, seconds: float) -> list[int]:
        """Looks every half second; returns the ranks of the last look."""
        found: list[int] = []
        for _ in range(round(2 * seconds)):
            self.now_s += 0.5
            silent = self.pulses.silent([(self.group, 0), (self.group, 1)], self.needed)
            found, self.reasons = [rank for _, rank, _ in silent], [why for _, _, why in silent]
        return found


def test_pulses_carry_the_numbers_of_groups_that_were_set() -> None:
    rig = Rig("owner")
    rig.pulses.counts = rig.answers.counts = GroupCounts(1, {"decode": 3})
    rig.look(TIMEOUT_S)
    rig.pulses.renew([rig.group])
    assert rig.answers.sent


def test_each_rank_is_called_a_few_times_per_timeout() -> None:
    rig = Rig()
    assert rig.look(3 * TIMEOUT_S) == []
    assert rig.answers.sent.count("a") == rig.answers.sent.count("b") == 3 * PER_TIMEOUT


def test_a_rank_without_an_answer_is_silent_after_the_timeout_and_called_once() -> None:
    rig = Rig()
    rig.look(1)
    rig.answers.silent = {"b"}
    sent = rig.answers.sent.count("b")
    assert rig.look(TIMEOUT_S) == [], "its last answer is younger"
    assert rig.look(TIMEOUT_S / PER_TIMEOUT) == [1]
    assert rig.answers.sent.count("b") == sent + 1
    assert rig.reasons == ["rank 1 has not answered for 10 s (cluster.hang_timeout_s)"]
    assert rig.pulses.silent([(rig.group, 0)]) == [], "a rank that has left is forgotten"


def test_an_error_is_a_reply_but_a_lost_connection_is_none() -> None:
    rig = Rig()
    rig.look(1)
    rig.answers.error = RuntimeError("a bug")
    assert rig.look(3 * TIMEOUT_S) == []
    rig.answers.error = UnavailableError("connection reset")
    assert rig.look(TIMEOUT_S - 1) == []
    sent = len(rig.answers.sent)
    assert rig.look(5) == [0, 1]
    assert len(rig.answers.sent) > sent, "it is called again over a new connection"


def test_a_pause_of_the_cluster_s_own_process_does_not_count() -> None:
    rig = Rig()
    rig.look(1)
    rig.answers.silent = {"a", "b"}
    assert rig.look(5) == []
    rig.now_s += 1000.0 + PAUSE_S
    assert rig.look(4) == []
    assert rig.look(TIMEOUT_S) == [0, 1]


class SwitchedReach(HostReach):
    """A host that can be reached while `works`; each attempt ends at once."""

    works = True
    attempts = 0

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.proven = True

    def look(self, now_s: float) -> None:
        SwitchedReach.attempts += 1
        self.reached = SwitchedReach.works
        if self.reached:
            self.reached_s = now_s
        else:
            self.failed_s = now_s


@pytest.fixture
def cut_rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Both ranks answer, and then no more; their hosts cannot be reached."""
    monkeypatch.setattr(pulses, "HostReach", SwitchedReach)
    monkeypatch.setattr(SwitchedReach, "attempts", 0)
    monkeypatch.setattr(SwitchedReach, "works", True)
    rig = Rig()
    rig.look(1)
    assert SwitchedReach.attempts == 0, "ranks that answer are not tried again"
    rig.answers.silent = {"a", "b"}
    SwitchedReach.works = False
    return rig


def test_ranks_that_are_cut_off_have_more_time(cut_rig: Rig) -> None:
    assert cut_rig.look(CUT_TIMEOUTS * TIMEOUT_S - 2) == []
    assert cut_rig.look(4) == [0, 1]
    assert cut_rig.reasons[0] == (
        "the host of rank 0 cannot be reached for 50 s (5 times cluster.hang_timeout_s)"
    )


def test_after_a_cut_late_answers_have_as_long_again(cut_rig: Rig) -> None:
    assert cut_rig.look(12) == []
    SwitchedReach.works = True
    assert cut_rig.look(12 + TIMEOUT_S - 3) == []
    assert cut_rig.look(6) == [0, 1], "they hang"


def test_cuts_that_follow_each_other_are_not_one_long_cut(cut_rig: Rig) -> None:
    """Replies are still late from the first cut when the next one begins."""
    assert cut_rig.look(4 * TIMEOUT_S) == []
    SwitchedReach.works = True
    assert cut_rig.look(1) == []
    SwitchedReach.works = False
    assert cut_rig.look((CUT_TIMEOUTS - 1) * TIMEOUT_S) == []
    assert cut_rig.look(TIMEOUT_S + 1) == [0, 1]


def test_answers_after_a_cut_end_the_doubt(cut_rig: Rig) -> None:
    assert cut_rig.look(12) == []
    SwitchedReach.works = True
    cut_rig.answers.silent = set()
    cut_rig.answers.all_end()
    assert cut_rig.look(1) == []
    attempts = SwitchedReach.attempts
    assert cut_rig.look(3 * TIMEOUT_S) == []
    assert SwitchedReach.attempts == attempts
    cut_rig.answers.silent = {"b"}
    assert cut_rig.look(TIMEOUT_S - 1) == []
    assert cut_rig.look(4) == [1], "an earlier cut gives no more time"


def test_a_new_group_waits_no_longer_for_ranks_that_are_cut_off_than_for_a_hang(cut_rig: Rig) -> None:
    cut_rig.needed = {cut_rig.group}
    assert cut_rig.look(TIMEOUT_S - 1) == []
    assert cut_rig.pulses.cut_off == {cut_rig.group}
    assert cut_rig.look(4) == [0, 1]
    assert cut_rig.reasons[0] == (
        "the host of rank 0 cannot be reached for 10 s (cluster.hang_timeout_s; a new group waits to be linked with "
        "it)"
    )


def test_ranks_that_hang_behind_a_bad_network_are_found(cut_rig: Rig) -> None:
    """Every second attempt fails, for ever."""
    found: list[int] = []
    for _ in range(round((2 * CUT_TIMEOUTS + 2) * TIMEOUT_S)):
        SwitchedReach.works = not SwitchedReach.works
        found = found or cut_rig.look(1)
    assert found == [0, 1]


def test_ranks_that_start_get_pulses_of_an_owner_and_no_verdict() -> None:
    rig = Rig("owner")
    rig.answers.silent = {"a", "b"}
    for _ in range(round(2 * 3 * TIMEOUT_S)):
        rig.now_s += 0.5
        rig.pulses.renew([rig.group])
        assert rig.pulses.silent([]) == []
    assert rig.answers.sent.count("a") == rig.answers.sent.count("b") == 3 * PER_TIMEOUT
    assert rig.answers.tokens == {"owner"}


def test_without_an_owner_ranks_that_start_get_no_pulses() -> None:
    rig = Rig()
    rig.now_s += TIMEOUT_S
    rig.pulses.renew([rig.group])
    assert not rig.answers.sent
