"""Shares the second tier of a rank's prefix cache with other groups: transport, thread, requests, published blocks.

The exchange has a transport and a thread of its own: its bytes are not KV of requests, groups of any roles are its
peers, and a fault of the exchange ends the sharing of the rank, never the rank.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from functools import partial

import structlog

from disagg.core.types import GroupInfo, PageServer
from disagg.kv.cache_operations import CacheOperation, StorageOperation
from disagg.node.page_exchange import NUMBERS, ExchangeStatistics, RankExchange
from disagg.node.served_items import ServedItems
from disagg.node.transfer_loop import LoopCallbacks, TransferLoop
from disagg.storage.peers import PeerStorage
from transport.base import Transport

log = structlog.get_logger(__name__)


class HostCacheSharing:
    """Shares a rank's second tier, and reads those of other groups. Thread-safe. Owns the transport."""

    def __init__(self, lane: str, transport: Transport, name: str, largest_bytes: int) -> None:
        """`name`: name of the transport (`Choice.name`). `largest_bytes`: size of the largest part."""
        self._lane, self._transport, self._name = lane, transport, name
        self._number = secrets.randbelow(NUMBERS)
        self._exchange = RankExchange(
            self._number, transport, largest_bytes, post=lambda work: self._loop.post(work)
        )
        callbacks = LoopCallbacks(broken=self._on_broken, lost=self._exchange.on_lost)
        self._loop = TransferLoop(f"pages-{lane}", transport, self._exchange, callbacks)
        self.storage = PeerStorage(self._exchange)
        """Reads the second tiers of other groups."""
        self.served: ServedItems | None = None
        """The blocks that other groups may read; None before `serve`."""

    @property
    def server(self) -> PageServer:
        """This rank's endpoint, for other groups."""
        return PageServer(self._number, self._transport.address, self._name)

    def start(self) -> None:
        """Starts the thread."""
        self._loop.start()

    def serve(self, served: ServedItems) -> None:
        """Begins to serve blocks."""
        self.served = self._exchange.served = served

    def know(self, own: GroupInfo, groups: Iterable[GroupInfo]) -> None:
        """Replaces the peers by the ranks of `groups` that have the same model, page size and transport.

        `own`: this rank's group, whose ranks are no peers.
        """
        servers: dict[str, PageServer] = {}
        for group in groups:
            same_pages = (group.fingerprint, group.page_size) == (own.fingerprint, own.page_size)
            if group.name == own.name or not same_pages:
                continue
            for rank in group.ranks:
                server = rank.page_server
                if server is not None and server.transport == self._name:
                    servers[rank.control_address] = server
        self._loop.post(partial(self._exchange.know, servers))

    def lost(self, peer: str) -> None:
        """Disconnects a dead rank and forgets its pages. `peer`: its control address."""
        self._loop.post(partial(self._forget, peer))

    def withdraw(self, copies: Sequence[CacheOperation], fetches: Sequence[StorageOperation]) -> None:
        """Withdraws the blocks that a plan overwrites; see `ServedItems.withdraw`."""
        if self.served is not None:
            self.served.withdraw(copies, fetches)

    def statistics(self) -> ExchangeStatistics:
        """Returns the counts of the exchange."""
        return self._exchange.statistics()

    def status(self) -> dict[str, int]:
        """Returns the fields of the rank's status that describe the sharing."""
        counts, exchange = self.storage.statistics(), self._exchange.statistics()
        return {
            "shared_peers": exchange.peers,
            "shared_hit_bytes_total": counts.hit_bytes,
            "shared_served_bytes_total": exchange.served_bytes,
            "shared_faults_total": counts.errors + counts.late + counts.corrupt,
        }

    def check(self) -> None:
        """Raises `InvariantError` if a structure is inconsistent."""
        self.storage.check()
        self._loop.call(self._transport.check)
        if self.served is not None:
            self.served.check()

    def stop(self) -> None:
        """Ends the thread and closes the transport. Idempotent."""
        self.storage.close()
        self._loop.post(self._exchange.end)
        self._loop.stop()

    @property
    def faults(self) -> int:
        """Number of exceptions on the thread: bugs, logged with their traceback."""
        return self._loop.faults

    def _forget(self, peer: str) -> None:
        self._exchange.forget(peer)
        self.storage.forget_peer(peer)

    def _on_broken(self, error: Exception) -> None:
        """Ends the sharing after a fault of the transport. The buffers stay allocated: a peer may still use them."""
        log.error("host_cache_not_shared", lane=self._lane, error=f"{type(error).__name__}: {error}")
        self._exchange.end()
