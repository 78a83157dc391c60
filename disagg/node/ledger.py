"""Rows and pages of a group, handed out by its leader: a request has a row, and pages as it grows.

All ranks of a group use the same numbers, so only the leader keeps books.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.core.errors import InvariantError
from disagg.kv.page_values import PageStatistics
from disagg.kv.pages import TRASH_PAGE, TokenToKVPoolAllocator


@dataclass(slots=True, eq=False)
class Holding:
    """A row, and the pages of `tokens` tokens. Owned by the request from `reserve` until `release`.

    It is what `TokenToKVPoolAllocator.append_one_to_each` grows.
    """

    row: int
    pages: list[int] = field(repr=False)
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """The ledger as it stands."""

    rows: int
    free_rows: int
    pages: PageStatistics


class Ledger:
    """Not thread-safe: the leader's lock guards it. Row 0 exists like any other; page 0 is the trash page."""

    def __init__(self, *, pool_tokens: int, page_size: int, rows: int) -> None:
        self._pages = TokenToKVPoolAllocator(pool_tokens // page_size + 1, page_size)
        self._rows = rows
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._pages.page_size

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
        """Pages that can be handed out now."""
        return self._pages.free_pages

    def reserve(self, tokens: int) -> Holding | None:
        """A row and pages for `tokens` tokens, or None, changing nothing, when either is short."""
        if not self._free_rows:
            return None
        pages: list[int] = []
        if self._pages.alloc_tokens(0, tokens, pages) is None:
            return None
        return Holding(self._free_rows.pop(), pages, tokens)

    def grow(self, holdings: Sequence[Holding]) -> bool:
        """One token more for each of `holdings`; False, changing nothing, when there is no room for all of them."""
        return (
            self._pages.append_one_to_each(holdings) is not None
        )  # nothing is shared here: no copies are owed

    def shrink(self, holding: Holding, tokens: int) -> None:
        """Keeps the first `tokens` tokens; pages behind them are free again."""
        self._pages.truncate_tokens(holding.tokens, tokens, holding.pages)
        holding.tokens = tokens

    def vacate(self, holding: Holding) -> None:
        """Frees the pages; the row stays with the request, which may `refill` them."""
        self.shrink(holding, 0)

    def refill(self, holding: Holding, tokens: int) -> bool:
        """Pages for `tokens` tokens for a request without any; False, changing nothing, when there is no room."""
        if self._pages.alloc_tokens(holding.tokens, tokens, holding.pages) is None:
            return False
        holding.tokens = tokens
        return True

    def release(self, holding: Holding) -> None:
        """Takes both back. Once: a second release raises `ValueError`."""
        if holding.row in self._free_rows:
            raise ValueError(f"row {holding.row} is released twice")
        self._pages.free(holding.pages)
        self._free_rows.append(holding.row)

    def statistics(self) -> LedgerStatistics:
        """Counts at this moment."""
        return LedgerStatistics(self._rows, len(self._free_rows), self._pages.statistics())

    def check(self, holdings: list[Holding]) -> None:
        """Raises `InvariantError` unless exactly `holdings` are out: no page or row lost, none owned twice."""
        self._pages.check()
        rows = sorted(self._free_rows + [h.row for h in holdings])
        owned = [page for h in holdings for page in h.pages]
        sound = (
            rows == list(range(self._rows))
            and len(set(owned)) == len(owned) == self._pages.statistics().used_pages
            and TRASH_PAGE not in owned
        )
        if not sound:
            raise InvariantError(f"ledger: free rows {self._free_rows}, holdings {holdings}, pages {owned}")
