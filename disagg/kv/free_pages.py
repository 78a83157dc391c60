"""The free pages of a pool, as runs of consecutive pages, so that the pages of a prompt are consecutive if possible.

Copies between a pool and host memory move a run at once (`disagg.kv.row_loads`). Answers grow by single pages, which
fill the smallest runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

AHEAD_SHARE = 16
"""Divisor of a pool's pages: eviction frees up to a sixteenth of them ahead of their use, if the next tier usually
has copies of them. The more pages are free, the longer are the runs."""
SINGLE_PAGES = 16
"""Largest number of pages that are set aside for requests of single pages."""


class FreePages:
    """Owns the pages without a reference. Not thread-safe: see `disagg.kv.pages`."""

    def __init__(self, pages: range) -> None:
        """`pages`: all pages of the pool that may be allocated."""
        self._count = 0
        """Number of pages of all runs."""
        self._singles: list[int] = []
        """Pages set aside for requests of single pages, in descending order; they belong to no run."""
        self._ends: dict[int, int] = {}
        """End of each run by its first page. No two runs are adjacent."""
        self._starts: dict[int, int] = {}
        """First page of each run by its end."""
        self._sizes: list[tuple[int, int]] = []
        """(number of pages, first page) of each run, ascending."""
        if pages:
            self._add(pages.start, pages.stop)

    def __len__(self) -> int:
        return self._count + len(self._singles)

    def take(self, count: int) -> list[int]:
        """Removes and returns `count` free pages; `count` must be at most `len(self)`.

        Several pages come from the smallest run that has enough; without such a run, from the largest runs.
        """
        if count == 1:
            return [self._take_single()]
        if count > self._count and self._singles:
            self._join(self._singles[-1], self._singles[0] + 1)
            self._singles = []
        taken: list[int] = []
        while missing := count - len(taken):
            at = min(bisect_left(self._sizes, (missing, 0)), len(self._sizes) - 1)
            taken += self._take_run(at, missing)
        return taken

    def put(self, pages: Sequence[int]) -> None:
        """Adds pages that lost their last reference."""
        first = 0
        for at in range(1, len(pages) + 1):
            if at == len(pages) or pages[at] != pages[at - 1] + 1:
                self._join(pages[first], pages[at - 1] + 1)
                first = at

    def numbers(self) -> list[int]:
        """Returns the free pages in ascending order. O(pages): for checks."""
        return sorted([*self._singles, *(page for run in self._ends.items() for page in range(*run))])

    def check(self) -> None:
        """Asserts that the runs are maximal, and that all their descriptions agree."""
        assert self._sizes == sorted((end - start, start) for start, end in self._ends.items())
        assert self._starts == {end: start for start, end in self._ends.items()}
        assert not self._ends.keys() & self._starts.keys(), "two runs are adjacent"
        assert self._count == sum(size for size, _ in self._sizes)
        assert self._singles == sorted(self._singles, reverse=True)

    def _take_single(self) -> int:
        if not self._singles:
            self._singles = list(reversed(self._take_run(0, SINGLE_PAGES)))
        return self._singles.pop()

    def _take_run(self, at: int, most: int) -> range:
        """Removes the first pages, at most `most`, of the run at position `at` of `_sizes`."""
        size, start = self._sizes[at]
        end = start + min(size, most)
        self._remove(start)
        if end < start + size:
            self._add(end, start + size)
        return range(start, end)

    def _join(self, start: int, end: int) -> None:
        """Adds the pages from `start` to `end`, joined with the runs beside them."""
        if (before := self._starts.get(start)) is not None:
            self._remove(before)
            start = before
        if (after := self._ends.get(end)) is not None:
            self._remove(end)
            end = after
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end] = end, start
        insort(self._sizes, (end - start, start))
        self._count += end - start

    def _remove(self, start: int) -> None:
        end = self._ends.pop(start)
        del self._starts[end]
        del self._sizes[bisect_left(self._sizes, (end - start, start))]
        self._count -= end - start
