"""Reads records from segments into the memory of callers, and drops records that do not verify."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from disagg.core.log import get_logger
from disagg.storage.batch import PageBatch
from disagg.storage.bounce import BounceBuffers, aligned
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


class StoredPage(NamedTuple):
    """A page that a call wants, and where it was found."""

    place: int
    """Index of the page in the batch of the call."""
    key: bytes
    location: Location

    @property
    def end_bytes(self) -> int:
        """End of the page's record in its segment, padding included: offset of the next record."""
        return self.location.offset_bytes + aligned(HEADER_BYTES + self.location.length_bytes)


def runs_of(pages: Sequence[StoredPage], most_bytes: int) -> list[list[StoredPage]]:
    """Groups pages, sorted by segment and offset, whose records follow each other without gaps in one segment.

    One read moves a run. A run has at most `most_bytes` bytes, or one page.
    """
    runs: list[list[StoredPage]] = []
    for page in pages:
        run = runs[-1] if runs else []
        if (
            run
            and run[-1].location.segment is page.location.segment
            and run[-1].end_bytes == page.location.offset_bytes
            and page.end_bytes - run[0].location.offset_bytes <= most_bytes
        ):
            run.append(page)
        else:
            runs.append([page])
    return runs


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

    def read(self, batch: PageBatch, run: Sequence[StoredPage]) -> None:
        """Reads a run of pages (`runs_of`) into the caller's memory, with one read if it succeeds. Raises no error.

        Each page that does not land then is searched and read alone: it may have moved, or another page of the run
        may have failed.
        """
        file = _OpenFile(self._disk, os.O_RDONLY | self._direct)
        try:
            rest = self._read_run(batch, run, file) if len(run) > 1 and batch.is_open else run
            for page in rest:
                if not batch.is_open:
                    return
                batch.settle(page.place, landed=self._find_and_read(batch, page.place, page.key, file))
        finally:
            file.close()

    def _read_run(self, batch: PageBatch, run: Sequence[StoredPage], file: _OpenFile) -> Sequence[StoredPage]:
        """Reads a run with one read; returns the pages that have not landed."""
        start_bytes = run[0].location.offset_bytes
        records = self._buffers.take(run[-1].end_bytes - start_bytes)
        try:
            count = self._disk.read(file.of(run[0].location.segment), records, start_bytes)
        except OSError:  # counted for the page that fails alone
            return run
        self._breaker.succeeded()
        rest: list[StoredPage] = []
        for page in run:
            record = records[
                page.location.offset_bytes - start_bytes : min(count, page.end_bytes - start_bytes)
            ]
            content = content_of(record, page.key)
            if content is None or content.nbytes != page.location.length_bytes:
                rest.append(page)
            elif batch.land(page.place, content):
                page.location.used = True
            else:
                return ()  # the call has ended
        return rest

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
        if not batch.land(place, content):
            return False
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
