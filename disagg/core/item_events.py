"""KV events of the second tier: the pages and recurrent states in a rank's host memory, for ranks of other groups.

An *item* is a page or a state. Its id has the first 64 bits of the keys of its parts (`disagg.storage.keys`). Ids
decide only which rank is asked for a key: the whole key decides what is read, so an equal id of another item, or a
late event, costs a message and is a miss.

A rank numbers its changes; its *version* is the number of changes so far. A reader gets the whole content in pieces,
while the content changes, and then the changes since the version at which the first piece was made. A change states
whether an id is there now, so a change that is applied twice, or is in a piece already, has no effect.
"""

from __future__ import annotations

import msgspec

from disagg.core.bounds import Count

ID_BYTES = 8


class ItemPosition(msgspec.Struct, frozen=True, array_like=True):
    """How far a reader has read a rank's items."""

    epoch: Count = 0
    """Random number of the rank's log, which changes when the rank restarts; 0 for a reader without any events."""
    version: Count = 0
    next_place: Count | None = 0
    """Place at which the next piece of the content begins; None if the reader has all pieces."""


class ItemPiece(msgspec.Struct, frozen=True, tag=True):
    """A piece of a rank's content: the ids of the items at some places."""

    epoch: Count
    version: Count
    """Version since which changes must follow: that of the first piece."""
    first_place: Count
    next_place: Count | None
    """None for the last piece."""
    ids: bytes
    """Ids, uint64, little endian."""
    parts: bytes = b""
    """Names of the parts that the rank has of each item (`disagg.storage.keys.part_name`), in the first piece."""


class ItemChanges(msgspec.Struct, frozen=True, tag=True):
    """The changes of a rank's content from version `since` to `version`. No id is both added and removed."""

    epoch: Count
    since: Count
    version: Count
    added: bytes
    removed: bytes


ItemEvents = ItemPiece | ItemChanges


def item_id(item: bytes) -> int:
    """Returns the id of the item whose keys begin with `item`; never 0."""
    return int.from_bytes(item[:ID_BYTES], "little") or 1
