"""The pages and recurrent states in a rank's host memory that other groups may read.

The rank publishes a block when the block has the KV of a known link (`disagg.storage.keys`), and withdraws a block
before a plan overwrites it. A reader copies a part of a block to its own memory, and then checks that the block was
not withdrawn meanwhile. A withdrawal therefore never waits for a reader, and a reader never returns a torn part.

    publish     on the threads of the storage, when a block has been stored or has landed
    withdraw    on the compute thread, before copies into a block begin
    copy        on the thread that serves other groups

The leader does not know which blocks are published: a key determines the content, so a block may be read until it is
overwritten, even if the leader has freed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from disagg.core.errors import InvariantError
from disagg.kv.cache_operations import CacheOperation, PoolName, StorageOperation
from disagg.node.block_parts import BlockParts
from disagg.storage.keys import PageKeys


class ServedKind(NamedTuple):
    """One kind of item: pages of KV, or recurrent states."""

    pool: PoolName
    """Pool of the host memory that has the items."""
    parts: BlockParts
    """All parts of this rank."""
    blocks: Callable[[Sequence[int]], list[torch.Tensor]]
    """Returns the host memory of blocks; see `disagg.node.stored_items.Blocks`."""


@dataclass(slots=True, eq=False)
class _Published:
    """One publication of a block."""

    pool: PoolName
    block: int
    keys: tuple[bytes, ...]
    """Key of each part."""


class _Place(NamedTuple):
    published: _Published
    part: int
    """Index in `ServedKind.parts`."""


class ServedItems:
    """Index of the published blocks of a rank. Thread-safe; no call waits for a copy."""

    def __init__(self, keys: PageKeys, kinds: Sequence[ServedKind]) -> None:
        self._keys = keys
        self._kinds = {kind.pool: kind for kind in kinds}
        self._lock = threading.Lock()
        self._places: dict[bytes, _Place] = {}
        """Place of each part. Places of withdrawn blocks remain until the block is published again."""
        self._valid: dict[tuple[PoolName, int], _Published] = {}
        """Latest publication of each block that was not withdrawn."""
        self._latest: dict[tuple[PoolName, int], _Published] = {}
        """Latest publication of each block, also of withdrawn ones."""

    @property
    def count(self) -> int:
        """Number of blocks that can be read now."""
        return len(self._valid)

    def publish(self, pool: PoolName, links: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Makes blocks readable: block `blocks[i]` has the item of `links[i]`."""
        parts = self._kinds[pool].parts.parts
        for link, block in zip(links, blocks, strict=True):
            keys = tuple(self._keys.part_key(link, part) for part in parts)
            new = _Published(pool, block, keys)
            with self._lock:
                before = self._latest.get((pool, block))
                if before is not None:
                    self._drop(before)
                self._latest[pool, block] = self._valid[pool, block] = new
                for part, key in enumerate(keys):
                    self._places[key] = _Place(new, part)

    def withdraw(self, copies: Sequence[CacheOperation], fetches: Sequence[StorageOperation]) -> None:
        """Withdraws the blocks that the operations of a plan overwrite. Call it before the operations begin."""
        with self._lock:
            for operation in copies:
                for transfer in operation.transfers if operation.store else ():
                    for block in transfer.host:
                        self._valid.pop((transfer.pool, block), None)
            for fetch in fetches:
                if fetch.kind == "fetch":
                    for block in fetch.blocks:
                        self._valid.pop(("kv", block), None)
                    for block in fetch.state_blocks:
                        self._valid.pop(("state", block), None)

    def has(self, key: bytes) -> bool:
        """Returns whether the part of `key` can be read now."""
        with self._lock:
            return self._valid_place(key) is not None

    def nbytes(self, key: bytes) -> int:
        """Returns the size of the part of `key` in bytes; 0 if the part cannot be read."""
        with self._lock:
            place = self._valid_place(key)
        return self._kinds[place.published.pool].parts.part_bytes(place.part) if place is not None else 0

    def copy(self, key: bytes, into: torch.Tensor) -> bool:
        """Copies the part of `key` to `into`, uint8 of the part's size. Returns False if the part cannot be read.

        `into` may then have any content.
        """
        with self._lock:
            place = self._valid_place(key)
        if place is None:
            return False
        kind, published = self._kinds[place.published.pool], place.published
        if kind.parts.part_bytes(place.part) != into.numel():
            return False
        [block] = kind.blocks([published.block])
        kind.parts.gather_part(place.part, block, into)
        with self._lock:  # no overwrite began before this check, so the copy is whole
            return self._valid.get((published.pool, published.block)) is published

    def check(self) -> None:
        """Raises `InvariantError` unless each readable block has the keys of its latest publication only."""
        with self._lock:
            for where, published in self._valid.items():
                if self._latest.get(where) is not published:
                    raise InvariantError(f"served block {where}: an older publication can be read")
            for key, place in self._places.items():
                published = place.published
                latest = self._latest.get((published.pool, published.block))
                if latest is not published or published.keys[place.part] != key:
                    raise InvariantError(f"served key {key.hex()}: its place is outdated: {place}")

    def _valid_place(self, key: bytes) -> _Place | None:
        place = self._places.get(key)
        if place is None:
            return None
        published = place.published
        valid = self._valid.get((published.pool, published.block)) is published
        return place if valid else None

    def _drop(self, published: _Published) -> None:
        """Removes the places of a publication, except keys that another block has taken over."""
        for key in published.keys:
            place = self._places.get(key)
            if place is not None and place.published is published:
                del self._places[key]
