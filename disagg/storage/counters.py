"""Thread-safe counters of a storage."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from disagg.core.errors import InvariantError
from disagg.storage.contract import StorageStatistics


class Counters:
    """Counters with the names of `StorageStatistics`' fields. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        """Adds each keyword argument to the count with the same name."""
        with self._lock:
            self._counts.update(counts)

    def add_put(self, results: Sequence[bool]) -> None:
        """Counts the pages of a `put` by the call's results."""
        self.add(put_pages=sum(results), put_failed=len(results) - sum(results))

    def add_get(self, into: Sequence[memoryview], results: Sequence[bool]) -> None:
        """Counts the pages of a `get` into `into` by the call's results."""
        hit_bytes = sum(page.nbytes for page, hit in zip(into, results, strict=True) if hit)
        self.add(hits=sum(results), hit_bytes=hit_bytes, misses=len(results) - sum(results))

    def statistics(self, pages: int, stored_bytes: int, *, paused: bool) -> StorageStatistics:
        """Returns the counts, with `pages`, `stored_bytes` and `paused` as current values."""
        with self._lock:
            return StorageStatistics(pages=pages, stored_bytes=stored_bytes, paused=paused, **self._counts)

    def check(self) -> None:
        """Raises `InvariantError` if a count is negative, or hit bytes were counted without a hit."""
        with self._lock:
            counts = dict(self._counts)
        wrong = [name for name, count in counts.items() if count < 0]
        if counts.get("hit_bytes") and not counts.get("hits"):
            wrong.append("hit_bytes")
        if wrong:
            raise InvariantError(f"storage counters {wrong} are wrong: {counts}")
