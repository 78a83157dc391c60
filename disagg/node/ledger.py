"""Rows and pages of a group, handed out by its leader: a request has a row, and pages as it grows.

All ranks of a group use the same numbers, so only the leader keeps books.

Who owns the references to a request's pages, and who frees them:

    [reserve, release)      the holding, to each of its pages, those that it found cached too; `release` frees; and
                            `vacate`, until `refill` takes new ones
    [keep, evicted)         the prefix cache, one more to each full page of what is kept; its eviction frees
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.core.config_tree import EvictionName
from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.kv.journal import MarkJournal
from disagg.kv.page_values import PageStatistics
from disagg.kv.pages import TRASH_PAGE, TokenToKVPoolAllocator, pages_for
from disagg.kv.radix import RadixCache, RadixStatistics
from disagg.kv.radix_node import Node


@dataclass(slots=True, eq=False)
class Holding:
    """A row, and the pages of `tokens` tokens. Owned by the request from `reserve` until `release`.

    It is what `TokenToKVPoolAllocator.append_one_to_each` grows.
    """

    row: int
    pages: list[int] = field(repr=False)
    tokens: int = 0
    cached_tokens: int = 0
    """Tokens at the beginning whose KV stands in its pages already: whole pages, which others read too."""
    node: Node | None = field(default=None, repr=False)
    """In the prefix cache, locked for it."""


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """The ledger as it stands."""

    rows: int
    free_rows: int
    pages: PageStatistics
    cache: RadixStatistics | None = None
    """None without a prefix cache."""


class Ledger:
    """Not thread-safe: the leader's lock guards it. Row 0 exists like any other; page 0 is the trash page."""

    def __init__(
        self, *, pool_tokens: int, page_size: int, rows: int, eviction: EvictionName | None = None
    ) -> None:
        """`eviction`: of the prefix cache; None: without one."""
        self._pages = TokenToKVPoolAllocator(pool_tokens // page_size + 1, page_size)
        self._cache = RadixCache(self._pages, eviction) if eviction else None
        self._rows = rows
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._pages.page_size

    @property
    def caches(self) -> bool:
        """Whether it has a prefix cache."""
        return self._cache is not None

    @property
    def journal(self) -> MarkJournal | None:
        """What the prefix cache has to tell routers; None without one."""
        return self._cache.journal if self._cache is not None else None

    @property
    def capacity_tokens(self) -> int:
        """Most tokens that one request could ever hold."""
        return (self._pages.pages - 1) * self._pages.page_size

    @property
    def pages(self) -> int:
        """Pages that can be handed out, all together."""
        return self._pages.pages - 1

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out now; cached ones that no request reads are evicted for it."""
        return self._pages.free_pages + (self._cache.evictable_pages if self._cache is not None else 0)

    def reserve(self, tokens: int, prompt: PrefixKey | None = None, spare_pages: int = 0) -> Holding | None:
        """A row and pages for `tokens` tokens, or None, changing nothing, when either is short.

        With `prompt` it begins with the pages of the longest cached beginning, of all but the last token at most.
        `spare_pages` pages stay free behind it.
        """
        if not self._free_rows:
            return None
        if self._cache is None or prompt is None:
            pages = self._take(tokens, [], spare_pages)
            return None if pages is None else Holding(self._free_rows.pop(), pages, tokens)
        found = self._cache.match(prompt, prompt.tokens - 1)
        self._cache.lock(found.node)
        self._pages.share(found.pages)
        pages = self._take(tokens, list(found.pages), spare_pages)
        if pages is None:
            self._pages.free(found.pages)
            self._cache.unlock(found.node)
            return None
        self._cache.count(found)
        return Holding(self._free_rows.pop(), pages, tokens, found.tokens, found.node)

    def _take(self, tokens: int, pages: list[int], spare_pages: int) -> list[int] | None:
        """`pages`, which are full, and as many more as `tokens` tokens need."""
        need = pages_for(tokens, self.page_size) - len(pages)
        if need + spare_pages > self.free_pages or not self._make_room(need):
            return None
        self._pages.alloc_tokens(len(pages) * self.page_size, tokens, pages)
        return pages

    def _make_room(self, pages: int) -> bool:
        """So many can be handed out, some evicted for it; False, changing nothing, where that would not be enough."""
        short = pages - self._pages.free_pages
        if short <= 0:
            return True
        if self._cache is None or self._cache.evictable_pages < short:
            return False
        return self._cache.evict(short) == short

    def keep(self, holding: Holding, prompt: PrefixKey) -> None:
        """The KV of all of `prompt` stands in the holding's pages: others that begin alike may read it."""
        if self._cache is None:
            return
        pages = holding.pages[: prompt.tokens // self.page_size]
        self._pages.share(pages)
        before, holding.node = holding.node, self._cache.insert(prompt, pages)
        self._cache.lock(holding.node)
        if before is not None:
            self._cache.unlock(before)

    def grow(self, holdings: Sequence[Holding]) -> bool:
        """One token more for each of `holdings`; False, changing nothing, when there is no room for all of them."""
        if self._cache is not None and not self._make_room(
            sum(h.tokens % self.page_size == 0 for h in holdings)
        ):
            return False
        return (
            self._pages.append_one_to_each(holdings) is not None
        )  # what is shared is full: no copies are owed

    def shrink(self, holding: Holding, tokens: int) -> None:
        """Keeps the first `tokens` tokens; pages behind them are free again."""
        self._pages.truncate_tokens(holding.tokens, tokens, holding.pages)
        holding.tokens = tokens

    def vacate(self, holding: Holding) -> None:
        """Frees the pages; the row stays with the request, which may `refill` them."""
        self.shrink(holding, 0)
        self._forget(holding)

    def refill(self, holding: Holding, tokens: int) -> bool:
        """Pages for `tokens` tokens for a request without any; False, changing nothing, when there is no room."""
        if not self._make_room(pages_for(tokens, self.page_size)):
            return False
        self._pages.alloc_tokens(holding.tokens, tokens, holding.pages)
        holding.tokens = tokens
        return True

    def release(self, holding: Holding) -> None:
        """Takes both back. Once: a second release raises `ValueError`."""
        if holding.row in self._free_rows:
            raise ValueError(f"row {holding.row} is released twice")
        self._pages.free(holding.pages)
        self._free_rows.append(holding.row)
        self._forget(holding)

    def _forget(self, holding: Holding) -> None:
        """It reads no cached page any more."""
        if self._cache is not None and holding.node is not None:
            self._cache.unlock(holding.node)
        holding.node, holding.cached_tokens = None, 0

    def statistics(self) -> LedgerStatistics:
        """Counts at this moment."""
        cache = self._cache.statistics() if self._cache is not None else None
        return LedgerStatistics(self._rows, len(self._free_rows), self._pages.statistics(), cache)

    def check(self, holdings: list[Holding]) -> None:
        """Raises `InvariantError` unless exactly `holdings` are out: no page or row lost, none owned twice.

        Pages at the beginning of a holding that are cached may have several owners.
        """
        self._pages.check()
        cached: list[int] = []
        if self._cache is not None:
            self._cache.check()
            cached = self._cache.pages()
        rows = sorted(self._free_rows + [h.row for h in holdings])
        owners = Counter(page for h in holdings for page in h.pages)
        references, shared = owners + Counter(cached), set(cached)
        sound = (
            rows == list(range(self._rows))
            and TRASH_PAGE not in references
            and all(count == 1 for page, count in owners.items() if page not in shared)
            and all(self._pages.readers(page) == count for page, count in references.items())
            and self._pages.statistics().references == references.total()
        )
        if not sound:
            raise InvariantError(
                f"ledger: free rows {self._free_rows}, holdings {holdings}, pages {owners}, cached {cached}"
            )
