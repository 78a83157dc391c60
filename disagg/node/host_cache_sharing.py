"""Shares the second tier of a rank's prefix cache with other groups: peers, KV events, requests, published blocks.

The exchange has a transport and a thread of its own: its bytes are not KV of requests, groups of any roles are its
peers, and a fault of the exchange never ends the rank. If the transport fails, reads are misses until another
transport has been opened; KV events and their replies carry its address to the peers, over the control channel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from disagg.core.clock import Clock
from disagg.core.types import GroupInfo, PageServer, Shard
from disagg.kv.cache_operations import CacheOperation, StorageOperation
from disagg.node.item_events import ItemAnnouncer, ItemWatcher, Send
from disagg.node.page_exchange import ExchangeStatistics
from disagg.node.renewed_exchange import PageEndpoint, RenewedExchange
from disagg.node.served_items import ServedItems
from disagg.storage.parts import PagePart, PartGrid
from disagg.storage.peer_index import PeerIndex
from disagg.storage.peers import PeerStorage
from transport.control import messages as m


@dataclass(slots=True)
class _Peer:
    """The endpoint of a rank of another group."""

    announced: PageServer
    """The endpoint in the cluster's description of the group."""
    present: PageServer | None
    """The endpoint in use: `announced`, or the latest one that the rank itself has sent, after a fault of its
    transport. None if the rank is dead: a description of its group may arrive after the loss."""


class HostCacheSharing:
    """Shares a rank's second tier, and reads those of other groups. Thread-safe. Owns the transport."""

    def __init__(
        self, lane: str, endpoint: PageEndpoint, largest_bytes: int, send: Send, clock: Clock
    ) -> None:
        """`largest_bytes`: size of the largest part. `send`: sends a message over the control channel."""
        self._transport_name = endpoint.name
        self.served: ServedItems | None = None
        """The blocks that other groups may read; None before `serve`."""
        self.index = PeerIndex()
        """What other groups have announced."""
        self._announcer = ItemAnnouncer(send, clock)
        self._watcher = ItemWatcher(self.index, send, lambda: self.server, clock)
        self._lock = threading.Lock()  # guards `_peers`
        self._peers: dict[str, _Peer] = {}
        self._exchange = RenewedExchange(lane, endpoint, largest_bytes, self._tick, self._announce_server)
        self.storage = PeerStorage(self._exchange, self.index)
        """Reads the second tiers of other groups."""

    @property
    def server(self) -> PageServer:
        """This rank's endpoint, for other groups."""
        return self._exchange.server

    def start(self) -> None:
        """Starts the thread."""
        self._exchange.start()

    def serve(self, served: ServedItems) -> None:
        """Begins to serve blocks."""
        self._exchange.serve(served)
        self.served = self._announcer.source = served

    def know(self, own: GroupInfo, rank: int, groups: Iterable[GroupInfo], grid: PartGrid) -> None:
        """Replaces the peers by the ranks of `groups` with the same pages and transport that have parts of this rank.

        `own`, `rank`: this rank's group, whose ranks are no peers, and its number there. A dead rank is a peer again
        when its group is described with another endpoint, or was left out meanwhile.
        """
        wanted = _parts(grid, own.ranks[rank].shard)
        servers: dict[str, PageServer] = {}
        for group in groups:
            same_pages = _pages_of(group) == _pages_of(own)
            for one in group.ranks if same_pages and group.name != own.name else ():
                server = one.page_server
                if server is None or server.transport != self._transport_name:
                    continue
                if not wanted.isdisjoint(_parts(grid, one.shard)):
                    servers[one.control_address] = server
        with self._lock:
            before = self._peers
            self._peers = {peer: _Peer(server, server) for peer, server in servers.items()}
            for peer, known in before.items():
                now = self._peers.get(peer)
                if now is not None and now.announced == known.announced:
                    now.present = known.present
        self._exchange.post(self._know_peers)

    def lost(self, peer: str) -> None:
        """Disconnects a dead rank and forgets its pages. `peer`: its control address."""
        with self._lock:
            if (known := self._peers.get(peer)) is not None:
                known.present = None
        self._exchange.post(self._know_peers)

    def on_message(self, peer: str, message: m.WatchItems | m.HeldItems) -> None:
        """Handles KV events of a peer, or a peer's request for them. Never blocks."""
        self._exchange.post(partial(self._on_message, peer, message))

    def withdraw(self, copies: Sequence[CacheOperation], fetches: Sequence[StorageOperation]) -> None:
        """Withdraws the blocks that a plan overwrites; see `ServedItems.withdraw`."""
        if self.served is not None:
            self.served.withdraw(copies, fetches)

    def statistics(self) -> ExchangeStatistics:
        """Returns the counts of the exchange in use."""
        return self._exchange.statistics()

    def status(self) -> dict[str, int]:
        """Returns the fields of the rank's status that describe the sharing."""
        counts = self.storage.statistics()
        return {
            "shared_peers": self._exchange.statistics().peers,
            "shared_hit_bytes_total": counts.hit_bytes,
            "shared_served_bytes_total": self._exchange.served_bytes,
            "shared_faults_total": counts.errors + counts.late + counts.corrupt,
        }

    def check(self) -> None:
        """Raises `InvariantError` if a structure is inconsistent."""
        self.storage.check()
        for check in (self._exchange.check, self._announcer.check, self._watcher.check):
            self._exchange.call(check)
        if self.served is not None:
            self.served.check()

    def stop(self) -> None:
        """Ends the threads and closes the transport. Idempotent."""
        self.storage.close()
        self._exchange.stop()

    @property
    def faults(self) -> int:
        """Number of exceptions on the threads: bugs, logged with their traceback."""
        return self._exchange.faults

    # --- on the thread

    def _know_peers(self) -> None:
        """Connects the present peers, and forgets all others."""
        with self._lock:
            servers = {peer: one.present for peer, one in self._peers.items() if one.present is not None}
        for peer in [peer for peer in self._watcher.peers if peer not in servers]:
            self._announcer.forget(peer)
            self.storage.forget_peer(peer)
        self._watcher.know(servers)
        self._exchange.know(servers)

    def _on_message(self, peer: str, message: m.WatchItems | m.HeldItems) -> None:
        if isinstance(message, m.HeldItems):
            self._watcher.on_events(peer, message.events)
            return
        server = message.server
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.present is None:  # dead, or not described yet: the peer asks again
                return
            moved = server != known.present and server.transport == self._transport_name
            if moved:
                known.present = server
        if moved:
            self.storage.forget_peer(peer)
            self._know_peers()
        self._announcer.watch(peer, message.position)
        self._watcher.restarted(peer)

    def _tick(self) -> None:
        self._announcer.tick()
        self._watcher.tick()

    def _announce_server(self) -> None:
        """Connects the peers, and sends them the address of the new transport."""
        self._know_peers()
        self._watcher.ask_all()


def _pages_of(group: GroupInfo) -> tuple[object, ...]:
    """Returns the values that two groups must have in common to share pages: also the protocol version, because the
    size of replies depends on it."""
    return group.protocol_version, group.fingerprint, group.page_size, group.layout


def _parts(grid: PartGrid, shard: Shard) -> set[PagePart]:
    return {*grid.parts_of(shard), *grid.states_of(shard)}
