"""What the page allocator takes and gives, besides numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class PageStatistics:
    """A picture of the allocator at one moment."""

    pages: int
    """Pages that can be handed out: all but the trash page."""
    used_pages: int
    """Pages handed out and not yet freed."""
    page_size: int
    """Tokens in a page."""
    used_tokens: int
    """Tokens asked for in the pages handed out; those of a shared page once."""
    peak_used_pages: int
    """Most pages ever handed out at once."""
    references: int
    """Readers of all pages together: more than `used_pages` where pages are shared."""

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out now."""
        return self.pages - self.used_pages

    @property
    def waste_tokens(self) -> int:
        """Slots in pages handed out that no token was asked for: the price of whole pages."""
        return self.used_pages * self.page_size - self.used_tokens


class PageCopy(NamedTuple):
    """All slots of page `source` are to be copied to page `destination`, in every layer.

    Owed by whoever was given it: launched before anything else is written to the pool, in the order given.
    """

    source: int
    destination: int


class Growing(Protocol):
    """What `append_one_to_each` grows: a request with its count of tokens and its pages."""

    tokens: int
    pages: list[int]
