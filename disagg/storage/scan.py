"""Finds the records of a segment without a side index, by the records' headers."""

from __future__ import annotations

from disagg.storage.bounce import ALIGNMENT, BounceBuffers, aligned
from disagg.storage.disk import Disk
from disagg.storage.record import HEADER_BYTES, MAGIC, parse_header
from disagg.storage.segment import Entry

_WINDOW_BYTES = 16 * ALIGNMENT
_buffers = BounceBuffers()


def scan_headers(
    disk: Disk, descriptor: int, start_bytes: int, *, through_holes: bool
) -> tuple[list[Entry], int]:
    """Returns the records from `start_bytes` on, and the end of the last record in bytes. Raises `OSError`.

    `through_holes`: whether the scan continues beyond holes (bytes without a record). A failed or interrupted write
    leaves a hole if a later write succeeded. If False, the scan ends at the first hole, because a live writer may
    still fill it. The scan reads no contents, so it also finds torn records, which fail verification when read.
    """
    entries: list[Entry] = []
    stop_bytes, offset, end_bytes = disk.size(descriptor), start_bytes, start_bytes
    window, window_start = memoryview(b""), start_bytes
    while offset + HEADER_BYTES <= stop_bytes:
        if not window_start <= offset < window_start + len(window):
            window = _buffers.take(_WINDOW_BYTES)
            window_start, window = offset, window[: disk.read(descriptor, window, offset)]
            if not len(window):
                break
        place = offset - window_start
        block = window[place : place + ALIGNMENT]
        header = parse_header(block) if block[: len(MAGIC)] == MAGIC else None
        # No write exceeds the space of its segment, so a header with a longer record is invalid.
        if header is None or offset + header.record_bytes > stop_bytes:
            if not through_holes:
                break
            offset += ALIGNMENT
            continue
        entries.append(Entry(header.key, offset, header.length_bytes))
        offset += aligned(header.record_bytes)
        end_bytes = offset
    return entries, end_bytes
