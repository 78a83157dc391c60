"""The segments of one folder: this process writes its own segments, and reads the segments of all processes."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path

from disagg.core.log import get_logger
from disagg.storage.bounce import ALIGNMENT
from disagg.storage.counters import Counters
from disagg.storage.disk import Disk
from disagg.storage.owners import WriterLocks
from disagg.storage.page_index import PageIndex
from disagg.storage.scan import scan_headers
from disagg.storage.segment import Entry, SegmentFile, index_segment, lock_writer, parse_name, segment_path
from disagg.storage.side_index import read_side_index, write_side_index

log = get_logger(__name__)

LOCK_TIMEOUT_S = 1.0
"""Longest wait of `close` for a lock that a thread on a hung disk may hold."""


class SegmentFolder:
    """Tracks all segments of a folder, and keeps the index up to date. Thread-safe.

    Each process writes segments under its own writer id, and reads the segments of all processes. A process adopts
    segments whose owner is dead, because otherwise no process would evict them.
    """

    def __init__(self, folder: Path, disk: Disk, index: PageIndex, counters: Counters) -> None:
        """Raises `OSError` if the folder cannot be written."""
        self.path = folder
        self.index = index
        self._disk, self._counters = disk, counters
        self._lock = threading.RLock()
        self._segments: dict[str, SegmentFile] = {}
        self._locks = WriterLocks(folder, disk)
        self._number = 0
        self.writer = secrets.token_hex(8)
        while not self._locks.acquire(self.writer):  # another process adopted this id before the lock
            self.writer = secrets.token_hex(8)

    def segments(self) -> list[SegmentFile]:
        """Returns all known segments."""
        with self._lock:
            return list(self._segments.values())

    def owned(self) -> list[SegmentFile]:
        """Returns the segments that this process may evict, the oldest first."""
        with self._lock:
            mine = [segment for segment in self._segments.values() if segment.owned]
        return sorted(mine, key=lambda segment: (segment.modified_s, segment.number))

    def refresh(self) -> None:
        """Searches for new, longer and vanished segments, and adopts segments without an owner. Raises `OSError`.

        A fault of one segment is counted, and the next refresh tries the segment again.
        """
        with self._lock:
            listed = set(self._disk.names(self.path))
            names = {name: found for name in listed if (found := parse_name(name))}
            # An unsealed segment of this process may not have a file yet.
            known = [one for one in self._segments.values() if one.sealed or one.writer != self.writer]
            for segment in known:
                if segment.path.name not in names:
                    self._counters.add(vanished=self._forget(segment))
            self._adopt(listed, {writer for writer, _ in names.values()})
            for name in sorted(names):
                try:
                    self._look_at(name, *names[name])
                except FileNotFoundError:  # its owner evicted it just now
                    if name in self._segments:
                        self._counters.add(vanished=self._forget(self._segments[name]))
                except OSError as exc:
                    self._counters.add(errors=1)
                    reason = exc.strerror
                    log.warning(
                        "storage_segment_unreadable", storage=str(self.path), file=name, reason=reason
                    )

    def new_segment(self) -> SegmentFile:
        """Returns a new segment of this process, without a file yet."""
        with self._lock:
            self._number += 1
            path = segment_path(self.path, self.writer, self._number)
            segment = SegmentFile(path, self.writer, self._number, owned=True, modified_s=time.time())
            self._segments[path.name] = segment
            return segment

    def discard(self, segment: SegmentFile) -> int:
        """Removes an owned segment from the index and from the disk; returns the number of its pages in the index.

        Raises `OSError` if a file could not be removed; the segment has left the index nevertheless.
        """
        with self._lock:
            lost = self._forget(segment)
            self._disk.remove(segment.index_path)
            self._disk.remove(segment.path)
            adopted = segment.writer != self.writer
            if adopted and not any(one.writer == segment.writer for one in self._segments.values()):
                self._locks.release(segment.writer, remove=True)
            return lost

    def vanished(self, segment: SegmentFile) -> None:
        """Removes a segment whose file no longer exists from the index; counts its pages as vanished."""
        with self._lock:
            self._counters.add(vanished=self._forget(segment))

    def write_index(self, segment: SegmentFile) -> None:
        """Writes the side index of an owned segment, to which no more records are appended. Raises `OSError`."""
        with self._lock:
            pages = self.index.locations_in(segment)
            entries = [Entry(key, place.offset_bytes, place.length_bytes) for key, place in pages]
            write_side_index(segment, entries, segment.end_bytes)

    def close(self) -> None:
        """Unlocks the segments, so that the next process adopts them. Raises no error."""
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            return  # the kernel unlocks when the process ends
        try:
            kept = {segment.writer for segment in self._segments.values()}
            for writer in self._locks.held():
                with suppress(OSError):
                    self._locks.release(writer, remove=writer not in kept)
        finally:
            self._lock.release()

    def _adopt(self, listed: Set[str], writers: Set[str]) -> None:
        """Locks the segments of dead `writers`; removes lock files and side indexes left without a segment."""
        for writer in sorted(writers | {writer for name in listed if (writer := lock_writer(name))}):
            if self._locks.holds(writer) or not self._locks.acquire(writer):
                continue
            if writer in writers:
                log.info("storage_segments_adopted", storage=str(self.path), writer=writer)
            else:
                self._locks.release(writer, remove=True)
        for name in listed:
            segment = index_segment(name)
            if segment and segment not in listed and self._locks.holds(segment.partition("-")[0]):
                self._disk.remove(self.path / name)

    def _look_at(self, name: str, writer: str, number: int) -> None:
        segment = self._segments.get(name)
        owned = self._locks.holds(writer)
        if segment is not None and segment.owned == owned and (segment.sealed or writer == self.writer):
            return
        if segment is None:
            path = self.path / name
            segment = SegmentFile(path, writer, number, owned, modified_s=path.stat().st_mtime)
            self._segments[name] = segment
        adopted = owned and not segment.owned
        segment.owned = owned
        if adopted and segment.sealed:
            return
        listed = read_side_index(segment)
        if listed is None:
            self._scan(segment)
            return
        entries, end_bytes = listed
        self._know(segment, entries, end_bytes)
        segment.sealed = True

    def _scan(self, segment: SegmentFile) -> None:
        """Finds the records of a segment without a side index. Seals an owned segment, because its writer is dead."""
        descriptor = self._disk.open(segment.path, os.O_RDONLY)
        try:
            start_bytes = 0 if segment.owned else segment.end_bytes
            found = scan_headers(self._disk, descriptor, start_bytes, through_holes=segment.owned)
        finally:
            self._disk.close(descriptor)
        self._know(segment, *found)
        if segment.owned:
            segment.sealed = True
            self.write_index(segment)
            descriptor = self._disk.open(segment.path, os.O_RDWR)
            try:
                self._disk.truncate(descriptor, segment.end_bytes)
            finally:
                self._disk.close(descriptor)

    def _know(self, segment: SegmentFile, entries: Sequence[Entry], end_bytes: int) -> None:
        segment.end_bytes = max(segment.end_bytes, -(-end_bytes // ALIGNMENT) * ALIGNMENT)
        self.index.add(segment, entries)

    def _forget(self, segment: SegmentFile) -> int:
        if self._segments.get(segment.path.name) is segment:
            del self._segments[segment.path.name]
        return self.index.drop_segment(segment)
