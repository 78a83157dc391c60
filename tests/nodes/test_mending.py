"""Rounds that mend a broken data connection: two ranks and what passes between them, in every order that matters."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest

from disagg.core.types import GroupInfo, KVLayout, RankInfo, Shard, Span
from disagg.node.mending import FIRST_PAUSE_S, LONGEST_PAUSE_S, Mending
from disagg.node.silence import Silences
from transport.control import messages as m


class End:
    """One rank's side: what it did, and what is on its way to the other one."""

    def __init__(self, name: str, other: str) -> None:
        self.name, self.other, self.now_s = name, other, 100.0
        self.did: list[str] = []
        self.on_the_way: deque[m.LinkBroken] = deque()
        self.silences = Silences()
        info = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), other, b"")
        group = GroupInfo(other, "decode", 3, "f", KVLayout(1, 2, 8, "float32"), 16, "tls", (info,))
        self.silences.linked(group, [other])
        self.fails = 0
        """Number of next links that fail."""
        self.mending = Mending(
            self.silences,
            name,
            fence=lambda peer: self.did.append(f"fence {peer}"),
            send=self._send,
            link=self._link,
            linked=self._linked,
            clock=lambda: self.now_s,
        )

    def _link(self, group: GroupInfo) -> bool:
        self.fails -= 1
        self.did.append(f"{'link' if self.fails < 0 else 'no link to'} {group.name}")
        return self.fails < 0

    def _linked(self, peer: str, message: m.Linked) -> bool:
        """Every number above 1 is that of a second link, and the peer has fenced this rank in between."""
        self.did.append(f"{peer} linked {message.inbox}")
        return message.inbox == 1

    def _send(self, peer: str, message: m.Message) -> None:
        assert isinstance(message, m.LinkBroken)
        assert peer == self.other
        self.on_the_way.append(message)

    def find(self) -> None:
        self.mending.on_connection_lost(self.other)

    def hear(self, one: End) -> None:
        """All that is on its way from the other one."""
        while one.on_the_way:
            self.mending.on_link_broken(one.name, one.on_the_way.popleft())

    def met(self) -> None:
        """The control channel lost the other one, and has met it again."""
        self.mending.on_silent(self.other)
        self.on_the_way.clear()
        self.mending.on_met(self.other)


@pytest.fixture
def ends() -> tuple[End, End]:
    return End("a", "b"), End("b", "a")


def test_one_side_finds_it(ends: tuple[End, End]) -> None:
    """It connects only when the other one has fenced."""
    a, b = ends
    a.find()
    a.find()
    assert a.did == ["fence b"]
    b.hear(a)
    assert b.did == ["fence a", "link a"]
    a.hear(b)
    assert a.did == ["fence b", "link b"]
    assert not a.on_the_way
    assert (a.mending.rounds, b.mending.rounds) == (1, 0)


def test_both_find_it_at_once(ends: tuple[End, End]) -> None:
    """Each question is the other's answer: both fence once and link once."""
    a, b = ends
    a.find()
    b.find()
    a.hear(b)
    b.hear(a)
    assert (a.did, b.did) == (["fence b", "link b"], ["fence a", "link a"])
    assert not a.on_the_way
    assert not b.on_the_way


def test_rounds_are_further_and_further_apart(ends: tuple[End, End]) -> None:
    """While connections do not last, whoever finds that. Of one that has lasted the next break is mended at once."""
    a, b = ends
    began: list[float] = []
    for step in range(8 * 150):
        a.now_s = b.now_s = 100.0 + step / 8
        rounds = a.mending.rounds
        a.find()
        b.hear(a)
        a.hear(b)
        if a.mending.rounds > rounds:
            began.append(a.now_s)
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert pauses[:5] == [FIRST_PAUSE_S * 2**i for i in range(5)]
    assert set(pauses[5:]) == {LONGEST_PAUSE_S}
    b.find()
    assert b.mending.rounds == 0, "it has heard of these rounds"
    a.now_s += 2 * LONGEST_PAUSE_S
    a.find()
    b.hear(a)
    a.hear(b)
    a.now_s += FIRST_PAUSE_S
    a.find()
    assert a.mending.rounds == len(began) + 2


def test_the_control_channel_breaks_in_a_round(ends: tuple[End, End]) -> None:
    """No answer comes; both are linked when they meet, and the next break is mended again."""
    a, b = ends
    a.find()
    for one in ends:
        one.met()
    assert (a.did, b.did) == (["fence b", "fence b", "link b"], ["fence a", "link a"])
    a.now_s += LONGEST_PAUSE_S
    a.find()
    b.hear(a)
    a.hear(b)
    assert (a.did[3:], b.did[2:]) == (["fence b", "link b"], ["fence a", "link a"])


def test_an_answer_to_a_forgotten_question_changes_nothing(ends: tuple[End, End]) -> None:
    a, b = ends
    a.find()
    b.hear(a)
    a.mending.on_silent("b")
    a.hear(b)
    assert a.did == ["fence b", "fence b"], "it is linked when the control channel meets the peer"
    assert not a.on_the_way


def test_a_silent_peer_is_the_control_channels(ends: tuple[End, End]) -> None:
    """Fenced already. A question of before the silence is answered; the link waits until the peer is met."""
    a, b = ends
    b.find()
    a.silences.mark_silent("b")
    a.find()
    assert a.did == []
    a.hear(b)
    assert a.did == ["fence b"]
    assert [message.answer for message in a.on_the_way] == [True]


def test_the_dead_are_not_asked(ends: tuple[End, End]) -> None:
    a, _ = ends
    a.silences.dead("b")
    a.mending.dead("b")
    a.find()
    assert a.did == []
    assert not a.on_the_way


def test_an_announcement_of_before_the_peer_s_fence_is_void(ends: tuple[End, End]) -> None:
    a, b = ends
    a.find()
    a.mending.on_linked("b", m.Linked(1))
    assert a.did == ["fence b"]
    b.hear(a)
    a.hear(b)
    a.mending.on_linked("b", m.Linked(1))
    assert a.did == ["fence b", "link b", "b linked 1"]


def test_a_peer_that_linked_twice_is_mended(ends: tuple[End, End]) -> None:
    """It has fenced this rank after this rank linked it, so what was sent meanwhile is lost."""
    a, b = ends
    a.mending.on_linked("b", m.Linked(2))
    assert a.did == ["b linked 2", "fence b"]
    b.hear(a)
    a.hear(b)
    assert (a.did[2:], b.did) == (["link b"], ["fence a", "link a"])
    a.mending.dead("b")
    a.silences.dead("b")
    a.mending.on_linked("b", m.Linked(3))
    assert a.did[3:] == ["b linked 3"]


@pytest.mark.parametrize("met", [False, True], ids=["in a round", "when met"])
def test_a_link_that_fails_is_tried_again(ends: tuple[End, End], met: bool) -> None:
    """After growing pauses, in rounds of both sides; once linked, no further round follows."""
    a, b = ends
    a.fails = 3
    if met:
        a.met()
        b.met()
    else:
        a.find()
    began: list[float] = []
    for step in range(8 * 100):
        a.now_s = b.now_s = 100.0 + step / 8
        rounds = a.mending.rounds
        a.mending.look()
        b.mending.look()
        b.hear(a)
        a.hear(b)
        if a.mending.rounds > rounds:
            began.append(a.now_s)
    assert a.did.count("no link to b") == 3
    assert a.did[-2:] == ["fence b", "link b"]
    assert b.did[-2:] == ["fence a", "link a"]
    assert len(began) == 3
    assert sorted({later - earlier for earlier, later in pairwise(began)})[0] >= 2 * FIRST_PAUSE_S
    assert b.mending.rounds == 0


def test_a_link_that_failed_to_a_peer_that_is_lost() -> None:
    """The loss ends the tries: a silent peer is linked when it is met, a dead one never."""
    for end in ("silent", "dead"):
        a = End("a", "b")
        a.fails = 1
        a.met()
        assert a.did[-1] == "no link to b"
        if end == "dead":
            a.silences.dead("b")
            a.mending.dead("b")
        else:
            a.mending.on_silent("b")
        did = list(a.did)
        a.now_s += LONGEST_PAUSE_S
        a.mending.look()
        assert a.did == did
        assert not a.on_the_way
