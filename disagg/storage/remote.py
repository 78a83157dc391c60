"""A storage on a Redis or Valkey server, which several machines share. The server evicts by its own policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from disagg.core.clock import Clock
from disagg.core.errors import ConfigError
from disagg.core.log import get_logger
from disagg.storage.batch import PageBatch
from disagg.storage.bounce import BounceBuffers, copy
from disagg.storage.breaker import Breaker, PauseSettings
from disagg.storage.contract import StorageStatistics, require_batch
from disagg.storage.counters import Counters
from disagg.storage.io_threads import IOThreads, Task
from disagg.storage.record import HEADER_BYTES, RecordHeader, content_of
from disagg.storage.redis_client import RedisClient, StorageServerError

log = get_logger(__name__)

_CHUNK_BYTES = 1 << 20
"""Largest total size of the pages in one command or pipeline; a single page may be larger. The client parses one
reply of 4 MiB four times slower than four replies of 1 MiB."""
_CHUNK_KEYS = 512
"""Largest number of keys in one command or pipeline."""
_LARGEST_BYTES = 512 << 20
"""Largest value of a Redis server in its default settings (`proto-max-bulk-len`)."""

_Work = Callable[[PageBatch, range, Sequence[bytes], Sequence[bytes]], bool]
"""Function that does the I/O for some pages of a batch. Returns whether the server works, that is, has memory left;
raises `StorageServerError` for other faults."""


@dataclass(frozen=True)
class RemoteSettings:
    """Settings of a storage on a server."""

    url: str
    """`redis://HOST:PORT/DB`, `rediss://` for TLS, `unix:///PATH`; may contain user and password."""
    threads: int = 4
    """Number of I/O threads for reads, each with a connection, and of as many separate threads for writes."""
    server_timeout_s: float = 2.0
    """Time limit of connecting, and of a send or receive without progress. A dead server blocks a thread for at most
    this time."""
    expire_s: int = 0
    """Time after which the server removes a page, unless the page is put again; 0: never."""
    prefix: bytes = b"disagg:"
    """Prefix of all keys on the server."""
    pause: PauseSettings = field(default_factory=PauseSettings)

    def __post_init__(self) -> None:
        """Raises `ConfigError` for values out of range."""
        if self.threads < 1 or self.server_timeout_s <= 0 or self.expire_s < 0:
            raise ConfigError(
                f"a Redis storage needs a thread or more and a timeout above 0, not {self.threads} threads, "
                f"{self.server_timeout_s:g} s and an expiry of {self.expire_s} s"
            )


class RemoteStorage:
    """A `PageStorage` on a Redis or Valkey server. Connects on demand, so the server may start later."""

    def __init__(self, settings: RemoteSettings, clock: Clock = time.monotonic) -> None:
        """`clock` times pauses. Raises `ConfigError` for a malformed URL, or if the `redis` package is missing."""
        self._client = RedisClient(settings.url, settings.server_timeout_s, settings.expire_s)
        self._name = _name_of(settings.url)
        self._prefix = settings.prefix
        self._counters = Counters()
        self._reads = Breaker(f"{self._name} reads", self._counters, settings.pause, clock)
        self._writes = Breaker(f"{self._name} writes", self._counters, settings.pause, clock)
        self._readers = IOThreads("storage-read", settings.threads)
        self._writers = IOThreads("storage-write", settings.threads)
        self._buffers = BounceBuffers()
        self._closed = threading.Event()

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """See `PageStorage.put`."""
        require_batch(keys, pages, writable=False)
        batch = PageBatch(len(keys), pages)
        tasks = [
            partial(self._guarded, self._write, batch, chunk, keys, self._writes)
            for chunk in _chunks([page.nbytes for page in pages], self._writers.count)
        ]
        results = self._run(batch, tasks, self._writers, self._writes, timeout_s)
        self._counters.add_put(results)
        return results

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """See `PageStorage.get`."""
        require_batch(keys, into, writable=True)
        batch = PageBatch(len(keys), into)
        tasks = [
            partial(self._guarded, self._read, batch, chunk, keys, self._reads)
            for chunk in _chunks([page.nbytes for page in into], self._readers.count)
        ]
        results = self._run(batch, tasks, self._readers, self._reads, timeout_s)
        self._counters.add_get(into, results)
        return results

    def exists(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """See `PageStorage.exists`. Queries the server."""
        require_batch(keys, None, writable=False)
        batch = PageBatch(len(keys))
        tasks = [
            partial(self._guarded, self._look, batch, chunk, keys, self._reads)
            for chunk in _chunks([0] * len(keys), 1)
        ]
        return self._run(batch, tasks, self._readers, self._reads, timeout_s)

    def statistics(self) -> StorageStatistics:
        """See `PageStorage.statistics`."""
        return self._counters.statistics(0, 0, paused=self._reads.paused or self._writes.paused)

    def check(self) -> None:
        """See `PageStorage.check`."""
        self._counters.check()
        self._reads.check()
        self._writes.check()

    def close(self) -> None:
        """See `PageStorage.close`."""
        if self._closed.is_set():
            return
        self._closed.set()
        for threads in (self._readers, self._writers):
            threads.close(timeout_s=1.0)
        self._client.close()  # threads that wait for a hung server get an error, and end

    def _run(
        self, batch: PageBatch, tasks: Sequence[Task], threads: IOThreads, breaker: Breaker, timeout_s: float
    ) -> list[bool]:
        """Runs a call's tasks on I/O threads, unless calls are skipped; returns the result of each page."""
        count = batch.count
        if not count:
            return []
        if self._closed.is_set() or not breaker.admit():
            self._counters.add(skipped=count)
            batch.wait(0)
            return [False] * count
        for task in tasks:
            threads.submit(task)
        return breaker.wait_for(batch, timeout_s)

    def _guarded(
        self, work: _Work, batch: PageBatch, chunk: range, keys: Sequence[bytes], breaker: Breaker
    ) -> None:
        """Runs one task. Pages without a result become misses, even if the task fails."""
        try:
            if batch.is_open and work(batch, chunk, [self._prefix + keys[i] for i in chunk], keys):
                breaker.succeeded()
        except StorageServerError as exc:
            self._counters.add(errors=1)
            breaker.failed(str(exc))
        finally:
            for i in chunk:
                batch.settle(i, landed=False)

    def _read(self, batch: PageBatch, chunk: range, names: Sequence[bytes], keys: Sequence[bytes]) -> bool:
        corrupt: list[bytes] = []
        for i, name, value in zip(chunk, names, self._client.read(names), strict=True):
            if value is None:
                continue
            content = content_of(memoryview(value), keys[i])
            if content is None:
                corrupt.append(name)
                continue
            if batch.sizes_bytes[i] != len(content):
                self._counters.add(refused=1)
                batch.settle(i, landed=False)
            elif not batch.land(i, content):
                break
        if corrupt:
            self._counters.add(corrupt=len(corrupt))
            log.warning("storage_page_corrupt", storage=self._name, pages=len(corrupt))
            self._client.remove(corrupt)
        return True

    def _write(self, batch: PageBatch, chunk: range, names: Sequence[bytes], keys: Sequence[bytes]) -> bool:
        there = self._client.touch(names)
        records: dict[int, memoryview] = {}
        sizes = [batch.sizes_bytes[i] for i in chunk]
        buffer = self._buffers.take(sum(HEADER_BYTES + size for size in sizes))
        place = 0
        for i, size, stored in zip(chunk, sizes, there, strict=True):
            if stored:
                batch.settle(i, landed=True)
                continue
            if HEADER_BYTES + size > _LARGEST_BYTES:
                self._counters.add(refused=1)
                continue
            record = buffer[place : place + HEADER_BYTES + size]
            with batch.memory(i) as page:
                if page is None:
                    return True
                copy(record[HEADER_BYTES:], page)
            record[:HEADER_BYTES] = RecordHeader.of(keys[i], record[HEADER_BYTES:]).packed()
            records[i] = record
            place += len(record)
        written, full = self._client.write([self._prefix + keys[i] for i in records], list(records.values()))
        for i, landed in zip(records, written, strict=True):
            self._counters.add(put_bytes=(len(records[i]) - HEADER_BYTES) * landed)
            batch.settle(i, landed=landed)
        if full:
            self._counters.add(full=written.count(False))
            self._writes.failed("the server has no memory left (`maxmemory`)", at_once=True)
        return not full

    def _look(self, batch: PageBatch, chunk: range, names: Sequence[bytes], keys: Sequence[bytes]) -> bool:
        for i, found in zip(chunk, self._client.exists(names), strict=True):
            batch.settle(i, landed=found)
        return True


def _name_of(url: str) -> str:
    """Returns the server's address for logs, without user and password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"


def _chunks(sizes_bytes: Sequence[int], least: int) -> list[range]:
    """Splits the pages of a call into ranges for the threads: at least `least` ranges if there are enough pages."""
    most_pages = min(_CHUNK_KEYS, max(1, -(-len(sizes_bytes) // least)))
    chunks: list[range] = []
    first, total_bytes = 0, 0
    for i, size in enumerate(sizes_bytes):
        if i > first and (i - first == most_pages or total_bytes + size > _CHUNK_BYTES):
            chunks.append(range(first, i))
            first, total_bytes = i, 0
        total_bytes += size
    if first < len(sizes_bytes):
        chunks.append(range(first, len(sizes_bytes)))
    return chunks
