"""Reads and writes of one kind of item in a rank's storage: pages of KV, or recurrent states.

An item has several parts in the storage. An item is there only if all parts are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from disagg.node.block_parts import BlockParts
from disagg.storage.contract import PageStorage
from disagg.storage.keys import PageKeys

Blocks = Callable[[Sequence[int]], list[torch.Tensor]]
"""Returns the host memory of blocks, uint8 `[block_bytes]` each. Raises `RuntimeError` if pinning fails."""
Publish = Callable[[Sequence[bytes], Sequence[int]], None]
"""Callback with the links of items, and the block that has each item."""


class StoredParts(NamedTuple):
    """The parts of one kind of item on a rank."""

    read: BlockParts
    """All parts of this rank."""
    written: BlockParts
    """The parts that this rank stores and no other rank of the group stores."""


class ItemStorage(NamedTuple):
    """Where a rank reads and writes its items."""

    reads: PageStorage
    writes: PageStorage | None
    """None if the items are only published."""


class StoredItems:
    """One kind of item in the storage. Thread-safe."""

    def __init__(
        self,
        storage: ItemStorage,
        keys: PageKeys,
        parts: StoredParts,
        blocks: Blocks,
        publish: Publish,
    ) -> None:
        """`publish` is called with each item whose content is now in a block: before the item is stored, or after it
        has landed."""
        self._reads, self._writes, self._keys, self._blocks = storage.reads, storage.writes, keys, blocks
        self._publish = publish
        self._read, self._written = parts.read, parts.written

    def batch(self, nbytes: int) -> int:
        """Returns the number of items of `nbytes` bytes, at least one."""
        return max(1, nbytes // self._read.nbytes)

    def leading(self, links: Sequence[bytes], limit_s: float) -> int:
        """Returns how many leading items are probably stored: only the first part of each is looked for."""
        return _leading(self._first_parts(links, limit_s))

    def find(self, links: Sequence[bytes], limit_s: float) -> list[int]:
        """Returns the indices of the items of which all parts are stored."""
        parts = self._read.parts
        found = [at for at, stored in enumerate(self._first_parts(links, limit_s)) if stored]
        stored = self._reads.exists(self._keys.keys([links[at] for at in found], parts), limit_s)
        return [at for at, whole in zip(found, _whole(stored, len(parts)), strict=True) if whole]

    def reserve(self, blocks: Sequence[int]) -> None:
        """Pins the memory of blocks. Raises `RuntimeError` if pinning fails."""
        self._blocks(blocks)

    def fetch(self, links: Sequence[bytes], blocks: Sequence[int], limit_s: float) -> int:
        """Reads a batch of items into blocks; returns the number of items before the first that is missing.

        The storage's threads copy verified parts to the blocks. Blocks of missing items may have any content.
        """
        into = [view for block in self._blocks(blocks) for view in self._read.views(block)]
        found = self._reads.get(self._keys.keys(links, self._read.parts), into, limit_s)
        landed = _leading(_whole(found, len(self._read.parts)))
        self._publish(links[:landed], blocks[:landed])
        return landed

    def store(self, links: Sequence[bytes], blocks: Sequence[int], limit_s: float) -> int:
        """Publishes a batch, and stores its missing items; returns how many leading items of the batch are stored."""
        self._publish(links, blocks)
        parts, storage = self._written, self._writes
        count = len(parts.parts)
        if not count or storage is None:
            return len(links)
        there = _whole(storage.exists(self._keys.keys(links, parts.parts), limit_s), count)
        lacking = [at for at, stored in enumerate(there) if not stored]
        if not lacking:
            return len(links)
        keys = self._keys.keys([links[at] for at in lacking], parts.parts)
        memory = self._blocks([blocks[at] for at in lacking])
        content = [view for block in memory for view in parts.views(block)]
        results = _whole(storage.put(keys, content, limit_s), count)
        for at, stored in zip(lacking, results, strict=True):
            there[at] = stored
        return _leading(there)

    def _first_parts(self, links: Sequence[bytes], limit_s: float) -> list[bool]:
        """Returns for each item whether its first part is stored."""
        return self._reads.exists(self._keys.keys(links, self._read.parts[:1]), limit_s)


def _leading(results: Sequence[bool]) -> int:
    """Returns the number of results before the first False."""
    return next((at for at, result in enumerate(results) if not result), len(results))


def _whole(parts: Sequence[bool], count: int) -> list[bool]:
    """Returns for each item whether all of its `count` parts are True in `parts`."""
    return [all(parts[first : first + count]) for first in range(0, len(parts), count)]
