"""Ranks that read each other's pages: exchanges with their threads, over an in-process wire with faults."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from conditions import until

from disagg.core.clock import Clock
from disagg.core.item_events import ItemPosition
from disagg.core.types import PageServer
from disagg.node.page_exchange import RankExchange
from disagg.node.transfer_loop import LoopCallbacks, TransferLoop
from disagg.storage.breaker import PauseSettings
from disagg.storage.contract import StorageStatistics, require_batch
from disagg.storage.memory import MemoryStorage
from disagg.storage.peers import Answer, PeerStorage, ReadAnswer
from disagg.storage.record import HEADER_BYTES
from transport.inproc import InprocFabric, InprocTransport

REPLY = 1 << 63


class Records:
    """What a rank serves: the records of a storage in memory."""

    def __init__(self, storage: MemoryStorage) -> None:
        self.storage = storage

    def has(self, key: bytes) -> bool:
        return key in self.storage.records()

    def nbytes(self, key: bytes) -> int:
        return len(self.storage.records().get(key, b"")[HEADER_BYTES:])

    def copy(self, key: bytes, into: torch.Tensor) -> bool:
        content = self.storage.records()[key][HEADER_BYTES:]
        into.numpy().data[:] = content
        return True


class AnnouncedStores:
    """What the peers of a cluster have announced: what their stores have now, and what tests claim."""

    def __init__(self, cluster: PageCluster) -> None:
        self._cluster = cluster
        self.claimed: set[bytes] = set()
        """Keys that each peer has announced, although no store has them."""
        self.corrected: list[tuple[str, bytes]] = []

    def position(self, peer: str) -> ItemPosition:
        return ItemPosition(1, 1, None)

    def holders(self, keys: Sequence[bytes], peers: Iterable[str]) -> dict[str, list[int]]:
        found = {}
        for peer in peers:
            records = self._cluster.stores[int(peer.removeprefix("peer-"))].records()
            numbers = [i for i, key in enumerate(keys) if key in records or key in self.claimed]
            if numbers:
                found[peer] = numbers
        return found

    def correct(self, peer: str, keys: Sequence[bytes], position: ItemPosition) -> None:
        self.corrected += [(peer, key) for key in keys]


class ExchangingRank:
    """One rank: an exchange and its thread."""

    def __init__(self, fabric: InprocFabric, name: str, number: int, clock: Clock = time.monotonic) -> None:
        self.name, self.transport = name, InprocTransport(fabric, name)
        self.exchange = RankExchange(
            number, self.transport, 1 << 19, post=lambda work: self.loop.post(work), clock=clock
        )
        callbacks = LoopCallbacks(lost=self.exchange.on_lost, broken=lambda error: self.exchange.end())
        self.loop = TransferLoop(name, self.transport, self.exchange, callbacks)
        self.server = PageServer(number, self.transport.address, "inproc")

    def know(self, servers: Mapping[str, PageServer]) -> None:
        """Returns when the rank has connected these peers, or has failed to."""
        self.loop.call(lambda: self.exchange.know(servers))

    def stop(self) -> None:
        self.loop.post(self.exchange.end)
        self.loop.stop()


class PageCluster:
    """A rank that reads, and ranks that serve what tests put into their `stores`."""

    def __init__(self, serving: int = 1, clock: Clock = time.monotonic) -> None:
        self.fabric = InprocFabric()
        self.reader = ExchangingRank(self.fabric, "reader", 0, clock)
        self.peers = [ExchangingRank(self.fabric, f"peer-{i}", 1 + i, clock) for i in range(serving)]
        self.stores = [MemoryStorage(8 << 20) for _ in self.peers]
        for peer, store in zip(self.peers, self.stores, strict=True):
            peer.exchange.served = Records(store)
        self.announced = AnnouncedStores(self)
        self.ranks = [self.reader, *self.peers]
        servers = {rank.name: rank.server for rank in self.ranks}
        for rank in self.ranks:
            rank.loop.start()
        for rank in self.ranks:
            rank.know(servers)

    def storage(self, pause: PauseSettings | None = None, clock: Clock = time.monotonic) -> PeerStorage:
        return PeerStorage(self.reader.exchange, self.announced, pause, clock)

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()


@contextmanager
def page_cluster(serving: int = 1, clock: Clock = time.monotonic) -> Iterator[PageCluster]:
    """At the end no thread has raised, no buffer is in use, and all threads have ended."""
    cluster = PageCluster(serving, clock)
    try:
        yield cluster
        cluster.fabric.release()
        for rank in cluster.ranks:
            until(lambda rank=rank: rank.exchange.statistics().buffers_in_use == 0, f"{rank.name}: a buffer")  # type: ignore[misc]
            rank.loop.call(rank.transport.check)
            rank.loop.call(rank.exchange.check)
            assert rank.loop.faults == 0
    finally:
        cluster.fabric.release()
        cluster.stop()


class NoPeers:
    """An exchange without peers."""

    peers: Sequence[str] = ()
    most_keys, most_bytes = 16, 1 << 20

    def ask(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        raise AssertionError("a request without a peer")

    def read(self, peer: str, keys: Sequence[bytes], answer: ReadAnswer) -> None:
        raise AssertionError("a request without a peer")


class WrittenAtAPeer(PeerStorage):
    """Puts into the memory of a peer, and reads it from there: the whole contract."""

    def __init__(self, cluster: PageCluster) -> None:
        super().__init__(cluster.reader.exchange, cluster.announced)
        self.store, self.open = cluster.stores[0], True
        self.failed = 0

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        if not self.open:
            require_batch(keys, pages, writable=False)
            self.failed += len(keys)
            return [False] * len(keys)
        return self.store.put(keys, pages, timeout_s)

    def statistics(self) -> StorageStatistics:
        put = self.store.statistics()
        return replace(
            super().statistics(),
            put_pages=put.put_pages,
            put_bytes=put.put_bytes,
            put_failed=put.put_failed + self.failed,
        )

    def close(self) -> None:
        super().close()
        self.open = False
