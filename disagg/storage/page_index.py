"""The in-memory index of a file storage: the location of each known page. An entry takes about 300 bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from disagg.core.errors import InvariantError
from disagg.storage.record import HEADER_BYTES
from disagg.storage.segment import Entry, Location, SegmentFile


class PageIndex:
    """Locations of pages, by key. Thread-safe; performs no I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locations: dict[bytes, Location] = {}
        self._stored_bytes = 0

    def find(self, key: bytes) -> Location | None:
        """Returns the location of a page; None for an unknown page."""
        return self._locations.get(key)

    def add(self, segment: SegmentFile, entries: Iterable[Entry]) -> None:
        """Adds records of a segment, unless the segment is gone.

        A known page keeps its location, unless this process owns the new segment but not the known one.
        """
        with self._lock:
            for entry in entries if not segment.gone else ():
                known = self._locations.get(entry.key)
                if known is None or (segment.owned and not known.segment.owned):
                    self._set(entry.key, known, Location(segment, entry.offset_bytes, entry.length_bytes))

    def move(self, key: bytes, known: Location, new: Location) -> bool:
        """Replaces the location of a page if the location is still `known`.

        Returns whether the location was replaced.
        """
        with self._lock:
            if self._locations.get(key) is not known or new.segment.gone:
                return False
            self._set(key, known, new)
            return True

    def drop(self, key: bytes, known: Location) -> bool:
        """Removes a page if its location is still `known`. Returns whether the page was removed."""
        with self._lock:
            if self._locations.get(key) is not known:
                return False
            del self._locations[key]
            self._stored_bytes -= HEADER_BYTES + known.length_bytes
            return True

    def locations_in(self, segment: SegmentFile) -> list[tuple[bytes, Location]]:
        """Returns the pages whose location is in `segment`, in the order of their addition."""
        with self._lock:
            known = ((key, self._locations.get(key)) for key in dict.fromkeys(segment.keys))
            return [(key, found) for key, found in known if found is not None and found.segment is segment]

    def drop_segment(self, segment: SegmentFile) -> int:
        """Removes the pages whose location is in `segment`; returns their number.

        Later calls of `add` ignore the segment.
        """
        with self._lock:
            segment.gone = True
        pages = self.locations_in(segment)
        dropped = sum(self.drop(key, location) for key, location in pages)
        with self._lock:
            segment.keys.clear()
        return dropped

    def totals(self) -> tuple[int, int]:
        """Returns the number of pages, and the bytes of their records."""
        with self._lock:
            return len(self._locations), self._stored_bytes

    def check(self, segments: Iterable[SegmentFile]) -> None:
        """Raises `InvariantError` unless each location is in one of `segments`, and all sums agree."""
        known = set(segments)
        with self._lock:
            stored_bytes = 0
            for key, location in self._locations.items():
                stored_bytes += HEADER_BYTES + location.length_bytes
                place = (location.segment.path.name, location.offset_bytes, location.length_bytes)
                if location.segment not in known or key not in location.segment.keys:
                    raise InvariantError(f"page index: {key.hex()} is at {place}, in no known segment")
                if location.offset_bytes + HEADER_BYTES + location.length_bytes > location.segment.end_bytes:
                    raise InvariantError(f"page index: {key.hex()} at {place} is behind the segment's end")
            if stored_bytes != self._stored_bytes:
                raise InvariantError(f"page index: {stored_bytes} bytes, counted {self._stored_bytes}")

    def _set(self, key: bytes, known: Location | None, new: Location) -> None:
        self._locations[key] = new
        new.segment.keys.append(key)
        self._stored_bytes += new.length_bytes - (known.length_bytes if known else -HEADER_BYTES)
