"""The free pages of a pool, as a stack: pages that were freed last are allocated first."""

from __future__ import annotations

from collections.abc import Sequence


class FreePages:
    """Owns the pages without a reference. Not thread-safe: see `disagg.kv.pages`."""

    def __init__(self, pages: range) -> None:
        """`pages`: all pages of the pool that may be allocated; the first ones are allocated first."""
        self._pages = list(reversed(pages))

    def __len__(self) -> int:
        return len(self._pages)

    def take(self, count: int) -> list[int]:
        """Removes and returns `count` free pages; `count` must be at most `len(self)`."""
        keep = len(self._pages) - count
        taken = self._pages[keep:][::-1]
        del self._pages[keep:]
        return taken

    def put(self, pages: Sequence[int]) -> None:
        """Adds pages that lost their last reference."""
        self._pages += pages

    def numbers(self) -> list[int]:
        """Returns the free pages in ascending order. O(pages): for checks."""
        return sorted(self._pages)
