"""Two storages as one: the memory of peers in front of files or a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields

from disagg.storage.contract import PageStorage, StorageStatistics, require_batch

FIRST_SHARE = 0.5
"""Largest part of a call's time limit that the first storage may use. The rest is left for the second storage."""


class LayeredStorage:
    """A `PageStorage` that reads from `first`, and what `first` lacks from `second`. Writes go to `second` alone."""

    def __init__(self, first: PageStorage, second: PageStorage) -> None:
        self._first, self._second = first, second

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """See `PageStorage.put`."""
        return self._second.put(keys, pages, timeout_s)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """See `PageStorage.get`."""
        require_batch(keys, into, writable=True)
        ends_s = time.monotonic() + timeout_s
        results = self._first.get(keys, into, timeout_s * FIRST_SHARE)
        missing = [i for i, landed in enumerate(results) if not landed]
        if missing:
            left_s = max(0.0, ends_s - time.monotonic())
            found = self._second.get([keys[i] for i in missing], [into[i] for i in missing], left_s)
            for i, landed in zip(missing, found, strict=True):
                results[i] = landed
        return results

    def exists(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """See `PageStorage.exists`."""
        require_batch(keys, None, writable=False)
        ends_s = time.monotonic() + timeout_s
        results = self._first.exists(keys, timeout_s * FIRST_SHARE)
        missing = [i for i, found in enumerate(results) if not found]
        if missing:
            left_s = max(0.0, ends_s - time.monotonic())
            second = self._second.exists([keys[i] for i in missing], left_s)
            for i, found in zip(missing, second, strict=True):
                results[i] = found
        return results

    def statistics(self) -> StorageStatistics:
        """Returns the sums over both storages. Only a page that neither storage delivers counts as a miss."""
        first, second = self._first.statistics(), self._second.statistics()
        names = [one.name for one in fields(StorageStatistics)]
        sums = {name: getattr(first, name) + getattr(second, name) for name in names}
        return StorageStatistics(**{**sums, "misses": second.misses, "paused": first.paused or second.paused})

    def check(self) -> None:
        """See `PageStorage.check`."""
        self._first.check()
        self._second.check()

    def close(self) -> None:
        """See `PageStorage.close`."""
        self._first.close()
        self._second.close()
