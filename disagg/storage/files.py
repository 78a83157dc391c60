"""A storage in local files: segments of many pages, read and written by I/O threads, with direct I/O if possible.

Writes are not synced. After a power failure, some pages are lost, and partly written pages fail verification. If only
the process dies, every page that `put` had reported as stored is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from disagg.core.clock import Clock
from disagg.core.errors import ConfigError
from disagg.core.log import get_logger
from disagg.storage.appender import LEAST_SEGMENTS, Appender
from disagg.storage.batch import PageBatch
from disagg.storage.bounce import ALIGNMENT, BounceBuffers, aligned, copy
from disagg.storage.breaker import Breaker, PauseSettings
from disagg.storage.contract import StorageStatistics, require_batch
from disagg.storage.counters import Counters
from disagg.storage.disk import NO_SPACE, Disk, direct_flag
from disagg.storage.io_threads import IOThreads
from disagg.storage.page_index import PageIndex
from disagg.storage.record import HEADER_BYTES, RecordHeader
from disagg.storage.segment import Location
from disagg.storage.segment_folder import SegmentFolder
from disagg.storage.segment_reader import SegmentReader, StoredPage, runs_of

log = get_logger(__name__)

CLOSE_TIMEOUT_S = 3.0
"""Longest wait of `close` for running reads, and for running writes."""
_RUN_BYTES = 1 << 20
"""Largest size of the neighbouring pages that one read moves; a single page may be larger. A thread copies the pages
of a read while other threads read, so a read of all pages of a call would leave the disk idle meanwhile."""


@dataclass(frozen=True)
class FileSettings:
    """Settings of a file storage."""

    folder: Path
    capacity_bytes: int
    """Limit of this process's segments. Each process that shares the folder has its own limit."""
    segment_bytes: int = 64 << 20
    threads: int = 8
    """Number of I/O threads for reads; the same number of other threads writes, so that writes never delay reads."""
    direct: bool = True
    """Whether to bypass the page cache, which would hold a second copy of each page. Ignored if the file system has
    no direct I/O."""
    refresh_s: float = 5.0
    """Interval between searches for segments of other processes. 0: search only at the start and in `refresh`."""
    pause: PauseSettings = field(default_factory=PauseSettings)

    def __post_init__(self) -> None:
        """Raises `ConfigError` for an invalid segment size, a capacity below `LEAST_SEGMENTS` segments, or no
        thread."""
        if self.segment_bytes < 4 * ALIGNMENT or self.segment_bytes % (2 * ALIGNMENT):
            raise ConfigError(
                f"a segment of {self.segment_bytes} bytes: give a multiple of {2 * ALIGNMENT}, at least "
                f"{4 * ALIGNMENT}"
            )
        if self.capacity_bytes < LEAST_SEGMENTS * self.segment_bytes or self.threads < 1:
            raise ConfigError(
                f"a file storage needs {LEAST_SEGMENTS} segments of {self.segment_bytes} bytes and a thread, not "
                f"{self.capacity_bytes} bytes and {self.threads} threads: raise the limit, or use smaller segments"
            )


class FileStorage:
    """A `PageStorage` in the segment files of a folder. All processes that open the folder share its pages."""

    def __init__(
        self, settings: FileSettings, disk: Disk | None = None, clock: Clock = time.monotonic
    ) -> None:
        """Opens the folder and reads its indexes on the calling thread. `clock` times pauses.

        Raises `ConfigError` if the folder is not usable.
        """
        self._settings, self._disk = settings, disk or Disk()
        self._counters, self._index = Counters(), PageIndex()
        try:
            settings.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            direct = direct_flag(settings.folder) if settings.direct else 0
            self._folder = SegmentFolder(settings.folder, self._disk, self._index, self._counters)
            self._appender = Appender(
                self._folder,
                self._disk,
                self._counters,
                settings.segment_bytes,
                settings.capacity_bytes,
                direct,
            )
        except OSError as exc:
            raise self._unusable(exc) from exc
        try:
            self._folder.refresh()
            self._appender.trim()
        except OSError as exc:
            self._folder.close()
            raise self._unusable(exc) from exc
        self.direct = bool(direct)
        """Whether the page cache is bypassed."""
        name = str(settings.folder)
        self._reads = Breaker(f"{name} reads", self._counters, settings.pause, clock)
        self._writes = Breaker(f"{name} writes", self._counters, settings.pause, clock)
        self._reader = SegmentReader(self._folder, self._disk, self._counters, self._reads, direct)
        self._readers = IOThreads("storage-read", settings.threads)
        self._writers = IOThreads("storage-write", settings.threads)
        self._buffers = BounceBuffers()
        self._closed = threading.Event()
        self._refresher = threading.Thread(target=self._refresh_often, name="storage-refresh", daemon=True)
        if settings.refresh_s:
            self._refresher.start()

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """See `PageStorage.put`. The largest page is half a segment, header included."""
        require_batch(keys, pages, writable=False)
        results = [self._use(key) for key in keys]
        missing = self._admitted([i for i, stored in enumerate(results) if not stored], self._writes)
        batch = PageBatch(len(missing), [pages[i] for i in missing])
        for place, i in enumerate(missing):
            self._writers.submit(partial(self._write, batch, place, keys[i], pages[i].nbytes))
        for i, landed in zip(missing, self._writes.wait_for(batch, timeout_s), strict=True):
            results[i] = landed
        self._counters.add_put(results)
        return results

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """See `PageStorage.get`."""
        require_batch(keys, into, writable=True)
        pages: dict[int, StoredPage] = {}
        for i, (key, memory) in enumerate(zip(keys, into, strict=True)):
            location = self._index.find(key)
            if location is not None and self._has_length(location, memory):
                pages[i] = StoredPage(i, key, location)
        wanted = self._admitted(sorted(pages, key=lambda i: _order(pages[i].location)), self._reads)
        batch = PageBatch(len(wanted), [into[i] for i in wanted])
        found = [pages[i]._replace(place=place) for place, i in enumerate(wanted)]
        share_bytes = sum(aligned(HEADER_BYTES + one.location.length_bytes) for one in found)
        for run in runs_of(found, min(_RUN_BYTES, share_bytes // self._readers.count)):
            self._readers.submit(partial(self._reader.read, batch, run))
        results = [False] * len(keys)
        for i, landed in zip(wanted, self._reads.wait_for(batch, timeout_s), strict=True):
            results[i] = landed
        self._counters.add_get(into, results)
        return results

    def exists(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """See `PageStorage.exists`. Uses only the index in memory."""
        require_batch(keys, None, writable=False)
        closed = self._closed.is_set()
        return [not closed and self._index.find(key) is not None for key in keys]

    def refresh(self) -> None:
        """Searches for segments of other processes, on the calling thread. Raises no error.

        Adopts segments of dead processes; evicts the oldest owned segments beyond the limit.
        """
        try:
            self._folder.refresh()
            self._appender.trim()
        except OSError as exc:
            self._counters.add(errors=1)
            storage = str(self._settings.folder)
            log.warning("storage_folder_unreadable", storage=storage, reason=exc.strerror)

    def statistics(self) -> StorageStatistics:
        """See `PageStorage.statistics`."""
        pages, stored_bytes = self._index.totals()
        paused = self._reads.paused or self._writes.paused
        return self._counters.statistics(pages, stored_bytes, paused=paused)

    def check(self) -> None:
        """See `PageStorage.check`."""
        self._counters.check()
        self._reads.check()
        self._writes.check()
        self._appender.check()
        self._index.check(self._folder.segments())

    def close(self) -> None:
        """See `PageStorage.close`. Seals the live segment and unlocks all segments for adoption."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._refresher.is_alive():
            self._refresher.join(CLOSE_TIMEOUT_S)
        self._readers.close(CLOSE_TIMEOUT_S)
        if self._writers.close(CLOSE_TIMEOUT_S):
            self._appender.close()
            self._folder.close()
        # Otherwise writes hang. The locks stay until the process ends, because no other process may adopt a segment
        # that is being written.

    def _unusable(self, exc: OSError) -> ConfigError:
        return ConfigError(f"the storage folder {self._settings.folder} is not usable: {exc.strerror}")

    def _use(self, key: bytes) -> bool:
        place = None if self._closed.is_set() else self._index.find(key)
        if place is not None:
            place.used = True
        return place is not None

    def _has_length(self, place: Location, page: memoryview) -> bool:
        same = place.length_bytes == page.nbytes
        if not same:
            self._counters.add(refused=1)
        return same

    def _admitted(self, wanted: list[int], breaker: Breaker) -> list[int]:
        """Returns `wanted`, or an empty list while calls are skipped."""
        if not wanted or (not self._closed.is_set() and breaker.admit()):
            return wanted
        self._counters.add(skipped=len(wanted))
        return []

    def _write(self, batch: PageBatch, place: int, key: bytes, nbytes: int) -> None:
        """Stores one page. Runs on a write thread."""
        padded = aligned(HEADER_BYTES + nbytes)
        if padded > self._settings.segment_bytes // 2:
            self._counters.add(refused=1)
            batch.settle(place, landed=False)
            return
        record = self._buffers.take(padded)
        content = record[HEADER_BYTES : HEADER_BYTES + nbytes]
        with batch.memory(place) as page:
            if page is None:
                return
            copy(content, page)
        header = RecordHeader.of(key, content)
        record[:HEADER_BYTES] = header.packed()
        record[HEADER_BYTES + nbytes :] = bytes(padded - HEADER_BYTES - nbytes)
        try:
            self._appender.append(header, record)
        except OSError as exc:
            full = exc.errno in NO_SPACE
            self._counters.add(full=full, errors=not full)
            self._writes.failed(exc.strerror or str(exc), at_once=full)
            batch.settle(place, landed=False)
            return
        self._writes.succeeded()
        self._counters.add(put_bytes=nbytes)
        batch.settle(place, landed=True)

    def _refresh_often(self) -> None:
        while not self._closed.wait(self._settings.refresh_s):
            self.refresh()


def _order(place: Location) -> tuple[str, int]:
    """Returns the sort key of a read: segment by segment, forward in each."""
    return place.segment.path.name, place.offset_bytes
