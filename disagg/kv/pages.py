"""Page allocator of a KV pool: integers only, on the host, O(1) per page.

Pages exist so that a request grows without moving and without gaps larger than one page, and so that requests which
begin alike share what they have in common: each page counts who reads it. Idea: vLLM's paged attention (Kwon et al.,
2023). Page 0 is never handed out: it is the trash page, for padding.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from disagg.core.errors import ConfigError, InvariantError
from disagg.core.types import Span
from disagg.kv.page_values import Growing, PageCopy, PageStatistics

TRASH_PAGE = 0


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
    # A prompt waits for this three times, and each call of torch costs it 20 us and more: few of them.
    first = span.start // page_size
    owned = torch.frombuffer(array("i", pages[first : pages_for(span.stop, page_size)]), dtype=torch.int32)
    slots = torch.add(torch.arange(page_size, dtype=torch.int32), owned[:, None], alpha=page_size)
    return slots.view(-1)[span.start - first * page_size : span.stop - first * page_size]


class TokenToKVPoolAllocator:
    """Hands out the pages of a pool of `pages * page_size` slots (page 0, the trash page, included).

    A page that is handed out has one reference for each of its readers. `alloc_tokens` gives the first one to the
    caller, `share` gives another one to another reader, and each reader frees its own with `free`; the page can be
    handed out again when the last one is gone. Only who reads a page alone may write to it. Not thread-safe: the
    group's scheduler owns it.
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
        self._readers = [0] * pages
        self._filled = [0] * pages  # tokens asked for in each page; too many at times where a reader shrank
        self._used_tokens = 0
        self._references = 0
        self._peak_used_pages = 0

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    def readers(self, page: int) -> int:
        """References of a page, 0 when it is free. Raises ValueError for a number that is no page of the pool."""
        if not TRASH_PAGE < page < self.pages:
            raise ValueError(f"page {page} is not one of pages 1..{self.pages - 1}")
        return self._readers[page]

    def alloc_tokens(self, have_tokens: int, want_tokens: int, pages: list[int]) -> list[int] | None:
        """Grows a request from `have_tokens` to `want_tokens` tokens; `pages` is its list of pages.

        Takes pages only when the last one is full, appends them to `pages` and returns the new ones (maybe
        none). All or nothing: returns None, and changes nothing, when there is no room. Raises ValueError
        when `pages` does not match `have_tokens` or is not handed out, and when growing would write to a page that
        others read too: `append_tokens` copies it.
        """
        self._require_growth(have_tokens, want_tokens, pages)
        if want_tokens > have_tokens and self._must_copy(have_tokens, pages):
            raise ValueError(f"page {pages[-1]} has other readers: it is not written to, use append_tokens")
        need = pages_for(want_tokens, self.page_size) - len(pages)
        if need > len(self._free):
            return None
        self._take_tokens(have_tokens, want_tokens, pages)
        return pages[len(pages) - need :]

    def append_tokens(self, have_tokens: int, want_tokens: int, pages: list[int]) -> list[PageCopy] | None:
        """As `alloc_tokens`, but a last page that is partly filled and has other readers is replaced by a new one.

        Returns the copies (one at most) that the caller owes before it writes; None, changing nothing, when there is
        no room.
        """
        self._require_growth(have_tokens, want_tokens, pages)
        copied = want_tokens > have_tokens and self._must_copy(have_tokens, pages)
        if pages_for(want_tokens, self.page_size) - len(pages) + copied > len(self._free):
            return None
        copies = [self._replace_last(have_tokens, pages)] if copied else []
        self._take_tokens(have_tokens, want_tokens, pages)
        return copies

    def append_one_to_each(self, growing: Sequence[Growing]) -> list[PageCopy] | None:
        """Grows each of `growing` (none named twice) by one token: what a decode step asks for.

        Only what needs a page is looked at twice. Returns the copies owed; None, changing nothing, when there is not
        room for all of them.
        """
        size, readers, filled = self.page_size, self._readers, self._filled
        needy = self._needy(growing)
        if needy and self._pages_to_go_on(needy) > len(self._free):
            return None
        copies: list[PageCopy] = []
        for one in needy:
            if one.tokens % size == 0:
                one.pages += self._take_pages(1)
            elif readers[one.pages[-1]] > 1:  # the last one that shared it may write to it
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
        """Free pages that `append_one_to_each` needs."""
        return self._pages_to_go_on(self._needy(growing))

    def truncate_tokens(self, have_tokens: int, want_tokens: int, pages: list[int]) -> None:
        """Takes a request back to `want_tokens` tokens: frees the pages behind them and drops them from `pages`."""
        if not 0 <= want_tokens <= have_tokens:
            raise ValueError(
                f"a request shrinks: 0 <= want_tokens <= have_tokens, not {have_tokens} -> {want_tokens}"
            )
        self._require_filled(have_tokens, pages)
        keep = pages_for(want_tokens, self.page_size)
        self.free(pages[keep:])
        del pages[keep:]
        if pages and self._readers[pages[-1]] == 1:
            self._fill(pages[-1], want_tokens - (keep - 1) * self.page_size)

    def share(self, pages: Sequence[int]) -> None:
        """One more reader of each of `pages`, who frees them too. Raises ValueError, changing nothing, as `free`."""
        self.require(pages)
        readers = self._readers
        for page in pages:
            readers[page] += 1
        self._references += len(pages)

    def free(self, pages: Sequence[int]) -> int:
        """One reader less of each of `pages`; returns how many had no other and can be handed out again.

        Raises ValueError, changing nothing, on one that is not handed out or named twice.
        """
        self.require(pages)
        readers, before = self._readers, len(self._free)
        for page in pages:
            left = readers[page] - 1
            readers[page] = left
            if not left:
                self._used_tokens -= self._filled[page]
                self._filled[page] = 0
                self._free.append(page)
        self._references -= len(pages)
        return len(self._free) - before

    def require(self, pages: Sequence[int]) -> None:
        """Raises ValueError unless `pages` are all handed out, and none is named twice."""
        if pages and not self._handed_out(pages):
            readers = self._readers
            wrong = [page for page in pages if not (TRASH_PAGE < page < self.pages and readers[page])]
            raise ValueError(f"page {wrong[0]} is not handed out: freed twice, or never this allocator's")
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is named twice: {list(pages)}")

    def statistics(self) -> PageStatistics:
        """Counts at this moment."""
        used = self.pages - 1 - len(self._free)
        peak = self._peak_used_pages
        return PageStatistics(self.pages - 1, used, self.page_size, self._used_tokens, peak, self._references)

    def check(self) -> None:
        """Raises InvariantError, with a dump, unless each real page is either free once or has readers."""
        free = sorted(self._free)
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
        """No loop in Python over them: every prompt's pages are looked at when they are shared, cached and freed."""
        try:
            return min(pages) > TRASH_PAGE and all(map(self._readers.__getitem__, pages))
        except IndexError:  # beyond the last page
            return False

    def _must_copy(self, have_tokens: int, pages: Sequence[int]) -> bool:
        return have_tokens % self.page_size != 0 and self._readers[pages[-1]] > 1

    def _needy(self, growing: Sequence[Growing]) -> list[Growing]:
        """Those whose next token does not simply go behind the last one."""
        size, readers = self.page_size, self._readers
        return [g for g in growing if g.tokens % size == 0 or readers[g.pages[-1]] > 1]

    def _pages_to_go_on(self, needy: Sequence[Growing]) -> int:
        """How many pages one token more for each of `needy` takes.

        Of those that share their last page, the one that is left with it at the end needs no new one.
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
        before = filled[touched[0]]  # the others are new
        for page in touched:
            filled[page] = self.page_size
        filled[touched[-1]] = want_tokens - (len(pages) - 1) * self.page_size
        self._used_tokens += (len(touched) - 1) * self.page_size + filled[touched[-1]] - before

    def _fill(self, page: int, tokens: int) -> None:
        self._used_tokens += tokens - self._filled[page]
        self._filled[page] = tokens

    def _replace_last(self, have_tokens: int, pages: list[int]) -> PageCopy:
        """Leaves the last page to its other readers, for a new one that is as full."""
        copy = PageCopy(pages[-1], *self._take_pages(1))
        self._readers[copy.source] -= 1
        self._references -= 1
        pages[-1] = copy.destination
        self._fill(copy.destination, have_tokens % self.page_size)
        return copy

    def _take_pages(self, count: int) -> list[int]:
        keep = len(self._free) - count
        taken = self._free[keep:][::-1]
        del self._free[keep:]
        for page in taken:
            self._readers[page] = 1
        self._references += count
        self._peak_used_pages = max(self._peak_used_pages, self.pages - 1 - keep)
        return taken

    def _require_growth(self, have_tokens: int, want_tokens: int, pages: Sequence[int]) -> None:
        if not 0 <= have_tokens <= want_tokens:
            raise ValueError(
                f"a request grows: 0 <= have_tokens <= want_tokens, not {have_tokens} -> {want_tokens}"
            )
        self._require_filled(have_tokens, pages)

    def _require_filled(self, tokens: int, pages: Sequence[int]) -> None:
        if len(pages) != pages_for(tokens, self.page_size):
            raise ValueError(f"{tokens} tokens do not fill {len(pages)} pages of {self.page_size} tokens")
        self.require(pages[-1:])
