"""The books of who is silent."""

from __future__ import annotations

from disagg.core.types import GroupInfo, KVLayout, RankInfo, Shard, Span
from disagg.node.silence import Silences


def group(name: str, *addresses: str) -> GroupInfo:
    ranks = tuple(
        RankInfo(i, Shard(i, Span(0, 1), Span(i, i + 1)), address, b"") for i, address in enumerate(addresses)
    )
    return GroupInfo(name, "decode", 3, "f", KVLayout(1, 2, 8, "float32"), 16, "ucx", ranks)


def test_a_group_is_whole_when_its_last_silent_peer_is_heard() -> None:
    silences, one, two = Silences(), group("one", "a", "b"), group("two", "b", "c")
    silences.linked(one, ["a", "b"])
    silences.linked(two, ["c"])
    assert silences.mark_silent("a")
    assert not silences.mark_silent("a"), "known already"
    assert silences.mark_silent("b")
    assert silences.mark_met("a") == [], "b is still missing"
    assert silences.mark_met("b") == [one], "and the other group does not speak to b"
    assert silences.mark_met("b") == [], "it was not silent"


def test_who_is_dead_is_not_waited_for() -> None:
    silences, one, two = Silences(), group("one", "a", "b"), group("two", "c")
    silences.linked(one, ["a"])
    silences.linked(two, ["c"])
    silences.mark_silent("a")
    silences.mark_silent("c")
    silences.dead("b")
    assert not silences.is_linked("a"), "a group without one of its ranks is gone"
    assert silences.mark_met("a") == []
    assert silences.mark_met("c") == [two]
