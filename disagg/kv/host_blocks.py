"""Allocator of host memory blocks for swapped pages; integers only, like the page allocator.

A block holds one page. The leader allocates the same blocks on all ranks of its group; each rank has its own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """Current counts of the allocator."""

    blocks: int
    used_blocks: int
    peak_used_blocks: int


class HostBlocks:
    """Allocator of `blocks` host memory blocks. Not thread-safe: the leader's lock guards the allocator."""

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks - 1, -1, -1))
        self._used: set[int] = set()
        self._peak_used_blocks = 0

    def alloc(self, pages: int) -> list[int] | None:
        """Allocates a block for each of `pages` pages, owned by the caller until `free`.

        Returns None, changing nothing, if too few blocks are free.
        """
        if pages > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(pages)]
        self._used.update(blocks)
        self._peak_used_blocks = max(self._peak_used_blocks, len(self._used))
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Frees blocks. Raises ValueError, changing nothing, if a block is not allocated or is repeated."""
        if not self._used.issuperset(blocks) or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {list(blocks)} are not all allocated: freed twice, or repeated")
        self._used.difference_update(blocks)
        self._free.extend(blocks)

    def statistics(self) -> HostStatistics:
        """Returns the current counts."""
        used = len(self._used)
        return HostStatistics(used + len(self._free), used, self._peak_used_blocks)

    def check(self, owned: Sequence[int]) -> None:
        """Raises `InvariantError` unless `owned` are the allocated blocks, each once, and no block is lost."""
        every = sorted([*self._free, *self._used])
        if every != list(range(len(every))) or sorted(owned) != sorted(self._used):
            raise InvariantError(f"host blocks: free {self._free}, used {self._used}, owned {list(owned)}")
