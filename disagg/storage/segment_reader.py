"""Reads records from segments into the memory of callers, and drops records that do not verify."""

from __future__ import annotations

import os
from collections.abc import Sequence

from disagg.core.log import get_logger
from disagg.storage.batch import PageBatch
from disagg.storage.bounce import BounceBuffers, aligned, copy
from disagg.storage.breaker import Breaker
from disagg.storage.counters import Counters
from disagg.storage.disk import Disk
from disagg.storage.record import HEADER_BYTES, content_of
from disagg.storage.segment import Location, SegmentFile
from disagg.storage.segment_folder import SegmentFolder

log = get_logger(__name__)

_TRIES = 2
"""Number of attempts to find and read a page. A page can move before the read: eviction writes used pages to another
segment, then removes their old segment."""


class _OpenFile:
    """The open file of a read task. The task has at most one segment open at a time."""

    def __init__(self, disk: Disk, flags: int) -> None:
        self._disk, self._flags = disk, flags
        self._segment: SegmentFile | None = None
        self._descriptor = -1

    def of(self, segment: SegmentFile) -> int:
        """Opens `segment` unless open; returns its descriptor, valid until the next call. Raises `OSError`."""
        if self._segment is not segment:
            self.close()
            self._descriptor = self._disk.open(segment.path, self._flags)
            self._segment = segment
        return self._descriptor

    def close(self) -> None:
        """Closes the descriptor."""
        if self._segment is not None:
            self._segment = None
            self._disk.close(self._descriptor)


class SegmentReader:
    """Reads pages on the calling thread, which is one of the storage's read threads. Thread-safe."""

    def __init__(
        self, folder: SegmentFolder, disk: Disk, counters: Counters, breaker: Breaker, direct: int
    ) -> None:
        """`direct`: open flag `O_DIRECT`, or 0."""
        self._folder, self._index, self._disk = folder, folder.index, disk
        self._counters, self._breaker, self._direct = counters, breaker, direct
        self._buffers = BounceBuffers()

    def read(self, batch: PageBatch, pages: Sequence[tuple[int, bytes]]) -> None:
        """Reads pages into the caller's memory. `pages`: (index in the batch, key) of each page. Raises no error."""
        file = _OpenFile(self._disk, os.O_RDONLY | self._direct)
        try:
            for place, key in pages:
                if not batch.is_open:
                    return
                batch.settle(place, landed=self._find_and_read(batch, place, key, file))
        finally:
            file.close()

    def _find_and_read(self, batch: PageBatch, place: int, key: bytes, file: _OpenFile) -> bool:
        for _ in range(_TRIES):
            location = self._index.find(key)
            if location is None:
                return False
            try:
                landed = self._read_one(batch, place, key, location, file)
            except FileNotFoundError:
                self._folder.vanished(location.segment)
            except OSError as exc:
                self._counters.add(errors=1)
                self._breaker.failed(exc.strerror or str(exc))
                return False
            else:
                self._breaker.succeeded()
                return landed
        return False

    def _read_one(
        self, batch: PageBatch, place: int, key: bytes, location: Location, file: _OpenFile
    ) -> bool:
        record = self._buffers.take(aligned(HEADER_BYTES + location.length_bytes))
        count = self._disk.read(file.of(location.segment), record, location.offset_bytes)
        content = content_of(record[:count], key)
        if content is None or content.nbytes != location.length_bytes:
            self._drop(key, location)
            return False
        with batch.memory(place) as page:
            if page is None:
                return False
            copy(page, content)
        location.used = True
        return True

    def _drop(self, key: bytes, location: Location) -> None:
        """Drops a page that fails verification. Also removes the page from the side index, for later starts."""
        if not self._index.drop(key, location):
            return
        self._counters.add(corrupt=1)
        segment = location.segment
        log.warning("storage_page_corrupt", storage=str(self._folder.path), file=segment.path.name)
        if segment.owned and segment.sealed:
            try:
                self._folder.write_index(segment)
            except OSError:
                self._counters.add(errors=1)
