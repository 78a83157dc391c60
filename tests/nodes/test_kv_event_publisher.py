"""What a leader tells routers of its cache, when, and what a router makes of it."""

from __future__ import annotations

from typing import Any

from disagg.core.prefixes import Digest
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, KVLayout, RankInfo, Shard, Span
from disagg.kv.event_log import KVEventLog
from disagg.node.kv_event_publisher import KVEventPublisher
from disagg.router.policy import RoutedGroup
from disagg.router.status import GroupStatuses
from transport.control import messages as m


class Teller:
    """A leader's news of a cache, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, m.CacheDigest]] = []
        self.kv_events = KVEventLog(64)
        self.news = KVEventPublisher(lambda peer, message: self.sent.append((peer, message)))  # type: ignore[arg-type]

    def tell(self, *watchers: str, news: int = 1) -> list[tuple[str, int | None, int]]:
        self.sent.clear()
        self.news.publish({"device": self.kv_events}, watchers, "prefill", 0, news)
        return [(peer, message.digest.since, message.digest.version) for peer, message in self.sent]


def test_everything_once_then_what_changed() -> None:
    teller = Teller()
    teller.kv_events.add([1, 2, 3])
    teller.news.watch("a", m.Watch(1.0, "events"))
    teller.news.watch("b", m.Watch(1.0))
    assert teller.tell("a", "b") == [("a", None, 3)], "b does not want it"
    assert teller.tell("a", "b") == []
    teller.news.watch("b", m.Watch(1.0, "events"))
    teller.kv_events.add([4])
    assert teller.tell("a", "b", news=2) == [("b", None, 4)], "for a it is not much"
    assert teller.tell("a", "b") == [("a", 3, 4)]
    teller.news.watch("a", m.Watch(1.0, "events"))
    assert teller.tell("a", "b") == []
    teller.news.watch("a", m.Watch(1.0, "all"))
    assert teller.tell("a", "b") == [("a", None, 4)]


def test_who_goes_is_told_no_more_and_everything_when_it_is_back() -> None:
    teller = Teller()
    teller.kv_events.add([1])
    for router, farewell in (("a", None), ("b", m.Watch(0.0, "events")), ("c", m.Watch(1.0))):
        teller.news.watch(router, m.Watch(1.0, "events"))
        assert teller.tell(router) == [(router, None, 1)]
        if farewell is not None:
            teller.news.watch(router, farewell)
        assert teller.tell(*([router] if farewell else [])) == []
        teller.news.watch(router, m.Watch(1.0, "events"))
        assert teller.tell(router) == [(router, None, 1)]
        teller.tell()


def test_each_tier_has_versions_of_its_own() -> None:
    teller, host = Teller(), KVEventLog(128)
    teller.kv_events.add([1])
    teller.news.watch("a", m.Watch(1.0, "events"))

    def tell() -> list[tuple[str, int | None, int]]:
        teller.sent.clear()
        teller.news.publish({"device": teller.kv_events, "host": host}, ["a"], "prefill", 0, 1)
        return [(message.tier, message.digest.since, message.digest.version) for _, message in teller.sent]

    assert tell() == [("device", None, 1), ("host", None, 0)]
    host.add([7, 8])
    assert tell() == [("host", 0, 2)]
    teller.kv_events.add([2])
    assert tell() == [("device", 1, 2)]
    teller.news.watch("a", m.Watch(1.0, "all"))
    assert tell() == [("device", None, 2), ("host", None, 2)]


class DigestDispatcher:
    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.listener: Any = None

    def send(self, peer: str, message: m.Message) -> None:
        self.sent.append(message)

    def listen(self, peer: str, listener: Any) -> None:
        self.listener = listener


def test_a_router_follows_and_asks_for_everything_when_some_is_missing() -> None:
    dispatcher = DigestDispatcher()
    rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), "leader", b"")
    info = GroupInfo(
        "prefill", "prefill", PROTOCOL_VERSION, "", KVLayout(1, 1, 8, "float32"), 16, "x", (rank,)
    )
    engine, wanted = RoutedGroup(info), [False]
    statuses = GroupStatuses(dispatcher, lambda: [engine], lambda _: wanted[0])  # type: ignore[arg-type]
    statuses.renew(2.0)
    wanted[0] = True
    statuses.renew(2.0)
    assert dispatcher.sent == [m.Watch(2.0), m.Watch(2.0, "events")]
    kv_events = KVEventLog(64)
    kv_events.add([1, 2])
    dispatcher.listener(m.CacheDigest("prefill", kv_events.digest(), 7))
    assert (len(engine.held), engine.held.switch_tokens, engine.held.longest_tokens([1, 2, 3])) == (2, 7, 128)
    dispatcher.listener(m.CacheDigest("prefill-2", KVEventLog(64).digest()))
    dispatcher.listener(m.CacheDigest("prefill", Digest(2, 3, 64, b"short", b"")))
    dispatcher.listener(m.CacheDigest("prefill", Digest(None, 3, 64, b"short", b"")))
    assert (len(engine.held), engine.held.version) == (2, 2), (
        "neither of another group, nor of what cannot be read"
    )
    assert dispatcher.sent[2:] == []
    dispatcher.listener(m.CacheDigest("prefill", Digest(5, 6, 64, b"", b"")))
    assert dispatcher.sent[2:] == [m.Watch(2.0, "all")]
    kv_events.remove([2])
    dispatcher.listener(m.CacheDigest("prefill", kv_events.digest()))
    assert (len(engine.held), engine.held.version) == (1, 3)
    host = KVEventLog(128)
    host.add([5, 6])
    dispatcher.listener(m.CacheDigest("prefill", host.digest(), 7, "host"))
    assert (len(engine.held), len(engine.lower["host"]), engine.lower["host"].kind) == (1, 2, (128, 7))
    dispatcher.listener(m.CacheDigest("prefill", Digest(1, 2, 128, b"", b""), 7, "host"))
    assert dispatcher.sent[3:] == [m.Watch(2.0, "all")], "a missed digest of any tier"
