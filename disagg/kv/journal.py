"""What a prefix cache tells of its content, as changes since the version that the listener has."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from disagg.core.prefixes import Digest, pack_marks

MIN_UNIT_TOKENS = 64
"""Shorter common beginnings are not worth a choice of group."""
MAX_MARKS = 1 << 16
"""512 KiB for everything, at most."""


def unit_tokens_for(pages: int, page_size: int) -> int:
    """Tokens between two marks, whole pages: so many that a pool of `pages` pages never has more than `MAX_MARKS`."""
    unit_pages = max(1, MIN_UNIT_TOKENS // page_size)
    while pages // unit_pages > MAX_MARKS:
        unit_pages *= 2
    return unit_pages * page_size


class MarkJournal:
    """The marks that are held, and the latest changes in their order. Not thread-safe."""

    def __init__(self, unit_tokens: int, kept: int = MAX_MARKS) -> None:
        """`kept`: changes that are remembered; who asks for older ones gets everything."""
        self.unit_tokens = unit_tokens
        self.held: set[int] = set()
        self._changes: deque[int] = deque(maxlen=kept)  # a mark that came, or ~mark of one that went
        self.version = 0
        """Changes so far."""

    def add(self, marks: Iterable[int]) -> None:
        """They are held from now on; shorter beginnings first."""
        for mark in marks:
            self.held.add(mark)
            self._changes.append(mark)
            self.version += 1

    def remove(self, marks: Iterable[int]) -> None:
        """They are held no more; longer beginnings first."""
        for mark in marks:
            self.held.discard(mark)
            self._changes.append(~mark)
            self.version += 1

    def digest(self, since: int | None = None) -> Digest:
        """What a listener needs that has version `since`, None when it has nothing.

        Everything when `since` is too old to be remembered, or when everything is less than the changes.
        """
        missed = None if since is None else self.version - since
        if missed is None or not 0 <= missed <= min(len(self._changes), len(self.held)):
            return Digest(None, self.version, self.unit_tokens, pack_marks(list(self.held)), b"")
        latest: dict[int, bool] = {}
        for change in islice(reversed(self._changes), missed):
            latest.setdefault(change if change >= 0 else ~change, change >= 0)
        added = pack_marks([mark for mark, came in latest.items() if came])
        removed = pack_marks([mark for mark, came in latest.items() if not came])
        return Digest(since, self.version, self.unit_tokens, added, removed)
