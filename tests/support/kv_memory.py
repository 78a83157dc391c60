"""A KV pool in plain Python: what stands in each slot, so that a test sees what sharing pages does to readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from disagg.kv.page_values import PageCopy

Word = object


class KVMemory:
    """`slots[page][offset]` is what was written there last."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots: list[list[Word]] = [[None] * page_size for _ in range(pages)]

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Carries out what is owed, in order."""
        for copy in copies:
            self.slots[copy.destination] = list(self.slots[copy.source])

    def write(self, pages: Sequence[int], start: int, words: Sequence[Word]) -> None:
        """`words` at the positions from `start` on of who has `pages`."""
        for position, word in enumerate(words, start):
            self.slots[pages[position // self.page_size]][position % self.page_size] = word

    def read(self, pages: Sequence[int], tokens: int) -> list[Word]:
        """The first `tokens` positions of who has `pages`."""
        return [word for page in pages for word in self.slots[page]][:tokens]
