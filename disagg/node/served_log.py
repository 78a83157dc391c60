"""Log of a rank's served items: numbered changes, and the ids of all items by place, for readers in other groups."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np

from disagg.core.errors import InvariantError
from disagg.core.item_events import ItemChanges, ItemPiece, ItemPosition
from disagg.kv.event_log import net_changes

PIECE_PLACES = 1 << 15
"""Places of one piece of the content, so that a message has at most 256 KiB of ids."""
MOST_CHANGES = 1 << 16
"""Number of stored changes. A reader that lacks older changes gets the whole content again."""


class LoggedChanges(NamedTuple):
    """A copy of the changes from version `since` to `version`, which needs no lock."""

    epoch: int
    since: int
    version: int
    newest_first: list[int]
    """Changes, as `net_changes` reads them."""

    def events(self) -> ItemChanges:
        """Returns the events: the latest change of each id counts. Takes time for each change."""
        added, removed = net_changes(self.newest_first)
        return ItemChanges(self.epoch, self.since, self.version, _packed(added), _packed(removed))


class ServedLog:
    """Ids of the items at `places` places, and the latest changes. Not thread-safe.

    An id may be at several places for a moment, or move; each arrival is a change, so that a reader that has read
    some places before the move, and the others after it, does not miss the item.
    """

    def __init__(self, places: int, parts: Iterable[bytes], kept: int = MOST_CHANGES) -> None:
        """`parts`: names of the parts that the rank has of each item. `kept`: number of stored changes."""
        self.epoch = 1 + secrets.randbelow(1 << 62)
        """Random number of this log."""
        self.version = 0
        """Number of changes so far."""
        self._parts = b"".join(parts)
        self._ids = np.zeros(places, dtype=np.uint64)
        """Id of the item at each place; 0 for none. 8 bytes a place."""
        self._changes: deque[int] = deque(maxlen=kept)  # id of an added item, or ~id of a removed one

    def add(self, place: int, one: int) -> None:
        """Records that the item with id `one` is at `place` now."""
        self._ids[place] = one
        self._record(one)

    def clear(self, place: int) -> None:
        """Records that another place has the item of `place` now; no change of the content."""
        self._ids[place] = 0

    def remove(self, place: int) -> None:
        """Records that the item at `place` can no longer be read."""
        one = int(self._ids[place])
        self._ids[place] = 0
        self._record(~one)

    def lacks(self, version: int) -> bool:
        """Returns whether the changes since `version` are not stored any more, or never were."""
        return not 0 <= self.version - version <= len(self._changes)

    def after(self, position: ItemPosition) -> ItemPiece | LoggedChanges:
        """Returns what a reader lacks next: the next piece, or the changes after the last piece (possibly none)."""
        if position.epoch != self.epoch or self.lacks(position.version):
            return self._piece(0, self.version)
        if position.next_place is not None:
            return self._piece(position.next_place, position.version)
        changes = list(islice(reversed(self._changes), self.version - position.version))
        return LoggedChanges(self.epoch, position.version, self.version, changes)

    def check(self, ids: Collection[int]) -> None:
        """Raises `InvariantError` unless exactly `ids` are at places."""
        held = self._ids[self._ids != 0].tolist()
        if sorted(held) != sorted(ids) or len(self._changes) > self.version:
            raise InvariantError(f"served log: {len(held)} ids, {len(ids)} items, version {self.version}")

    def _record(self, change: int) -> None:
        self._changes.append(change)
        self.version += 1

    def _piece(self, first: int, version: int) -> ItemPiece:
        last = min(first + PIECE_PLACES, len(self._ids))
        some = self._ids[first:last]
        after = last if last < len(self._ids) else None
        ids = some[some != 0].astype("<u8").tobytes()
        return ItemPiece(self.epoch, version, first, after, ids, self._parts if not first else b"")


def _packed(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<u8").tobytes()
