"""Page allocator of a KV pool: integers only, on the host, O(1) per page.

Pages exist so that a request grows without moving and without gaps larger than one page. Idea: vLLM's paged
attention (Kwon et al., 2023). Page 0 is never handed out: it is the trash page, for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disagg.core.errors import ConfigError, InvariantError
from disagg.core.types import Span

TRASH_PAGE = 0
_FREE = -1


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold `tokens` tokens."""
    return -(-tokens // page_size)


def slots_of(pages: Sequence[int], page_size: int, span: Span) -> torch.Tensor:
    """Slots, int32 `[len(span)]` on the CPU, of the token positions `span` of a request that owns `pages`.

    `pages[i]` holds positions `i * page_size .. (i + 1) * page_size`. Raises ValueError past the last page.
    """
    if span.start < 0 or span.stop > len(pages) * page_size:
        raise ValueError(
            f"positions {span.start}..{span.stop} are beyond {len(pages)} pages of {page_size} tokens"
        )
    if not span:
        return torch.empty(0, dtype=torch.int32)
    first = span.start // page_size
    owned = torch.tensor(pages[first : pages_for(span.stop, page_size)], dtype=torch.int32)
    slots = owned[:, None] * page_size + torch.arange(page_size, dtype=torch.int32)
    return slots.flatten()[span.start - first * page_size : span.stop - first * page_size]


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
    """Tokens asked for in the pages handed out."""
    peak_used_pages: int
    """Most pages ever handed out at once."""

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out now."""
        return self.pages - self.used_pages

    @property
    def waste_tokens(self) -> int:
        """Slots in pages handed out that no token was asked for: the price of whole pages."""
        return self.used_pages * self.page_size - self.used_tokens


class TokenToKVPoolAllocator:
    """Hands out the pages of a pool of `pages * page_size` slots (page 0, the trash page, included).

    A request's pages are a plain list that the *request* owns from `alloc_tokens` until it passes them to
    `free`. Not thread-safe: the group's scheduler owns it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 2 or page_size < 1:
            raise ConfigError(
                f"a KV pool needs at least 2 pages (page 0 is the trash page) of 1 token or more, "
                f"not {pages} pages of {page_size} tokens; give the pool more memory or use smaller pages"
            )
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, TRASH_PAGE, -1))
        self._filled = [_FREE] * pages  # tokens asked for in each page that is handed out
        self._used_tokens = 0
        self._peak_used_pages = 0

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    def alloc_tokens(self, have_tokens: int, want_tokens: int, pages: list[int]) -> list[int] | None:
        """Grows a request from `have_tokens` to `want_tokens` tokens; `pages` is its list of pages.

        Takes pages only when the last one is full, appends them to `pages` and returns the new ones (maybe
        none). All or nothing: returns None, and changes nothing, when there is no room. Raises ValueError
        when `pages` does not match `have_tokens` or is not handed out.
        """
        self._require_owned(have_tokens, want_tokens, pages)
        need = pages_for(want_tokens, self.page_size) - len(pages)
        if need > len(self._free):
            return None
        new = [self._free.pop() for _ in range(need)]
        pages.extend(new)
        self._fill(have_tokens, want_tokens, pages)
        self._peak_used_pages = max(self._peak_used_pages, self.pages - 1 - len(self._free))
        return new

    def free(self, pages: Sequence[int]) -> None:
        """Takes `pages` back. Raises ValueError, changing nothing, on one not handed out or named twice."""
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is named twice in one free: {list(pages)}")
        for page in pages:
            self._require_page(page)
        for page in pages:
            self._used_tokens -= self._filled[page]
            self._filled[page] = _FREE
            self._free.append(page)

    def statistics(self) -> PageStatistics:
        """Counts at this moment."""
        used = self.pages - 1 - len(self._free)
        return PageStatistics(self.pages - 1, used, self.page_size, self._used_tokens, self._peak_used_pages)

    def check(self) -> None:
        """Raises InvariantError, with a dump, unless each real page is either free once or handed out."""
        free = sorted(self._free)
        unowned = [page for page in range(1, self.pages) if self._filled[page] == _FREE]
        filled = [tokens for tokens in self._filled if tokens != _FREE]
        sound = (
            free == unowned
            and self._filled[TRASH_PAGE] == _FREE
            and all(0 < tokens <= self.page_size for tokens in filled)
            and sum(filled) == self._used_tokens
        )
        if not sound:
            dump = f"free {free}, filled {dict(enumerate(self._filled))}, used tokens {self._used_tokens}"
            raise InvariantError(f"page allocator: {dump}")

    def _fill(self, have_tokens: int, want_tokens: int, pages: list[int]) -> None:
        for index in range(have_tokens // self.page_size, len(pages)):
            self._filled[pages[index]] = min(self.page_size, want_tokens - index * self.page_size)
        self._used_tokens += want_tokens - have_tokens

    def _require_owned(self, have_tokens: int, want_tokens: int, pages: list[int]) -> None:
        if not 0 <= have_tokens <= want_tokens:
            raise ValueError(
                f"a request grows: 0 <= have_tokens <= want_tokens, not {have_tokens} -> {want_tokens}"
            )
        if len(pages) != pages_for(have_tokens, self.page_size):
            raise ValueError(
                f"{have_tokens} tokens do not fill {len(pages)} pages of {self.page_size} tokens"
            )
        if pages:
            self._require_page(pages[-1])

    def _require_page(self, page: int) -> None:
        if not (TRASH_PAGE < page < self.pages and self._filled[page] != _FREE):
            raise ValueError(f"page {page} is not handed out: freed twice, or never this allocator's")
