"""Index of the pages and states that peers have in host memory, by their KV events (`disagg.core.item_events`).

For each peer, the ids are a sorted array of 8 bytes an id, and the latest changes are in two small sets, which are
merged into the array when they have grown. A search for a key therefore needs no message, and a rank is asked only
for keys that it has announced. The ids of all peers together are limited; ids beyond the limit are not known, so
their pages are misses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from disagg.core.errors import InvariantError
from disagg.core.item_events import (
    ID_BYTES,
    ItemChanges,
    ItemEvents,
    ItemPiece,
    ItemPosition,
    item_id,
)
from disagg.storage.contract import ITEM_BYTES, KEY_BYTES

MOST_IDS = 1 << 24
"""Largest number of ids of all peers: 128 MiB."""
LEAST_MERGED = 4096
"""Changes are merged into the array when they are more than this number and more than a sixteenth of the array."""
LEAST_ROOM = 64
"""Peers whose ids were dropped are read again when there is room for 1/`LEAST_ROOM` of the limit. A few evictions
therefore do not cause a whole content to be sent again."""
_WORDS = KEY_BYTES // ID_BYTES
_PART_WORD = ITEM_BYTES // ID_BYTES

Ids = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PeerIndexStatistics:
    """Current state of a `PeerIndex`, and counts since the start."""

    peers: int
    """Peers of which all pieces of the content have arrived."""
    ids: int
    """Ids of all peers, at most `most_ids`."""
    nbytes: int
    """Bytes of the arrays."""
    pieces: int
    """Applied pieces."""
    changes: int
    """Applied messages with changes."""
    gaps: int
    """Messages with changes that do not continue the known ones: the peer is asked again."""
    corrected: int
    """Ids removed because the peer did not have an item that it had announced."""
    dropped: int
    """Ids that were not taken, because of the limit."""


@dataclass(slots=True, eq=False)
class _PeerItems:
    """What one peer has announced."""

    position: ItemPosition = field(default_factory=ItemPosition)
    parts: Ids = field(default_factory=lambda: np.empty(0, np.uint64))
    """Names of the parts that the peer has of each item."""
    ids: Ids = field(default_factory=lambda: np.empty(0, np.uint64))
    """Sorted ids, without the changes in `added` and `removed`."""
    added: set[int] = field(default_factory=set)
    """Ids that the peer has announced since the last merge; the array lacks them."""
    removed: set[int] = field(default_factory=set)
    """Ids that the peer has withdrawn since the last merge; the array still has them."""
    dropped: int = 0
    """Number of the peer's ids that were dropped because of the limit, since its content was last read."""

    @property
    def count(self) -> int:
        """Number of ids."""
        return len(self.ids) + len(self.added) - len(self.removed)

    @property
    def complete(self) -> bool:
        """Whether all pieces of the content have arrived."""
        return self.position.next_place is None

    def missing(self, ids: Ids) -> list[int]:
        """Returns those of `ids` that the peer does not have yet, without duplicates."""
        in_array = _isin(self.ids, ids)
        other = set(ids[~in_array].tolist()) - self.added
        return [*self.removed.intersection(ids[in_array].tolist()), *other]

    def add(self, ids: Iterable[int]) -> None:
        """Adds ids that are `missing`."""
        new = set(ids)
        again = self.removed & new
        self.removed -= again
        self.added |= new - again

    def remove(self, ids: Ids) -> None:
        """Removes ids; unknown ones have no effect."""
        self.added.difference_update(ids.tolist())
        self.removed.update(ids[_isin(self.ids, ids)].tolist())

    def merge(self) -> None:
        """Applies the changes in the sets to the array."""
        if self.removed:
            self.ids = self.ids[~_isin(_array(self.removed), self.ids)]
        if self.added:
            self.ids = _union(self.ids, _array(self.added))
        self.added, self.removed = set(), set()

    def holds(self, ids: Ids, parts: Ids, wanted: set[int]) -> list[int]:
        """Returns the indices of the keys, given by ids and names of parts, that the peer should have.

        `wanted`: the set of `ids`. A search has many keys, so no statement here runs once for each of them.
        """
        held = _isin(self.ids, ids)
        if added := self.added & wanted:
            held |= _isin(_array(added), ids)
        if removed := self.removed & wanted:
            held &= ~_isin(_array(removed), ids)
        if held.any():
            held &= _isin(self.parts, parts)
        numbers: list[int] = np.flatnonzero(held).tolist()
        return numbers


class PeerIndex:
    """The announced items of all peers. Thread-safe; no call blocks."""

    def __init__(self, most_ids: int = MOST_IDS) -> None:
        """`most_ids`: largest number of ids of all peers."""
        self._most = most_ids
        self._lock = threading.Lock()
        self._peers: dict[str, _PeerItems] = {}
        self._pieces = self._changes = self._gaps = self._corrected = self._dropped = 0

    def position(self, peer: str) -> ItemPosition:
        """Returns what is known of a peer's items."""
        with self._lock:
            known = self._peers.get(peer)
            return known.position if known is not None else ItemPosition()

    def apply(self, peer: str, events: ItemEvents) -> bool:
        """Applies events of a peer; returns whether to send the peer the new `position`, because more events follow,
        or some are missing.

        Events that were applied before change nothing. Raises `ValueError`, changing nothing, for malformed ids.
        """
        with self._lock:
            known = self._peers.setdefault(peer, _PeerItems())
            if isinstance(events, ItemPiece):
                more = self._apply_piece(known, events)
            else:
                more = self._apply_changes(known, events)
            self._read_dropped_again()
            return more or self._peers[peer] is not known

    def holders(self, keys: Sequence[bytes], peers: Iterable[str]) -> dict[str, list[int]]:
        """Returns the indices of the `keys` that each of `peers` should have, for those that should have any."""
        words = np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, _WORDS)
        ids, parts = np.maximum(words[:, 0], 1).astype(np.uint64), words[:, _PART_WORD].astype(np.uint64)
        wanted = set(ids.tolist())
        found: dict[str, list[int]] = {}
        for peer in peers:
            with self._lock:  # for one peer at a time, so that events do not wait for a whole search
                known = self._peers.get(peer)
                numbers = known.holds(ids, parts, wanted) if known is not None and known.count else []
            if numbers:
                found[peer] = numbers
        return found

    def correct(self, peer: str, keys: Sequence[bytes], position: ItemPosition) -> None:
        """Removes the items of keys that a peer did not have, until the peer announces them again.

        `position`: `position` when the peer was asked. If later events have arrived, they count instead of the
        peer's reply.
        """
        gone = {item_id(key) for key in keys}
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.position != position:
                return
            known.remove(_array(gone))
            self._corrected += len(gone)
            self._merge_if_many(known)

    def forget(self, peer: str) -> None:
        """Removes the ids of a peer. Peers with ids beyond the limit are read again, because there is room now."""
        with self._lock:
            if self._peers.pop(peer, None) is None:
                return
            for other in [other for other, known in self._peers.items() if known.dropped]:
                self._peers[other] = _PeerItems()

    def statistics(self) -> PeerIndexStatistics:
        """Returns the current state and counts."""
        with self._lock:
            known = list(self._peers.values())
            return PeerIndexStatistics(
                peers=sum(one.complete for one in known),
                ids=sum(one.count for one in known),
                nbytes=sum(one.ids.nbytes for one in known),
                pieces=self._pieces,
                changes=self._changes,
                gaps=self._gaps,
                corrected=self._corrected,
                dropped=self._dropped,
            )

    def check(self) -> None:
        """Raises `InvariantError` unless arrays are sorted, changes agree, and the limit holds."""
        with self._lock:
            for peer, known in self._peers.items():
                sound = (
                    bool(np.all(known.ids[:-1] < known.ids[1:]))
                    and not _isin(known.ids, _array(known.added)).any()
                    and bool(_isin(known.ids, _array(known.removed)).all())
                    and len(known.added) + len(known.removed) <= max(LEAST_MERGED, len(known.ids) // 16)
                    and (known.position.epoch or not known.count)
                )
                if not sound:
                    raise InvariantError(f"peer index: {peer} at {known.position} has {known.count} ids")
            if (total := sum(known.count for known in self._peers.values())) > self._most:
                raise InvariantError(f"peer index: {total} ids, more than {self._most}")

    def _apply_piece(self, known: _PeerItems, piece: ItemPiece) -> bool:
        ids, parts = _unpack_ids(piece.ids), _unpack_ids(piece.parts)
        at = known.position
        if piece.first_place == 0:
            newer = piece.epoch != at.epoch or piece.version > at.version
            if not newer and at.next_place != 0:
                return False  # the piece has arrived before
            known.ids, known.added, known.removed = np.empty(0, np.uint64), set(), set()
            known.parts, known.dropped = np.unique(parts), 0
        elif (piece.epoch, piece.version, piece.first_place) != (at.epoch, at.version, at.next_place):
            return False
        known.merge()
        new = np.unique(ids[~_isin(known.ids, ids)])
        known.ids = _union(known.ids, new[: self._fitting(known, len(new))])
        known.position = ItemPosition(piece.epoch, piece.version, piece.next_place)
        self._pieces += 1
        return True

    def _apply_changes(self, known: _PeerItems, changes: ItemChanges) -> bool:
        added, removed = _unpack_ids(changes.added), _unpack_ids(changes.removed)
        added, removed = np.sort(added), np.sort(removed)  # sorted ids are searched faster
        at = known.position
        if changes.epoch != at.epoch or at.next_place is not None or changes.since > at.version:
            self._gaps += 1
            return True
        if changes.version <= at.version:
            return False
        known.remove(removed)
        missing = known.missing(added)
        known.add(missing[: self._fitting(known, len(missing))])
        self._merge_if_many(known)
        known.position = ItemPosition(at.epoch, changes.version, None)
        self._changes += 1
        return False

    def _room(self) -> int:
        return max(0, self._most - sum(one.count for one in self._peers.values()))

    def _fitting(self, known: _PeerItems, count: int) -> int:
        """Returns for how many of `count` new ids of a peer there is room; counts the others as dropped."""
        fitting = min(count, self._room())
        known.dropped += count - fitting
        self._dropped += count - fitting
        return fitting

    def _read_dropped_again(self) -> None:
        """Forgets peers whose ids were dropped, if there is room for some now, so that they are read again.

        While any content is being read, the room is not known.
        """
        dropping = [peer for peer, known in self._peers.items() if known.dropped]
        if not dropping or not all(known.complete for known in self._peers.values()):
            return
        room, least = self._room(), max(1, self._most // LEAST_ROOM)
        for peer in dropping:
            if room >= least:
                room -= self._peers[peer].dropped
                self._peers[peer] = _PeerItems()

    def _merge_if_many(self, known: _PeerItems) -> None:
        if len(known.added) + len(known.removed) > max(LEAST_MERGED, len(known.ids) // 16):
            known.merge()


def _array(ids: set[int]) -> Ids:
    """Returns the sorted array of `ids`."""
    return np.fromiter(sorted(ids), dtype=np.uint64, count=len(ids))


def _union(ids: Ids, more: Ids) -> Ids:
    """Returns the sorted union of two sorted arrays that have no id in common."""
    both = np.concatenate([ids, more])
    both.sort(kind="stable")  # merges two sorted runs in linear time
    return both


def _isin(ids: Ids, some: Ids) -> NDArray[np.bool_]:
    """Returns for each of `some` whether it is in the sorted `ids`."""
    at = np.searchsorted(ids, some)
    found = np.zeros(len(some), dtype=bool)
    inside = at < len(ids)
    found[inside] = ids[at[inside]] == some[inside]
    return found


def _unpack_ids(data: bytes) -> Ids:
    """Returns the ids, or names of parts, in `data`. Raises `ValueError` if `data` ends within an id."""
    if len(data) % ID_BYTES:
        raise ValueError(f"ids of items have {ID_BYTES} bytes each, but the message has {len(data)} bytes")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)
