"""The pages and recurrent states in a rank's host memory that other groups may read.

The rank publishes a block when the block has the KV of a known link (`disagg.storage.keys`), and withdraws a block
before a plan overwrites it. A reader copies a part of a block to its own memory, and then checks that the block was
not withdrawn meanwhile. A withdrawal therefore never waits for a reader, and a reader never returns a torn part.

    publish     on the threads of the storage, when a block has been stored or has landed
    withdraw    on the compute thread, before copies into a block begin
    copy        on the thread that serves other groups

The leader does not know which blocks are published: a key determines the content, so a block may be read until it is
overwritten, even if the leader has freed it. A log of the changes (`disagg.node.served_log`) is sent to other groups.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from disagg.core.errors import InvariantError
from disagg.core.item_events import ItemEvents, ItemPiece, ItemPosition, item_id
from disagg.kv.cache_operations import CacheOperation, PoolName, StorageOperation
from disagg.node.block_parts import BlockParts
from disagg.node.served_log import ServedLog
from disagg.storage.contract import ITEM_BYTES
from disagg.storage.keys import PageKeys, part_name


class ServedKind(NamedTuple):
    """One kind of item: pages of KV, or recurrent states."""

    pool: PoolName
    """Pool of the host memory that has the items."""
    block_count: int
    """Number of blocks in the pool."""
    parts: BlockParts
    """All parts of this rank."""
    blocks: Callable[[Sequence[int]], list[torch.Tensor]]
    """Returns the host memory of blocks; see `disagg.node.stored_items.Blocks`."""


class _Blocks:
    """The items in the blocks of one kind. Guarded by the lock of `ServedItems`."""

    def __init__(self, kind: ServedKind, first_place: int) -> None:
        self.kind = kind
        self.first_place = first_place
        """Place of block 0 in the log."""
        self.part_numbers = {part_name(part): number for number, part in enumerate(kind.parts.parts)}
        self.items: list[bytes | None] = [None] * kind.block_count
        """Beginning of the keys (`PageKeys.item`) of the item that can be read from each block."""
        self.at: dict[bytes, int] = {}
        """Block of each item: the inverse of `items`."""
        self.withdrawals = array("Q", bytes(8 * kind.block_count))
        """Number of times that each block was withdrawn."""


class _Found(NamedTuple):
    blocks: _Blocks
    block: int
    part: int
    """Index in `ServedKind.parts`."""
    withdrawals: int


class ServedItems:
    """Index of the published blocks of a rank. Thread-safe; no call waits for a copy."""

    def __init__(self, keys: PageKeys, kinds: Sequence[ServedKind]) -> None:
        self._keys = keys
        self._lock = threading.Lock()
        self._pools: dict[PoolName, _Blocks] = {}
        places = 0
        for kind in kinds:
            self._pools[kind.pool] = _Blocks(kind, places)
            places += kind.block_count
        self._log = ServedLog(
            places, [name for blocks in self._pools.values() for name in blocks.part_numbers]
        )

    @property
    def count(self) -> int:
        """Number of blocks that can be read now."""
        return sum(len(blocks.at) for blocks in self._pools.values())

    @property
    def epoch(self) -> int:
        """Random number of the log of changes."""
        return self._log.epoch

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._log.version

    def publish(self, pool: PoolName, links: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Makes blocks readable: block `blocks[i]` has the item of `links[i]`."""
        known = self._pools[pool]
        for link, block in zip(links, blocks, strict=True):
            item = self._keys.item(link, state=pool == "state")
            with self._lock:
                self._take(known, block)
                before = known.at.get(item)
                if before is not None:  # the latest block of an item is read
                    known.items[before] = None
                    self._log.clear(known.first_place + before)
                known.items[block], known.at[item] = item, block
                self._log.add(known.first_place + block, item_id(item))

    def withdraw(self, copies: Sequence[CacheOperation], fetches: Sequence[StorageOperation]) -> None:
        """Withdraws the blocks that the operations of a plan overwrite. Call it before the operations begin."""
        with self._lock:
            for operation in copies:
                for transfer in operation.transfers if operation.store else ():
                    self._overwrite(transfer.pool, transfer.host)
            for fetch in fetches:
                if fetch.kind == "fetch":
                    self._overwrite("kv", fetch.blocks)
                    self._overwrite("state", fetch.state_blocks)

    def has(self, key: bytes) -> bool:
        """Returns whether the part of `key` can be read now."""
        return self._find(key) is not None

    def nbytes(self, key: bytes) -> int:
        """Returns the size of the part of `key` in bytes; 0 if the part cannot be read."""
        found = self._find(key)
        return found.blocks.kind.parts.part_bytes(found.part) if found is not None else 0

    def copy(self, key: bytes, into: torch.Tensor) -> bool:
        """Copies the part of `key` to `into`, uint8 of the part's size. Returns False if the part cannot be read.

        `into` may then have any content.
        """
        found = self._find(key)
        if found is None:
            return False
        kind = found.blocks.kind
        if kind.parts.part_bytes(found.part) != into.numel():
            return False
        [block] = kind.blocks([found.block])
        kind.parts.gather_part(found.part, block, into)
        with self._lock:  # no overwrite began before this check, so the copy is whole
            return found.blocks.withdrawals[found.block] == found.withdrawals

    def after(self, position: ItemPosition) -> ItemEvents:
        """Returns what a reader with `position` lacks next; see `ServedLog.after`."""
        with self._lock:  # for a copy only: the compute thread waits for this lock
            logged = self._log.after(position)
        return logged if isinstance(logged, ItemPiece) else logged.events()

    def check(self) -> None:
        """Raises `InvariantError` unless blocks, items and log agree."""
        with self._lock:
            for pool, known in self._pools.items():
                items = {item: block for block, item in enumerate(known.items) if item is not None}
                if items != known.at:
                    raise InvariantError(f"served {pool}: {len(items)} blocks, {len(known.at)} items")
            self._log.check([item_id(item) for known in self._pools.values() for item in known.at])

    def _find(self, key: bytes) -> _Found | None:
        item, part = key[:ITEM_BYTES], key[ITEM_BYTES:]
        with self._lock:
            for known in self._pools.values():
                block, number = known.at.get(item), known.part_numbers.get(part)
                if block is not None and number is not None:
                    return _Found(known, block, number, known.withdrawals[block])
        return None

    def _overwrite(self, pool: PoolName, blocks: Sequence[int]) -> None:
        known = self._pools.get(pool)
        if known is None:  # other groups may not read items of this kind
            return
        for block in blocks:
            self._take(known, block)
            known.withdrawals[block] += 1

    def _take(self, known: _Blocks, block: int) -> None:
        """Removes the item of a block."""
        item = known.items[block]
        if item is not None:
            known.items[block] = None
            del known.at[item]
            self._log.remove(known.first_place + block)
