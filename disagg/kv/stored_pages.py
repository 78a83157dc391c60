"""KV pages of the second tier in the storage: which are stored, written or fetched.

Part of `disagg.kv.storage_tier`; `disagg.kv.stored_states` does the same for recurrent states.

    write    a block of the tree; the operation locks the block's node until every rank has reported
    fetch    a new block, owned by the operation until `attach` passes it to the tree, or `release` frees it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagg.core.errors import InvariantError
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix_node import Node

SHARE = 4
"""Divisor of the second tier's blocks: fetches may own at most a quarter of them, and writes may lock as many. The
state blocks have the same limits."""

AllocBlocks = Callable[[int, Node], list[int]]
"""Function like `HostTier.alloc`: allocates up to a number of blocks, without evicting the path of a node."""


class StoredPages:
    """Bookkeeping of stored pages, and the limits of pages under way. Not thread-safe."""

    def __init__(self, blocks: TokenToKVPoolAllocator, alloc: AllocBlocks) -> None:
        """`blocks`: allocator of the second tier's blocks."""
        self._blocks, self._alloc = blocks, alloc
        self._most = max(1, (blocks.pages - 1) // SHARE)
        self._stored: set[int] = set()
        """Blocks whose pages were written to the storage, or came from it."""
        self._unused: set[int] = set()
        """Blocks whose pages came from the storage, and were not loaded yet."""
        self._writing: set[int] = set()
        self._fetching: set[int] = set()
        self._lost: list[int] = []
        """Blocks of failed fetches, which are not used again."""
        self.written = self.fetched = self.skipped = self.failed = self.used = 0
        """Counts since the construction; see `StorageTierStatistics`."""

    @property
    def writing(self) -> int:
        """Number of blocks that running writes copy to the storage."""
        return len(self._writing)

    @property
    def fetching(self) -> int:
        """Number of blocks that running fetches own."""
        return len(self._fetching)

    @property
    def held(self) -> list[int]:
        """The blocks that are allocated and not in the tree."""
        return [*self._lost, *self._fetching]

    def allocated(self, blocks: Sequence[int]) -> None:
        """Records that `blocks` get new content."""
        self._stored.difference_update(blocks)
        self._unused.difference_update(blocks)

    def loaded(self, blocks: Sequence[int]) -> None:
        """Records that a request loads `blocks`."""
        found = self._unused.intersection(blocks)
        self._unused -= found
        self.used += len(found)

    def skip(self, pages: int) -> None:
        """Counts pages that are not written, or not searched, because too many pages are under way."""
        self.skipped += pages

    # --- writes

    def leading(self, blocks: Sequence[int]) -> int:
        """Returns the number of leading blocks of a prefix whose pages are stored."""
        return next((at for at, block in enumerate(blocks) if block not in self._stored), len(blocks))

    def lacking(self, blocks: Sequence[int], most: int) -> tuple[list[int], int]:
        """Returns the indices in `blocks`, those of a prefix, of the pages to write: at most `most`.

        Also returns the number of leading blocks that are then stored or being written.
        """
        waiting = [
            at for at, block in enumerate(blocks) if block not in self._stored and block not in self._writing
        ]
        room = min(most, self._most - len(self._writing))
        self.skip(max(0, len(waiting) - room))
        return waiting[:room], waiting[room] if room < len(waiting) else len(blocks)

    def begin_write(self, blocks: Sequence[int]) -> None:
        """Begins a write of `blocks`, whose node the caller has locked."""
        self._writing.update(blocks)

    def end_write(self, blocks: Sequence[int], *, stored: bool) -> None:
        """Ends a write. `stored`: whether every rank has stored all pages."""
        self._writing.difference_update(blocks)
        if stored:
            self._stored.update(blocks)
            self.written += len(blocks)
        else:
            self.failed += len(blocks)  # the next use of the prefix tries again

    # --- fetches

    @property
    def room(self) -> int:
        """Number of further blocks that fetches may own."""
        return self._most - len(self._fetching)

    def alloc(self, count: int, known: Node) -> list[int]:
        """Returns up to `count` new blocks for a fetch, at most `room`; evicts no block on the path to `known`."""
        blocks = self._alloc(min(count, self.room), known) if min(count, self.room) > 0 else []
        self._fetching.update(blocks)
        return blocks

    def attach(self, landed: Sequence[int], added: Sequence[int]) -> None:
        """Ends the fetch of `landed` blocks, of which the tree has a reference to the last ones, `added`.

        The other blocks are freed: a store has inserted their pages during the fetch.
        """
        self._blocks.free(landed)  # blocks in the tree keep the tree's reference
        self._fetching.difference_update(landed)
        self._stored.update(added)
        self._unused.update(added)
        self.fetched += len(added)

    def release(self, blocks: Sequence[int], *, failed: bool) -> None:
        """Ends the fetch of blocks whose pages have not landed. `failed`: a rank could not pin the blocks."""
        self._fetching.difference_update(blocks)
        if failed:  # the rank would fail again the next time
            self._lost.extend(blocks)
            self.failed += len(blocks)
        elif blocks:
            self._blocks.free(blocks)

    def check(self, written: Sequence[int], fetched: Sequence[int], cached: set[int]) -> None:
        """Raises `InvariantError` unless the blocks of all operations under way are the known ones.

        `cached`: blocks of the tree.
        """
        sound = (
            sorted(written) == sorted(self._writing)
            and sorted(fetched) == sorted(self._fetching)
            and len(self._fetching) <= self._most
            and len(self._writing) <= self._most
            and cached.issuperset(self._writing)
            and self._stored.issuperset(self._unused)
        )
        if not sound:
            raise InvariantError(f"stored pages: {self._writing}, {self._fetching}, {written}, {fetched}")
