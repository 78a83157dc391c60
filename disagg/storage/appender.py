"""Appends records to the segments of this process, and evicts the oldest segments.

Eviction is first in, first out, with a second chance: pages of the evicted segment that were used since they were
written are written again, at most half a segment of them. Eviction by latest use would instead keep a whole segment
for one page that all prompts share (a system prompt), with all the pages that no prompt reads again.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass

from disagg.core.errors import InvariantError
from disagg.core.log import get_logger
from disagg.storage.bounce import BounceBuffers, aligned
from disagg.storage.counters import Counters
from disagg.storage.disk import NO_SPACE, Disk
from disagg.storage.record import HEADER_BYTES, RecordHeader, content_of
from disagg.storage.segment import Entry, Location, SegmentFile
from disagg.storage.segment_folder import LOCK_TIMEOUT_S, SegmentFolder

log = get_logger(__name__)

LEAST_SEGMENTS = 3
"""Smallest number of segments: one to append to, one to evict, one to keep."""


@dataclass(eq=False, slots=True)
class _Live:
    """The segment to which records are appended."""

    segment: SegmentFile
    descriptor: int
    """Open descriptor of the segment file; closed when the segment is sealed."""
    pending: int = 0
    """Number of writes under way."""
    full: bool = False
    """Whether no further record is appended; the last pending write seals the segment."""


class Appender:
    """Appends records to segments. Thread-safe: several threads can write to one segment at the same time."""

    def __init__(
        self,
        folder: SegmentFolder,
        disk: Disk,
        counters: Counters,
        segment_bytes: int,
        capacity_bytes: int,
        direct: int,
    ) -> None:
        """`capacity_bytes`: limit of owned segments, `LEAST_SEGMENTS` x `segment_bytes` or more. `direct`: open flag
        `O_DIRECT`, or 0."""
        self._folder, self._index, self._disk, self._counters = folder, folder.index, disk, counters
        self._segment_bytes, self._capacity_bytes, self._direct = segment_bytes, capacity_bytes, direct
        self._segments = capacity_bytes // segment_bytes
        self._lock = threading.Lock()
        self._live: _Live | None = None
        self._buffers = BounceBuffers()
        """Buffers for records that eviction writes again. The record being appended is in another buffer."""

    def append(self, header: RecordHeader, record: memoryview) -> None:
        """Writes a record, padded to the alignment, into the live segment. Raises `OSError`.

        The page enters the index after the write has returned, so no reader sees a half-written record.
        """
        with self._lock:
            live = self._live_for(len(record))
            offset = live.segment.end_bytes
            live.segment.end_bytes += len(record)
            live.pending += 1
        written = False
        try:
            self._disk.write(live.descriptor, record, offset)
            self._index.add(live.segment, [Entry(header.key, offset, header.length_bytes)])
            written = True
        finally:
            with self._lock:
                live.pending -= 1
                # A failed write leaves a hole. Readers in other processes do not scan beyond a hole.
                live.full |= not written
                self._seal_if_done(live)

    def trim(self) -> None:
        """Evicts adopted segments beyond the limit, the oldest first. Raises `OSError`."""
        with self._lock:
            while self._full:
                self._evict_oldest(into=None)

    def close(self) -> None:
        """Seals the live segment, unless one of its writes hangs. Raises no error."""
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            return  # an eviction hangs; the next process scans the headers of the live segment
        try:
            if self._live is not None:
                self._live.full = True
                self._seal_if_done(self._live)
        finally:
            self._lock.release()

    def check(self) -> None:
        """Raises `InvariantError` if too many segments are owned, or if the live segment is too long or sealed."""
        with self._lock:
            owned, live = self._folder.owned(), self._live
            nbytes = sum(map(self._reserved_bytes, owned))
            if len(owned) > self._segments or nbytes > self._capacity_bytes:
                limits = f"{self._segments} and {self._capacity_bytes}"
                raise InvariantError(
                    f"{len(owned)} segments of {nbytes} bytes are owned, the limits are {limits}"
                )
            if live is not None and (live.segment.end_bytes > self._segment_bytes or live.segment.sealed):
                raise InvariantError(f"the live segment ends at {live.segment.end_bytes}: {live}")

    @property
    def _full(self) -> bool:
        """Whether a further segment would exceed the limit.

        Adopted segments of a process with other settings can be longer than `segment_bytes`.
        """
        owned = self._folder.owned()
        nbytes = sum(map(self._reserved_bytes, owned)) + self._segment_bytes
        return len(owned) >= self._segments or nbytes > self._capacity_bytes

    def _reserved_bytes(self, segment: SegmentFile) -> int:
        return segment.end_bytes if segment.sealed else max(segment.end_bytes, self._segment_bytes)

    def _live_for(self, nbytes: int) -> _Live:
        """Returns the live segment, with room for `nbytes`; creates a new one, and evicts the oldest, if needed."""
        live = self._live
        if live is not None and not live.full:
            if self._disk.is_removed(live.descriptor):  # by an operator: appended records would be lost
                self._folder.vanished(live.segment)
            if not live.segment.gone and live.segment.end_bytes + nbytes <= self._segment_bytes:
                return live
            live.full = True
            self._seal_if_done(live)
        while self._full:
            self._evict_oldest(into=None)
        try:
            live = self._created()
        except OSError as exc:
            if exc.errno not in NO_SPACE:
                raise
            self._evict_oldest(into=None)  # the disk is full: a cache must make room
            live = self._created()
        self._live = live
        # At the limit, the oldest segment is evicted now, while the new one has room for its used pages.
        if self._full:
            self._evict_oldest(into=live)
        return live  # used pages fill at most half of the segment, so the record fits in the other half

    def _created(self) -> _Live:
        segment = self._folder.new_segment()
        descriptor = -1
        try:
            descriptor = self._disk.open(segment.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | self._direct)
            self._disk.allocate(descriptor, self._segment_bytes)
        except OSError:
            if descriptor >= 0:
                self._disk.close(descriptor)
            self._folder.discard(segment)
            raise
        return _Live(segment, descriptor)

    def _seal_if_done(self, live: _Live) -> None:
        """Seals a full segment without pending writes: frees unused space, writes the side index.

        Removes a segment without pages, whose writes have all failed. Otherwise a disk that refuses writes would fill
        the limit with such segments, and evict all pages.
        """
        if not live.full or live.pending or live.segment.sealed:
            return
        live.segment.sealed = True
        if self._live is live:
            self._live = None
        try:
            if not live.segment.gone and not self._index.locations_in(live.segment):
                self._folder.discard(live.segment)
                return
            self._disk.truncate(live.descriptor, live.segment.end_bytes)
            if not live.segment.gone:
                self._folder.write_index(live.segment)
        except OSError as exc:  # the next start scans the headers instead
            self._counters.add(errors=1)
            name, reason = live.segment.path.name, exc.strerror
            storage = str(self._folder.path)
            log.warning("storage_index_not_written", storage=storage, file=name, reason=reason)
        finally:
            self._disk.close(live.descriptor)

    def _evict_oldest(self, into: _Live | None) -> None:
        """Removes the oldest sealed segment; first writes its used pages to the segment `into`, if given."""
        victims = [segment for segment in self._folder.owned() if segment.sealed]
        if not victims:
            raise OSError(errno.ENOSPC, "no segment can be evicted: writes hang in all of them")
        if into is not None:
            try:
                self._keep_used(victims[0], into)
            except OSError as exc:  # the used pages are lost, like the unused ones
                into.full = True  # as in `append`; the record for which `into` was created is the last one
                self._counters.add(errors=1)
                name, reason = victims[0].path.name, exc.strerror
                storage = str(self._folder.path)
                log.warning("storage_pages_not_kept", storage=storage, file=name, reason=reason)
        self._counters.add(evicted_pages=self._folder.discard(victims[0]))

    def _keep_used(self, victim: SegmentFile, live: _Live) -> None:
        used = [(key, place) for key, place in self._index.locations_in(victim) if place.used]
        if not used:
            return
        source = self._disk.open(victim.path, os.O_RDONLY | self._direct)
        try:
            for key, place in used:
                nbytes = aligned(HEADER_BYTES + place.length_bytes)
                offset = live.segment.end_bytes
                if offset + nbytes > self._segment_bytes // 2:
                    return
                record = self._buffers.take(nbytes)
                self._disk.read(source, record, place.offset_bytes)
                if content_of(record, key) is None:
                    self._counters.add(corrupt=1)
                    continue
                live.segment.end_bytes += nbytes
                self._disk.write(live.descriptor, record, offset)
                moved = self._index.move(key, place, Location(live.segment, offset, place.length_bytes))
                self._counters.add(kept_pages=moved)
        finally:
            self._disk.close(source)
