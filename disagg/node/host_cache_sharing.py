"""Shares the second tier of a rank's prefix cache with other groups: transport, thread, requests, published blocks.

The exchange has a transport and a thread of its own: its bytes are not KV of requests, groups of any roles are its
peers, and a fault of the exchange never ends the rank. If the transport fails, reads are misses until another
transport has been opened; KV events and their replies carry its address to the peers, over the control channel.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog

from disagg.core.clock import Clock
from disagg.core.errors import DisaggError
from disagg.core.types import GroupInfo, PageServer, Shard
from disagg.kv.cache_operations import CacheOperation, StorageOperation
from disagg.node.item_events import EVENTS_S, ItemAnnouncer, ItemWatcher, Send
from disagg.node.page_exchange import NUMBERS, ExchangeStatistics, RankExchange
from disagg.node.served_items import ServedItems
from disagg.node.transfer_loop import LoopCallbacks, TransferLoop
from disagg.storage.parts import PagePart, PartGrid
from disagg.storage.peer_index import PeerIndex
from disagg.storage.peers import Answer, PeerStorage
from transport.base import Transport
from transport.control import messages as m

log = structlog.get_logger(__name__)

REOPEN_S, LONGEST_REOPEN_S = 1.0, 60.0
"""Pause before a failed transport is replaced; doubled after each failed attempt."""
MOST_REOPENED = 8
"""Number of replaced transports after which the rank stops sharing: the buffers of a failed transport are never
freed, because a peer may still use them."""


class PageEndpoint(NamedTuple):
    """How a rank opens the transport with which it shares host memory."""

    open: Callable[[], Transport]
    """Makes a transport, which the caller owns. Raises `DisaggError` or `OSError`."""
    name: str
    """Name of the transport (`Choice.name`)."""


class _Open(NamedTuple):
    """A transport in use, with the thread that drives it."""

    server: PageServer
    transport: Transport
    exchange: RankExchange
    loop: TransferLoop


class _PresentExchange:
    """The exchange of the transport in use; implements `PageExchange`."""

    def __init__(self, opened: Callable[[], _Open]) -> None:
        self._opened = opened

    @property
    def peers(self) -> Sequence[str]:
        return self._opened().exchange.peers

    @property
    def most_keys(self) -> int:
        return self._opened().exchange.most_keys

    @property
    def most_bytes(self) -> int:
        return self._opened().exchange.most_bytes

    def ask(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        self._opened().exchange.ask(peer, keys, answer)

    def read(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        self._opened().exchange.read(peer, keys, answer)


@dataclass(slots=True)
class _Peer:
    """The endpoint of a rank of another group."""

    announced: PageServer
    """The endpoint in the cluster's description of the group."""
    present: PageServer | None
    """The endpoint that the rank has sent since, if it has opened another one after a fault of its transport. None if
    the rank is dead: a description of its group may arrive after the loss."""


class HostCacheSharing:
    """Shares a rank's second tier, and reads those of other groups. Thread-safe. Owns the transport."""

    def __init__(
        self, lane: str, endpoint: PageEndpoint, largest_bytes: int, send: Send, clock: Clock
    ) -> None:
        """`largest_bytes`: size of the largest part. `send`: sends a message over the control channel."""
        self._lane, self._endpoint, self._largest_bytes, self._clock = lane, endpoint, largest_bytes, clock
        self.served: ServedItems | None = None
        """The blocks that other groups may read; None before `serve`."""
        self.index = PeerIndex()
        """What other groups have announced."""
        self._announcer = ItemAnnouncer(send, clock)
        self._watcher = ItemWatcher(self.index, send, lambda: self.server, clock)
        self._lock = threading.Lock()  # guards the fields below
        self._peers: dict[str, _Peer] = {}
        self._failed: list[_Open] = []
        """Earlier transports, whose buffers peers may still use."""
        self._faults = 0
        """Exceptions on the threads of earlier transports."""
        self._stopping = threading.Event()
        self._reopener: threading.Thread | None = None
        self._open = self._make()
        self._ended: _Open | None = None
        """The latest transport that has failed."""
        self.storage = PeerStorage(_PresentExchange(lambda: self._open), self.index)
        """Reads the second tiers of other groups."""

    @property
    def server(self) -> PageServer:
        """This rank's endpoint, for other groups."""
        return self._open.server

    def start(self) -> None:
        """Starts the thread."""
        self._open.loop.start()

    def serve(self, served: ServedItems) -> None:
        """Begins to serve blocks."""
        with self._lock:  # another transport may be opened at this time
            self.served = self._open.exchange.served = self._announcer.source = served

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
                if server is None or server.transport != self._endpoint.name:
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
        self._post(self._know_peers)

    def lost(self, peer: str) -> None:
        """Disconnects a dead rank and forgets its pages. `peer`: its control address."""
        with self._lock:
            if (known := self._peers.get(peer)) is not None:
                known.present = None
        self._post(self._know_peers)

    def on_message(self, peer: str, message: m.WatchItems | m.HeldItems) -> None:
        """Handles KV events of a peer, or a peer's request for them. Never blocks."""
        self._post(partial(self._on_message, peer, message))

    def withdraw(self, copies: Sequence[CacheOperation], fetches: Sequence[StorageOperation]) -> None:
        """Withdraws the blocks that a plan overwrites; see `ServedItems.withdraw`."""
        if self.served is not None:
            self.served.withdraw(copies, fetches)

    def statistics(self) -> ExchangeStatistics:
        """Returns the counts of the exchange in use."""
        return self._open.exchange.statistics()

    def status(self) -> dict[str, int]:
        """Returns the fields of the rank's status that describe the sharing."""
        counts, exchange = self.storage.statistics(), self._open.exchange.statistics()
        with self._lock:
            earlier = sum(one.exchange.statistics().served_bytes for one in self._failed)
        return {
            "shared_peers": exchange.peers,
            "shared_hit_bytes_total": counts.hit_bytes,
            "shared_served_bytes_total": exchange.served_bytes + earlier,
            "shared_faults_total": counts.errors + counts.late + counts.corrupt,
        }

    def check(self) -> None:
        """Raises `InvariantError` if a structure is inconsistent."""
        self.storage.check()
        opened, ended = self._open, self._ended
        checks = (opened.exchange.check, self._announcer.check, self._watcher.check)
        for check in (opened.transport.check, *checks) if ended is not opened else checks:
            if ended is opened:
                check()
            else:
                opened.loop.call(check)
        if self.served is not None:
            self.served.check()

    def stop(self) -> None:
        """Ends the threads and closes the transport. Idempotent."""
        self._stopping.set()
        self.storage.close()
        with self._lock:
            reopener = self._reopener
        if reopener is not None:
            reopener.join()
        self._open.loop.post(self._open.exchange.end)
        self._open.loop.stop()

    @property
    def faults(self) -> int:
        """Number of exceptions on the thread: bugs, logged with their traceback."""
        return self._faults + self._open.loop.faults

    def _post(self, work: Callable[[], None]) -> None:
        """Queues work for the thread. Without a thread the work is dropped: the next thread begins with all peers."""
        if self._open is not self._ended:
            self._open.loop.post(work)

    # --- on the thread

    def _know_peers(self) -> None:
        """Connects the present peers, and forgets all others."""
        with self._lock:
            servers = {peer: one.present for peer, one in self._peers.items() if one.present is not None}
        for peer in [peer for peer in self._watcher.peers if peer not in servers]:
            self._announcer.forget(peer)
            self.storage.forget_peer(peer)
        self._watcher.know(servers)
        self._open.exchange.know(servers)

    def _on_message(self, peer: str, message: m.WatchItems | m.HeldItems) -> None:
        if isinstance(message, m.HeldItems):
            self._watcher.on_events(peer, message.events)
            return
        server = message.server
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.present is None:  # its group is not described yet: the peer asks again
                return
            moved = server != known.present and server.transport == self._endpoint.name
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

    # --- transports

    def _make(self) -> _Open:
        """Opens a transport. Raises `DisaggError` or `OSError`."""
        transport = self._endpoint.open()
        server = PageServer(secrets.randbelow(NUMBERS), transport.address, self._endpoint.name)
        exchange = RankExchange(
            server.number, transport, self._largest_bytes, post=lambda work: loop.post(work)
        )
        exchange.served = self.served
        callbacks = LoopCallbacks(broken=self._on_broken, lost=exchange.on_lost, tick=self._tick)
        loop = TransferLoop(f"pages-{self._lane}", transport, exchange, callbacks, tick_s=EVENTS_S)
        return _Open(server, transport, exchange, loop)

    def _on_broken(self, error: Exception) -> None:
        """Replaces a transport that has failed. Runs on its thread, which ends."""
        self._ended = self._open
        self._open.exchange.end()
        last = len(self._failed) == MOST_REOPENED
        why, then = f"{type(error).__name__}: {error}", "never" if last else f"in {REOPEN_S:g} s or later"
        log.error("host_cache_not_shared", lane=self._lane, error=why, again=then)
        with self._lock:  # `stop` joins a thread that has started
            if not last and not self._stopping.is_set():
                name = f"reopen-{self._lane}"
                self._reopener = threading.Thread(target=self._reopen, name=name, daemon=True)
                self._reopener.start()

    def _reopen(self) -> None:
        failed, pause_s = self._open, REOPEN_S
        with suppress(TimeoutError):  # its thread closes the failed transport, which may hang
            failed.loop.stop()
        while not self._stopping.wait(pause_s):
            try:
                opened = self._make()
            except Exception as exc:
                pause_s = min(2 * pause_s, LONGEST_REOPEN_S)
                bug = not isinstance(exc, DisaggError | OSError)
                with self._lock:
                    self._faults += bug
                log.warning(
                    "page_transport_not_opened",
                    lane=self._lane,
                    error=f"{type(exc).__name__}: {exc}" if bug else str(exc),
                    again_s=pause_s,
                    exc_info=bug,
                )
                continue
            with self._lock:
                self._failed.append(failed)
                self._faults += failed.loop.faults
                opened.exchange.served = self.served  # `serve` may have run since
                self._open = opened
            opened.loop.start()
            opened.loop.post(self._announce_server)
            log.info("host_cache_shared_again", lane=self._lane)
            return

    def _announce_server(self) -> None:
        """Connects the peers, and sends them the address of the new transport."""
        self._know_peers()
        self._watcher.ask_all()


def _pages_of(group: GroupInfo) -> tuple[object, ...]:
    """Returns what two groups must have in common to share pages."""
    return group.fingerprint, group.page_size, group.layout


def _parts(grid: PartGrid, shard: Shard) -> set[PagePart]:
    return {*grid.parts_of(shard), *grid.states_of(shard)}
