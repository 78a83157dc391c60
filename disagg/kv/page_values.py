"""Types that the page allocator takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class PageStatistics:
    """Current counts of the allocator."""

    pages: int
    """Number of pages without the trash page."""
    used_pages: int
    """Number of allocated pages."""
    page_size: int
    """Tokens in a page."""
    used_tokens: int
    """Tokens in allocated pages; a shared page counts once."""
    peak_used_pages: int
    """Largest number of pages ever allocated at once."""
    references: int
    """Total number of references to pages; exceeds `used_pages` if pages are shared."""

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self.pages - self.used_pages

    @property
    def waste_tokens(self) -> int:
        """Unused slots in allocated pages: internal fragmentation."""
        return self.used_pages * self.page_size - self.used_tokens


class PageCopy(NamedTuple):
    """A copy of all slots of page `source` to page `destination`, in every layer.

    The receiver of a `PageCopy` must launch the copies, in order, before any other write to the pool.
    """

    source: int
    destination: int


class Growing(Protocol):
    """A sequence for `append_one_to_each`: its token count and its pages."""

    tokens: int
    pages: list[int]
