"""A storage in this process's memory: the reference of the conformance tests, and a test double."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from disagg.core.errors import InvariantError
from disagg.storage.bounce import copy
from disagg.storage.contract import StorageStatistics, require_batch
from disagg.storage.counters import Counters
from disagg.storage.record import RecordHeader, content_of


class MemoryStorage:
    """Keeps records in a dictionary, and evicts the least recently used records. Copies on the calling thread."""

    def __init__(self, capacity_bytes: int) -> None:
        """`capacity_bytes`: limit of the total size of all records, including their headers."""
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, bytearray] = OrderedDict()
        self._stored_bytes = 0
        self._counters = Counters()
        self._closed = False

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """See `PageStorage.put`."""
        require_batch(keys, pages, writable=False)
        with self._lock:
            results = [
                self._put(key, memoryview(page.tobytes())) for key, page in zip(keys, pages, strict=True)
            ]
        self._counters.add_put(results)
        return results

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """See `PageStorage.get`."""
        require_batch(keys, into, writable=True)
        with self._lock:
            results = [self._get(key, page) for key, page in zip(keys, into, strict=True)]
        self._counters.add_get(into, results)
        return results

    def exists(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """See `PageStorage.exists`."""
        require_batch(keys, None, writable=False)
        with self._lock:
            return [key in self._records for key in keys]

    def records(self) -> dict[bytes, bytearray]:
        """Returns the records themselves, header and content by key, so that tests can damage them."""
        return dict(self._records)

    def statistics(self) -> StorageStatistics:
        """See `PageStorage.statistics`."""
        with self._lock:
            return self._counters.statistics(len(self._records), self._stored_bytes, paused=False)

    def check(self) -> None:
        """See `PageStorage.check`."""
        self._counters.check()
        with self._lock:
            stored_bytes = sum(map(len, self._records.values()))
            if stored_bytes != self._stored_bytes or stored_bytes > self._capacity_bytes:
                raise InvariantError(
                    f"memory storage: {stored_bytes} bytes, counted {self._stored_bytes} of {self._capacity_bytes}"
                )

    def close(self) -> None:
        """See `PageStorage.close`."""
        with self._lock:
            self._closed = True
            self._records.clear()
            self._stored_bytes = 0

    def _put(self, key: bytes, page: memoryview) -> bool:
        if self._closed:
            self._counters.add(skipped=1)
            return False
        if key in self._records:
            self._records.move_to_end(key)
            return True
        header = RecordHeader.of(key, page)
        if header.record_bytes > self._capacity_bytes:
            self._counters.add(refused=1)
            return False
        while self._stored_bytes + header.record_bytes > self._capacity_bytes:
            _, evicted = self._records.popitem(last=False)
            self._stored_bytes -= len(evicted)
            self._counters.add(evicted_pages=1)
        self._records[key] = bytearray(header.packed()) + page
        self._stored_bytes += header.record_bytes
        self._counters.add(put_bytes=page.nbytes)
        return True

    def _get(self, key: bytes, page: memoryview) -> bool:
        if self._closed:
            self._counters.add(skipped=1)
            return False
        record = self._records.get(key)
        if record is None:
            return False
        content = content_of(memoryview(record), key)
        if content is None:
            self._stored_bytes -= len(self._records.pop(key))
            self._counters.add(corrupt=1)
            return False
        if content.nbytes != page.nbytes:
            self._counters.add(refused=1)
            return False
        self._records.move_to_end(key)
        copy(page, content)
        return True
