"""KV events of the second tier between ranks of different groups, over the control channel.

reader -- WatchItems --> owner    repeated every `WATCH_S`, at once after a piece, and after a gap
reader <- HeldItems -- owner      the next piece of the content in reply, or changes; further changes every `EVENTS_S`

The reader states what it knows, and the owner replies with what follows, so neither side needs to know which
messages were lost. The owner stores only the latest position of each reader. A piece is sent only in reply, so
at most one piece is on its way to a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from disagg.core.clock import Clock
from disagg.core.errors import InvariantError
from disagg.core.item_events import ItemChanges, ItemEvents, ItemPosition
from disagg.core.log import get_logger
from disagg.core.types import PageServer
from disagg.storage.peer_index import PeerIndex
from transport.control import messages as m

log = get_logger(__name__)

EVENTS_S = 0.1
"""Interval in which changes are sent."""
WATCH_S = 2.0
"""Interval in which a reader repeats `WatchItems`."""
READER_S = 10.0
"""Time without `WatchItems` after which a reader gets no more changes."""
SOONEST_S = 0.25
"""Shortest time between two `WatchItems` in reply to a peer's own."""

Send = Callable[[str, m.Message], None]


class ItemSource(Protocol):
    """The items that a rank serves; implemented by `ServedItems`."""

    @property
    def epoch(self) -> int:
        """Random number of the log of changes, different after each start of the rank."""

    @property
    def version(self) -> int:
        """Number of changes so far."""

    def after(self, position: ItemPosition) -> ItemEvents:
        """Returns what a reader with `position` lacks next."""


@dataclass(slots=True)
class _Reader:
    until_s: float
    """Time at which the reader is removed unless it sends `WatchItems` again."""
    version: int | None = None
    """Version of the changes that were sent to the reader; None while the reader lacks pieces."""


@dataclass(frozen=True, slots=True)
class AnnouncerStatistics:
    """Current state of an `ItemAnnouncer`, and counts since the start."""

    readers: int
    messages: int
    """Messages with pieces or changes."""
    sent_bytes: int
    """Bytes of ids and names in these messages."""


class ItemAnnouncer:
    """Sends this rank's KV events to readers. Used by one thread."""

    def __init__(self, send: Send, clock: Clock) -> None:
        self._send, self._clock = send, clock
        self.source: ItemSource | None = None
        """None before the group has started."""
        self._readers: dict[str, _Reader] = {}
        self._messages = self._bytes = 0
        self._changes: dict[ItemPosition, ItemChanges] = {}
        """Latest changes by the position of their readers; empty after a tick."""

    def watch(self, peer: str, position: ItemPosition) -> None:
        """Sends a reader what it lacks, and from then on changes."""
        if self.source is None:  # the reader asks again
            return
        reader = self._readers[peer] = _Reader(self._clock() + READER_S)
        self._announce(peer, reader, self._after(self.source, position))

    def tick(self) -> None:
        """Sends changes to the readers that lack them. Removes readers that are silent."""
        source, now_s = self.source, self._clock()
        self._readers = {peer: reader for peer, reader in self._readers.items() if reader.until_s > now_s}
        for peer, reader in self._readers.items():
            version = reader.version
            if source is None or version is None or version == source.version:
                continue
            self._announce(peer, reader, self._after(source, ItemPosition(source.epoch, version, None)))
        self._changes.clear()

    def forget(self, peer: str) -> None:
        """Removes a reader that has left; an unknown name has no effect."""
        self._readers.pop(peer, None)

    def statistics(self) -> AnnouncerStatistics:
        """Returns the current state and counts."""
        return AnnouncerStatistics(len(self._readers), self._messages, self._bytes)

    def check(self) -> None:
        """Raises `InvariantError` if a reader is ahead of the source."""
        for peer, reader in self._readers.items():
            if self.source is None or (reader.version or 0) > self.source.version:
                raise InvariantError(f"item announcer: {peer} has version {reader.version}")

    def _after(self, source: ItemSource, position: ItemPosition) -> ItemEvents:
        """Returns what a reader lacks next. Readers with the same position share the work of long changes."""
        known = self._changes.get(position)
        if known is not None and known.version == source.version:
            return known
        events = source.after(position)
        if isinstance(events, ItemChanges):
            self._changes[position] = events
        return events

    def _announce(self, peer: str, reader: _Reader, events: ItemEvents) -> None:
        if isinstance(events, ItemChanges):
            reader.version = events.version
            if events.version == events.since:
                return
            self._bytes += len(events.added) + len(events.removed)
        else:
            reader.version = None
            self._bytes += len(events.ids) + len(events.parts)
        self._messages += 1
        self._send(peer, m.HeldItems(events))


class ItemWatcher:
    """Keeps the index of the items of peers up to date. Used by one thread."""

    def __init__(self, index: PeerIndex, send: Send, server: Callable[[], PageServer], clock: Clock) -> None:
        """`server`: returns the endpoint of this rank."""
        self._index, self._send, self._server, self._clock = index, send, server, clock
        self._asked_s: dict[str, float] = {}
        """Time of the latest message to each peer."""

    @property
    def peers(self) -> Collection[str]:
        """The watched peers."""
        return self._asked_s.keys()

    def know(self, peers: Collection[str]) -> None:
        """Replaces the peers. Forgets the items of those that are missing, and asks new ones."""
        for peer in [peer for peer in self._asked_s if peer not in peers]:
            self.forget(peer)
        for peer in peers:
            if peer not in self._asked_s:
                self._ask(peer)

    def forget(self, peer: str) -> None:
        """Forgets a peer that has left; an unknown name has no effect."""
        if self._asked_s.pop(peer, None) is not None:
            self._index.forget(peer)

    def restarted(self, peer: str) -> None:
        """Asks a peer that watches this rank, if no events of the peer have arrived: it may have started later."""
        asked_s = self._asked_s.get(peer)
        if asked_s is None or self._index.position(peer).epoch:
            return
        if self._clock() - asked_s >= SOONEST_S:
            self._ask(peer)

    def on_events(self, peer: str, events: ItemEvents) -> None:
        """Applies a peer's events, and asks for what is missing. Events of other peers have no effect."""
        if peer not in self._asked_s:
            return
        try:
            more = self._index.apply(peer, events)
        except ValueError as exc:
            log.warning("item_events_not_read", peer=peer, why=str(exc))
            return
        if more:
            self._ask(peer)

    def tick(self) -> None:
        """Repeats `WatchItems` to each peer that was not asked lately."""
        now_s = self._clock()
        for peer, asked_s in self._asked_s.items():
            if now_s - asked_s >= WATCH_S:
                self._ask(peer)

    def ask_all(self) -> None:
        """Sends `WatchItems` to all peers now."""
        for peer in self._asked_s:
            self._ask(peer)

    def check(self) -> None:
        """Raises `InvariantError` if the index is inconsistent."""
        self._index.check()

    def _ask(self, peer: str) -> None:
        self._asked_s[peer] = self._clock()
        self._send(peer, m.WatchItems(self._index.position(peer), self._server()))
