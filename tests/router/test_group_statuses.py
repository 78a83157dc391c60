"""What a router knows of its groups: whom it asks, whom it believes, whom it forgets."""

from __future__ import annotations

from typing import Any

from disagg.core.errors import PeerLostError
from disagg.core.prefixes import Digest, pack_block_hashes
from disagg.core.status import GroupStatus, RankStatus
from disagg.core.types import GroupInfo, KVLayout, RankInfo, Shard, Span
from disagg.router.group_table import GroupTable
from disagg.router.policy import RoutedGroup
from disagg.router.status import GroupStatuses
from transport.control import messages as m


class StatusDispatcher:
    """Keeps what is sent, and who listens."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, m.Message]] = []
        self.listeners: dict[str, Any] = {}

    def send(self, peer: str, message: m.Message) -> None:
        self.sent.append((peer, message))

    def listen(self, peer: str, listener: Any) -> None:
        assert peer not in self.listeners, "once"
        self.listeners[peer] = listener

    def ignore(self, peer: str) -> None:
        del self.listeners[peer]


def engine(name: str, address: str) -> RoutedGroup:
    rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), address, b"")
    layout = KVLayout(1, 1, 8, "float32")
    return RoutedGroup(GroupInfo(name, name.split("-")[0], 1, "", layout, 16, "inproc", (rank,)))


def report(name: str, tokens: int = 0) -> m.GroupReport:
    return m.GroupReport(GroupStatus(name, "decode", (RankStatus(f"{name} r0", 0),), tokens_total=tokens))


def test_groups_in_their_order_with_the_latest_of_each() -> None:
    dispatcher, engines = (
        StatusDispatcher(),
        [engine(name, name) for name in ("decode", "prefill-10", "prefill-2", "prefill")],
    )
    statuses = GroupStatuses(dispatcher, lambda: engines)  # type: ignore[arg-type]
    assert [group.name for group in statuses.latest()] == ["prefill", "prefill-2", "prefill-10", "decode"]
    statuses.renew(2.0)
    statuses.renew(2.0)
    assert sorted(dispatcher.sent, key=str) == sorted(
        [(e.group.name, m.Watch(2.0)) for e in engines] * 2, key=str
    )
    dispatcher.listeners["decode"](report("decode", 1))
    dispatcher.listeners["decode"](report("decode", 5))
    dispatcher.listeners["decode"](m.Join())  # logged
    assert statuses.latest()[-1].tokens_total == 5
    assert statuses.latest()[0] == GroupStatus("prefill", "prefill")


def test_reports_tell_costs_and_routers_of_their_group() -> None:
    dispatcher, engines = StatusDispatcher(), [engine("prefill", "a"), engine("prefill-2", "b")]
    statuses = GroupStatuses(dispatcher, lambda: engines)  # type: ignore[arg-type]
    statuses.renew(1.0)
    measured = GroupStatus(
        "prefill-2",
        "prefill",
        prompt_tokens_per_s=100.0,
        host_load_tokens_per_s=1000.0,
        storage_fetch_tokens_per_s=400.0,
        routers=3,
    )
    dispatcher.listeners["b"](m.GroupReport(measured))
    assert [one.load_costs for one in engines] == [(0.0, 0.0), (0.1, 0.25)]
    assert [one.routers for one in engines] == [1, 3]
    dispatcher.listeners["b"](m.GroupReport(GroupStatus("prefill-2", "prefill")))
    assert engines[1].routers == 1, "this router, before its next request"
    dispatcher.listeners["a"](m.GroupReport(measured))
    assert engines[0].load_costs == (0.0, 0.0), "the report is of an earlier group with this address"


def test_who_is_gone_is_forgotten() -> None:
    dispatcher, engines = StatusDispatcher(), [engine("decode", "a"), engine("decode-2", "b")]
    statuses = GroupStatuses(dispatcher, lambda: engines)  # type: ignore[arg-type]
    statuses.renew(1.0)
    for address, name in (("a", "decode"), ("b", "decode-2")):
        dispatcher.listeners[address](report(name))
    dispatcher.listeners["a"](PeerLostError("lost"))
    assert [bool(group.ranks) for group in statuses.latest()] == [False, True]
    del engines[1]
    assert [group.name for group in statuses.latest()] == ["decode"]
    statuses.renew(1.0)
    assert set(dispatcher.listeners) == {"a"}, "b is asked no more, a again"
    dispatcher.sent.clear()
    statuses.close()
    assert not dispatcher.listeners
    assert dispatcher.sent == [("a", m.Watch(0.0))]


def test_another_group_at_the_same_address_is_not_taken_for_it() -> None:
    dispatcher, engines = StatusDispatcher(), [engine("decode", "a")]
    statuses = GroupStatuses(dispatcher, lambda: engines)  # type: ignore[arg-type]
    statuses.renew(1.0)
    dispatcher.listeners["a"](report("decode", 3))
    engines[0] = engine("decode-2", "a")
    assert statuses.latest() == (GroupStatus("decode-2", "decode"),)
    dispatcher.listeners["a"](report("decode-2", 1))
    assert statuses.latest()[0].tokens_total == 1


class TableDispatcher(StatusDispatcher):
    """No peer is lost."""

    changes = 0

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()
        self.suspected: set[str] = set()


def test_kinds_of_hashes_follow_the_digests() -> None:
    """The kinds are cached until a digest changes those of its group."""
    dispatcher = TableDispatcher()
    table = GroupTable(dispatcher, lambda: True)  # type: ignore[arg-type]
    for name in ("prefill", "prefill-2", "decode"):
        table.add(engine(name, name).group)
    table.statuses.renew(1.0)

    def hears(
        name: str, since: int | None, added: list[int], removed: list[int], unit_tokens: int = 16
    ) -> None:
        digest = Digest(
            since, (since or 0) + 1, unit_tokens, pack_block_hashes(added), pack_block_hashes(removed)
        )
        dispatcher.listeners[name](m.CacheDigest(name, digest, switch_tokens=7))

    assert table.hash_kinds() == set()
    hears("decode", None, [5], [])
    assert table.hash_kinds() == set(), "the only decode group: no prefixes are compared"
    hears("prefill-2", None, [5], [])
    assert table.hash_kinds() == {(16, 7)}
    hears("prefill", None, [5, 6], [], unit_tokens=32)
    assert table.hash_kinds() == {(16, 7), (32, 7)}
    before = table.statuses.changes
    hears("prefill", 1, [8], [5], unit_tokens=32)
    assert table.statuses.changes == before, "the same kinds: the cached groups stay"
    hears("prefill", 2, [], [6, 8], unit_tokens=32)
    assert table.hash_kinds() == {(16, 7)}, "a cache without prefixes is not compared"
    table.pop("prefill-2")
    assert table.hash_kinds() == set()
