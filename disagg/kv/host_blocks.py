"""Blocks of host memory for pages that were swapped out: integers only, as the pages' own allocator.

A block is a few pages in one piece, so that a copy over PCIe is large. The leader hands blocks out for all ranks of
its group; each rank has memory of its own for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.core.errors import InvariantError
from disagg.kv.pages import pages_for


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """A picture of the allocator at one moment."""

    blocks: int
    used_blocks: int
    peak_used_blocks: int
    block_pages: int
    """KV pages in a block."""


class HostBlocks:
    """`blocks` blocks of `block_pages` pages. Not thread-safe: the leader's lock guards it."""

    def __init__(self, blocks: int, block_pages: int) -> None:
        self.block_pages = block_pages
        self._free = list(range(blocks - 1, -1, -1))
        self._used: set[int] = set()
        self._peak_used_blocks = 0

    def alloc(self, pages: int) -> list[int] | None:
        """Blocks for so many pages, the caller's until `free`; None, changing nothing, when there is no room."""
        need = pages_for(pages, self.block_pages)
        if need > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(need)]
        self._used.update(blocks)
        self._peak_used_blocks = max(self._peak_used_blocks, len(self._used))
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Takes blocks back. Raises ValueError, changing nothing, on one that is not handed out or named twice."""
        if not self._used.issuperset(blocks) or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {list(blocks)} are not all handed out: freed twice, or named twice")
        self._used.difference_update(blocks)
        self._free.extend(blocks)

    def statistics(self) -> HostStatistics:
        """Counts at this moment."""
        used = len(self._used)
        return HostStatistics(used + len(self._free), used, self._peak_used_blocks, self.block_pages)

    def check(self, owned: Sequence[int]) -> None:
        """Raises `InvariantError` unless exactly `owned` are handed out, each once, and no other block is lost."""
        every = sorted([*self._free, *self._used])
        if every != list(range(len(every))) or sorted(owned) != sorted(self._used):
            raise InvariantError(f"host blocks: free {self._free}, used {self._used}, owned {list(owned)}")
