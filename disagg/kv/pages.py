"""Page allocator of a KV pool: integers only, on the host, O(1) per page.

Pages let a sequence grow in place with at most one partly used page. Sequences with a common prefix share pages: each
page counts its references, as in vLLM's paged attention (Kwon et al., 2023). Page 0 is never allocated; it is the
trash page, for padding.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache

import torch

from disagg.core.errors import ConfigError, InvariantError
from disagg.core.types import Span
from disagg.kv.free_pages import FreePages
from disagg.kv.page_values import Growing, PageCopy, PageStatistics

TRASH_PAGE = 0


def pages_for(tokens: int, page_size: int) -> int:
    """Returns the number of pages for `tokens` tokens."""
    return -(-tokens // page_size)


def slots_of(pages: Sequence[int], page_size: int, span: Span) -> torch.Tensor:
    """Returns the slots of positions `span` of a sequence in `pages`, int32 `[len(span)]` on the CPU.

    `pages[i]` has positions `i * page_size .. (i + 1) * page_size - 1`. Raises ValueError past the last page.
    """
    if not span:
        return torch.empty(0, dtype=torch.int32)
    if span.start < 0 or span.stop > len(pages) * page_size:
        raise ValueError(
            f"positions {span.start}..{span.stop} are beyond {len(pages)} pages of {page_size} tokens"
        )
    # Runs three times on the critical path of a prompt; each torch call costs 20 us or more, so the code uses few.
    first = span.start // page_size
    owned = torch.frombuffer(array("i", pages[first : pages_for(span.stop, page_size)]), dtype=torch.int32)
    slots = torch.add(_slots_of_a_page(page_size), owned[:, None], alpha=page_size)
    return slots.view(-1)[span.start - first * page_size : span.stop - first * page_size]


@cache
def _slots_of_a_page(page_size: int) -> torch.Tensor:
    return torch.arange(page_size, dtype=torch.int32, device="cpu")


class TokenToKVPoolAllocator:
    """Allocates the pages of a pool of `pages * page_size` slots, including page 0, the trash page.

    An allocated page has one reference per reader. `alloc_tokens` returns pages with one reference, `share` adds one,
    and each reader drops its reference with `free`; the last one frees the page. Only the sole reader of a page may
    write to it. Not thread-safe: the group's scheduler owns the allocator.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 2 or page_size < 1:
            raise ConfigError(
                f"a KV pool needs at least 2 pages (page 0 is the trash page) of 1 token or more, "
                f"not {pages} pages of {page_size} tokens; give the pool more memory or use smaller pages"
            )
        self.pages = pages
        self.page_size = page_size
        self.unused = FreePages(range(TRASH_PAGE + 1, pages))
        """Pages without a reference."""
        self._readers = [0] * pages
        # Tokens in each page; for a shared page an upper bound, once one of its readers has been truncated.
        self._filled = [0] * pages
        self._used_tokens = 0
        self._references = 0
        self._peak_used_pages = 0

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return len(self.unused)

    def readers(self, page: int) -> int:
        """Returns the references of a page, 0 if free. Raises ValueError for a number outside the pool."""
        if not TRASH_PAGE < page < self.pages:
            raise ValueError(f"page {page} is not one of pages 1..{self.pages - 1}")
        return self._readers[page]

    def alloc_tokens(self, have_tokens: int, want_tokens: int, pages: list[int]) -> list[int] | None:
        """Grows a sequence in `pages` from `have_tokens` to `want_tokens` tokens; returns the new pages.

        Appends the new pages, if any are needed, to `pages`. Returns None, changing nothing, if pages are short.
        Raises ValueError if `pages` does not match `have_tokens` or is not allocated. Raises ValueError too if the
        growth would write to a shared last page, which `append_tokens` copies.
        """
        self._require_growth(have_tokens, want_tokens, pages)
        if want_tokens > have_tokens and self._must_copy(have_tokens, pages):
            raise ValueError(f"page {pages[-1]} is shared and must not be written: use append_tokens")
        need = pages_for(want_tokens, self.page_size) - len(pages)
        if need > len(self.unused):
            return None
        self._take_tokens(have_tokens, want_tokens, pages)
        return pages[len(pages) - need :]

    def append_tokens(self, have_tokens: int, want_tokens: int, pages: list[int]) -> list[PageCopy] | None:
        """Works like `alloc_tokens`, but replaces a shared, partly filled last page by a new page (copy on write).

        Returns the copies, at most one, that the caller must launch before the write; None, changing nothing, if
        pages are short.
        """
        self._require_growth(have_tokens, want_tokens, pages)
        copied = want_tokens > have_tokens and self._must_copy(have_tokens, pages)
        if pages_for(want_tokens, self.page_size) - len(pages) + copied > len(self.unused):
            return None
        copies = [self._replace_last(have_tokens, pages)] if copied else []
        self._take_tokens(have_tokens, want_tokens, pages)
        return copies

    def append_one_to_each(self, growing: Sequence[Growing]) -> list[PageCopy] | None:
        """Grows each sequence of `growing` by one token, for a decode step; the sequences must be distinct.

        Returns the copies that the caller must launch before the write; None, changing nothing, if pages are short.
        """
        size, readers, filled = self.page_size, self._readers, self._filled
        needy = self._needy(growing)
        if needy and self._pages_to_go_on(needy) > len(self.unused):
            return None
        copies: list[PageCopy] = []
        for one in needy:
            if one.tokens % size == 0:
                one.pages += self._take_pages(1)
            elif readers[one.pages[-1]] > 1:  # the last reader keeps the page
                copies.append(self._replace_last(one.tokens, one.pages))
        used_tokens = self._used_tokens
        for one in growing:
            page, fill = one.pages[-1], one.tokens % size + 1
            one.tokens += 1
            used_tokens += fill - filled[page]
            filled[page] = fill
        self._used_tokens = used_tokens
        return copies

    def pages_to_append(self, growing: Sequence[Growing]) -> int:
        """Returns the number of free pages that `append_one_to_each` needs."""
        return self._pages_to_go_on(self._needy(growing))

    def truncate_tokens(self, have_tokens: int, want_tokens: int, pages: list[int]) -> None:
        """Truncates a sequence to `want_tokens` tokens: frees later pages and removes them from `pages`."""
        if not 0 <= want_tokens <= have_tokens:
            raise ValueError(
                f"cannot truncate: 0 <= want_tokens <= have_tokens, not {have_tokens} -> {want_tokens}"
            )
        self._require_filled(have_tokens, pages)
        keep = pages_for(want_tokens, self.page_size)
        self.free(pages[keep:])
        del pages[keep:]
        if pages and self._readers[pages[-1]] == 1:
            self._fill(pages[-1], want_tokens - (keep - 1) * self.page_size)

    def share(self, pages: Sequence[int]) -> None:
        """Adds a reference to each of `pages`; the new reader drops it with `free`. Raises ValueError like `free`."""
        self.require(pages)
        readers = self._readers
        for page in pages:
            readers[page] += 1
        self._references += len(pages)

    def free(self, pages: Sequence[int]) -> int:
        """Drops a reference to each of `pages`; returns how many pages became free.

        Raises ValueError, changing nothing, if a page is not allocated or is repeated.
        """
        self.require(pages)
        readers, freed = self._readers, list[int]()
        for page in pages:
            left = readers[page] - 1
            readers[page] = left
            if not left:
                self._used_tokens -= self._filled[page]
                self._filled[page] = 0
                freed.append(page)
        self.unused.put(freed)
        self._references -= len(pages)
        return len(freed)

    def require(self, pages: Sequence[int]) -> None:
        """Raises ValueError unless `pages` are allocated and distinct."""
        if pages and not self._handed_out(pages):
            readers = self._readers
            wrong = [page for page in pages if not (TRASH_PAGE < page < self.pages and readers[page])]
            raise ValueError(f"page {wrong[0]} is not allocated: freed twice, or of another allocator")
        if len(set(pages)) != len(pages):
            raise ValueError(f"repeated page: {list(pages)}")

    def statistics(self) -> PageStatistics:
        """Returns the current counts."""
        used = self.pages - 1 - len(self.unused)
        peak = self._peak_used_pages
        return PageStatistics(self.pages - 1, used, self.page_size, self._used_tokens, peak, self._references)

    def check(self) -> None:
        """Raises InvariantError, with a dump, unless each page except page 0 is free (listed once) or has readers."""
        self.unused.check()
        free = self.unused.numbers()
        unread = [page for page in range(1, self.pages) if self._readers[page] == 0]
        sound = (
            free == unread
            and self._readers[TRASH_PAGE] == 0
            and all(
                0 < filled <= self.page_size if readers > 0 else readers == filled == 0
                for readers, filled in zip(self._readers, self._filled, strict=True)
            )
            and sum(self._filled) == self._used_tokens
            and sum(self._readers) == self._references
        )
        if not sound:
            dump = f"free {free}, readers {dict(enumerate(self._readers))}, filled {dict(enumerate(self._filled))}"
            raise InvariantError(
                f"page allocator: {dump}, used tokens {self._used_tokens}, references {self._references}"
            )

    def _handed_out(self, pages: Sequence[int]) -> bool:
        """Returns whether all `pages` are allocated. Avoids a Python loop, because the check runs often."""
        try:
            return min(pages) > TRASH_PAGE and all(map(self._readers.__getitem__, pages))
        except IndexError:  # beyond the last page
            return False

    def _must_copy(self, have_tokens: int, pages: Sequence[int]) -> bool:
        return have_tokens % self.page_size != 0 and self._readers[pages[-1]] > 1

    def _needy(self, growing: Sequence[Growing]) -> list[Growing]:
        """Returns the sequences whose next token needs a new page."""
        size, readers = self.page_size, self._readers
        return [g for g in growing if g.tokens % size == 0 or readers[g.pages[-1]] > 1]

    def _pages_to_go_on(self, needy: Sequence[Growing]) -> int:
        """Returns how many new pages the sequences `needy` need for one more token each.

        If all readers of a shared last page grow, the last reader keeps the page and needs no copy.
        """
        shared: dict[int, int] = {}
        for one in needy:
            if one.tokens % self.page_size:
                shared[one.pages[-1]] = shared.get(one.pages[-1], 0) + 1
        fresh = len(needy) - sum(shared.values())
        return fresh + sum(min(count, self._readers[page] - 1) for page, count in shared.items())

    def _take_tokens(self, have_tokens: int, want_tokens: int, pages: list[int]) -> None:
        pages += self._take_pages(pages_for(want_tokens, self.page_size) - len(pages))
        if want_tokens == have_tokens:
            return
        filled, touched = self._filled, pages[have_tokens // self.page_size :]
        before = filled[touched[0]]  # the other pages are new
        for page in touched:
            filled[page] = self.page_size
        filled[touched[-1]] = want_tokens - (len(pages) - 1) * self.page_size
        self._used_tokens += (len(touched) - 1) * self.page_size + filled[touched[-1]] - before

    def _fill(self, page: int, tokens: int) -> None:
        self._used_tokens += tokens - self._filled[page]
        self._filled[page] = tokens

    def _replace_last(self, have_tokens: int, pages: list[int]) -> PageCopy:
        """Replaces the last page, shared with other readers, by a new page with the same fill."""
        copy = PageCopy(pages[-1], *self._take_pages(1))
        self._readers[copy.source] -= 1
        self._references -= 1
        pages[-1] = copy.destination
        self._fill(copy.destination, have_tokens % self.page_size)
        return copy

    def _take_pages(self, count: int) -> list[int]:
        taken = self.unused.take(count)
        for page in taken:
            self._readers[page] = 1
        self._references += count
        self._peak_used_pages = max(self._peak_used_pages, self.pages - 1 - len(self.unused))
        return taken

    def _require_growth(self, have_tokens: int, want_tokens: int, pages: Sequence[int]) -> None:
        if not 0 <= have_tokens <= want_tokens:
            raise ValueError(
                f"cannot grow: 0 <= have_tokens <= want_tokens, not {have_tokens} -> {want_tokens}"
            )
        self._require_filled(have_tokens, pages)

    def _require_filled(self, tokens: int, pages: Sequence[int]) -> None:
        if len(pages) != pages_for(tokens, self.page_size):
            raise ValueError(f"{tokens} tokens do not fill {len(pages)} pages of {self.page_size} tokens")
        self.require(pages[-1:])
