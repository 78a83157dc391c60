"""Rows and pages of a group, handed out by its leader: a request has a row, and pages as it grows.

All ranks of a group use the same numbers, so only the leader keeps books.

Who owns the references to a request's pages, and who frees them:

    [reserve, release)      the holding, to each of its pages, those that it found cached too; `release` frees; and
                            `vacate`, until `refill` takes new ones
    [fork, release)         each fork its own, to each of the same pages: several sequences of one request
    [keep, evicted)         the prefix cache, one more to each full page that it adds then; its eviction frees
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.core.config_tree import EvictionName
from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.kv.journal import MarkJournal
from disagg.kv.page_values import PageCopy, PageStatistics
from disagg.kv.pages import TRASH_PAGE, TokenToKVPoolAllocator, pages_for
from disagg.kv.radix import RadixCache, RadixStatistics
from disagg.kv.radix_node import Node
from disagg.kv.sequence import KVSequence


class Layout(NamedTuple):
    """How the pages of a request's sequences hang together, whatever pages they are."""

    pages: int
    """Different ones."""
    sequences: tuple[tuple[int, tuple[int, ...]], ...]
    """Of each sequence its tokens, and which of those pages they lie in.

    Sequences that are forks of one another begin with the same pages: those before a sequence have them first.
    """


@dataclass(slots=True, eq=False)
class Holding:
    """A row, and a sequence of tokens in pages. Owned by the request from `reserve` or `fork` until `release`."""

    row: int
    sequence: KVSequence = field(repr=False)
    cached_tokens: int = 0
    """Tokens at the beginning whose KV stood in its pages already: whole pages, which others read too."""
    node: Node | None = field(default=None, repr=False)
    """In the prefix cache, locked for it."""

    @property
    def pages(self) -> list[int]:
        """In order; page `i` holds positions `i * page_size ...`."""
        return self.sequence.pages

    @property
    def tokens(self) -> int:
        """Tokens that the pages have places for."""
        return self.sequence.tokens


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
    def rows(self) -> int:
        """Sequences that can hold pages at one time."""
        return self._rows

    @property
    def free_rows(self) -> int:
        """Rows that can be handed out now."""
        return len(self._free_rows)

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
        holding, found = Holding(self._free_rows[-1], KVSequence(self._pages)), None
        if self._cache is not None and prompt is not None:
            found = self._cache.match(prompt, prompt.tokens - 1)
            self._cache.lock(found.node)
            holding = Holding(holding.row, KVSequence(self._pages, found.pages), found.tokens, found.node)
        need = pages_for(tokens, self.page_size) - len(holding.pages)
        if need + spare_pages > self.free_pages or not self._make_room(need):
            holding.sequence.free()
            self._forget(holding)
            return None
        holding.sequence.append(tokens - holding.tokens)  # what is shared is full: no copies are owed
        self._free_rows.pop()
        if self._cache is not None and found is not None:
            self._cache.count(found)
        return holding

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
        before, holding.node = holding.node, self._cache.insert(prompt, pages)
        self._cache.lock(holding.node)
        if before is not None:
            self._cache.unlock(before)

    def fork(self, holding: Holding) -> Holding | None:
        """Another row for a sequence that begins as this one: it reads the same pages. None when no row is free."""
        if not self._free_rows:
            return None
        twin = Holding(self._free_rows.pop(), holding.sequence.fork())
        self._read_cached(twin, holding)
        return twin

    def refork(self, holding: Holding, other: Holding) -> None:
        """Gives up the pages of `holding` for those of `other`, whose fork it is from now on. Its row stays."""
        self.vacate(holding)
        holding.sequence.free()
        holding.sequence = other.sequence.fork()
        self._read_cached(holding, other)

    def _read_cached(self, holding: Holding, other: Holding) -> None:
        """It begins with the same cached pages."""
        if self._cache is not None and other.node is not None:
            self._cache.lock(other.node)
        holding.cached_tokens, holding.node = other.cached_tokens, other.node

    def grow(self, holdings: Sequence[Holding]) -> list[PageCopy] | None:
        """One token more for each of `holdings`; None, changing nothing, when there is no room for all of them.

        Returns the copies owed before they are written: who shares a page that is not full gets one of its own.
        """
        sequences = [holding.sequence for holding in holdings]
        copies = self._pages.append_one_to_each(sequences)
        if copies is None and self._make_room(self._pages.pages_to_append(sequences)):
            copies = self._pages.append_one_to_each(sequences)
        return copies

    def shrink(self, holding: Holding, tokens: int) -> None:
        """Keeps the first `tokens` tokens; pages behind them are free again."""
        holding.sequence.truncate(tokens)

    def vacate(self, holding: Holding) -> None:
        """Frees the pages; the row stays with the request, which may `refill` them."""
        self.shrink(holding, 0)
        self._forget(holding)

    def layout(self, holdings: Sequence[Holding], tokens: Sequence[int]) -> Layout:
        """How the pages of the first `tokens` tokens of each of `holdings` hang together; for `refill`."""
        numbers: dict[int, int] = {}
        sequences = []
        for holding, count in zip(holdings, tokens, strict=True):
            pages = holding.pages[: pages_for(count, self.page_size)]
            sequences.append((count, tuple(numbers.setdefault(page, len(numbers)) for page in pages)))
        return Layout(len(numbers), tuple(sequences))

    def refill(self, holdings: Sequence[Holding], layout: Layout) -> list[int] | None:
        """New pages for holdings without any, that hang together as `layout` says: its pages, in its numbering.

        None, changing nothing, when there is no room.
        """
        if not self._make_room(layout.pages):
            return None
        pages: list[int] = []
        for holding, (tokens, numbers) in zip(holdings, layout.sequences, strict=True):
            shared = [pages[number] for number in numbers if number < len(pages)]
            holding.sequence.free()
            holding.sequence = KVSequence(self._pages, shared)
            if tokens < holding.tokens:  # the last page is not full, and all of it is shared
                holding.sequence.truncate(tokens)
            else:
                holding.sequence.append(tokens - holding.tokens)
            pages += holding.pages[len(shared) :]
        return pages

    def release(self, holding: Holding) -> None:
        """Takes both back. Once: a second release raises `ValueError`."""
        if holding.row in self._free_rows:
            raise ValueError(f"row {holding.row} is released twice")
        holding.sequence.free()
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

    def check(self, requests: Sequence[Sequence[Holding]]) -> None:
        """Raises `InvariantError` unless exactly these holdings are out: no page or row lost, none owned twice.

        `requests`: the holdings of each. Only sequences of one request, and who found them cached, share pages.
        """
        self._pages.check()
        cached: list[int] = []
        if self._cache is not None:
            self._cache.check()
            cached = self._cache.pages()
        holdings = [holding for request in requests for holding in request]
        rows = sorted(self._free_rows + [h.row for h in holdings])
        references = Counter(page for h in holdings for page in h.pages) + Counter(cached)
        owners = Counter(page for request in requests for page in {p for h in request for p in h.pages})
        shared = set(cached)
        sound = (
            rows == list(range(self._rows))
            and TRASH_PAGE not in references
            and all(count == 1 for page, count in owners.items() if page not in shared)
            and all(self._pages.readers(page) == count for page, count in references.items())
            and self._pages.statistics().references == references.total()
        )
        if not sound:
            raise InvariantError(
                f"ledger: free rows {self._free_rows}, holdings {requests}, pages {owners}, cached {cached}"
            )
