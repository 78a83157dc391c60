"""A rank's sharing of host memory: peers that die while the cluster describes them, and faults of a transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import structlog
from conditions import until
from faulty_disk import ManualClock

from disagg.core.errors import TransportError
from disagg.core.prefixes import PrefixKey
from disagg.core.types import GroupInfo, KVLayout, PageServer, RankInfo
from disagg.model.spec.model_spec import shard_of
from disagg.node import renewed_exchange
from disagg.node.block_parts import BlockParts
from disagg.node.host_cache_sharing import HostCacheSharing
from disagg.node.page_exchange import RankExchange
from disagg.node.renewed_exchange import PageEndpoint
from disagg.node.served_items import ServedItems, ServedKind
from disagg.node.transfer_loop import TransferLoop
from disagg.storage.keys import PageKeys, StoredModel
from disagg.storage.parts import PartGrid
from transport.base import Operation
from transport.control import messages as m
from transport.inproc import InprocFabric, InprocTransport

PAGE = 4
LAYOUT = KVLayout(1, 1, 8, "float32")
SHARD = shard_of(LAYOUT, 0, 1)
GRID = PartGrid(LAYOUT, PAGE)


def group(name: str, server: PageServer) -> GroupInfo:
    rank = RankInfo(0, SHARD, f"{name}-0", b"", page_server=server)
    return GroupInfo(name, "colocated", 1, "model", LAYOUT, PAGE, "inproc", (rank,))


def served_items() -> ServedItems:
    keys = PageKeys(StoredModel("model", GRID))
    items = ServedItems(
        keys, [ServedKind("kv", 2, BlockParts(GRID, SHARD, GRID.parts_of(SHARD)), lambda _: [])]
    )
    items.publish("kv", keys.links(PrefixKey.of(list(range(PAGE)))), [0])
    return items


class SharingRank:
    """A rank that shares its host memory, and the messages that it sends."""

    def __init__(self) -> None:
        self.fabric, self.sent = InprocFabric(), list[tuple[str, m.Message]]()
        self.opened: list[InprocTransport] = []
        self.before_open: Callable[[], None] = lambda: None
        self.other = InprocTransport(self.fabric, "other")
        send = lambda peer, message: self.sent.append((peer, message))  # noqa: E731
        self.sharing = HostCacheSharing("one", PageEndpoint(self.open, "inproc"), 1000, send, ManualClock())
        self.sharing.start()

    def open(self) -> InprocTransport:
        self.before_open()
        self.opened.append(InprocTransport(self.fabric, f"one-{len(self.opened)}"))
        return self.opened[-1]

    def know(self, *others: PageServer) -> int:
        """The cluster describes the other group, or none; returns the number of connected peers."""
        own = group("one", self.sharing.server)
        self.sharing.know(own, 0, [own, *(group("other", server) for server in others)], GRID)
        self.sharing.check()  # after the thread has done its work
        return self.sharing.statistics().peers

    def break_transport(self) -> None:
        def fail() -> list[Operation]:
            raise TransportError("a fence is not proven")

        self.opened[-1].progress = fail  # type: ignore[method-assign]
        self.sharing.lost("nobody")  # wakes the thread


def until_shared_again(logs: Sequence[Any]) -> None:
    until(lambda: any(line["event"] == "host_cache_shared_again" for line in logs), "another transport")


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharingRank]:
    monkeypatch.setattr(renewed_exchange, "REOPEN_S", 0.01)
    rank = SharingRank()
    yield rank
    rank.sharing.stop()
    rank.other.close()


def test_a_description_that_arrives_after_a_loss_connects_no_dead_rank(rank: SharingRank) -> None:
    old, new = PageServer(1, rank.other.address, "inproc"), PageServer(2, rank.other.address, "inproc")
    assert rank.know(old) == 1
    rank.sharing.lost("other-0")
    sent = len(rank.sent)
    assert (rank.know(old), rank.know(old), len(rank.sent)) == (0, 0, sent)
    assert rank.know(new) == 1, "the rank has started again"
    rank.sharing.lost("other-0")
    assert (rank.know(new), rank.know(), rank.know(new)) == (0, 0, 1), "the cluster has left it out meanwhile"


def test_items_that_are_served_while_a_transport_is_opened(
    rank: SharingRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the rank would announce pages, and then deny that it has them."""
    items, exchanges = served_items(), list[RankExchange]()

    def make(lane: str, transport: Any, exchange: RankExchange, *rest: Any, **more: Any) -> TransferLoop:
        exchanges.append(exchange)
        rank.sharing.serve(items)
        return TransferLoop(lane, transport, exchange, *rest, **more)

    monkeypatch.setattr(renewed_exchange, "TransferLoop", make)
    with structlog.testing.capture_logs() as logs:
        rank.break_transport()
        until_shared_again(logs)
    assert [exchange.served for exchange in exchanges] == [items]


def test_any_error_while_a_transport_is_opened_is_reported_and_tried_again(rank: SharingRank) -> None:
    def fail() -> None:
        rank.before_open = lambda: None
        raise KeyError("a bug")

    rank.before_open = fail
    with structlog.testing.capture_logs() as logs:
        rank.break_transport()
        until_shared_again(logs)
    [line] = [line for line in logs if line["event"] == "page_transport_not_opened"]
    assert (line["error"], line["exc_info"]) == ("KeyError: 'a bug'", True)
    assert rank.sharing.faults == 1


def test_a_stop_while_the_thread_that_opens_a_transport_starts(
    rank: SharingRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, stops, start = list[RuntimeError](), list[threading.Thread](), threading.Thread.start

    def stop() -> None:
        try:
            rank.sharing.stop()
        except RuntimeError as exc:
            errors.append(exc)

    def start_after_stop(thread: threading.Thread) -> None:
        if thread.name == "reopen-one":
            stops.append(threading.Thread(target=stop))
            start(stops[0])
            stops[0].join(0.2)  # `stop` waits for the start of the thread
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_after_stop)
    with structlog.testing.capture_logs():
        rank.break_transport()
        until(lambda: bool(stops) and not stops[0].is_alive(), "stopped")
    assert errors == []
