"""The side index of a sealed segment: a file with keys and offsets of the records.

With the side index, a start need not read the headers of the records. A checksum verifies the whole file and the
segment's name. Without a valid side index, the segment's headers are scanned.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash

from disagg.core.folders import replace_file
from disagg.storage.contract import KEY_BYTES
from disagg.storage.segment import Entry, SegmentFile

_HEAD = struct.Struct("<8sII Q")
_ENTRY = struct.Struct(f"<{KEY_BYTES}sQQ")
_MAGIC, _VERSION, _CHECKSUM_BYTES = b"DISAGGIX", 1, 16


def write_side_index(segment: SegmentFile, entries: Sequence[Entry], end_bytes: int) -> None:
    """Writes the side index atomically. Raises `OSError`."""
    body = _HEAD.pack(_MAGIC, _VERSION, len(entries), end_bytes) + b"".join(
        _ENTRY.pack(entry.key, entry.offset_bytes, entry.length_bytes) for entry in entries
    )
    replace_file(segment.index_path, body + _checksum(segment.path, body))


def read_side_index(segment: SegmentFile) -> tuple[list[Entry], int] | None:
    """Returns the entries and the end of the last record in bytes; None without a valid side index.

    Raises `OSError`, except for a missing file.
    """
    try:
        data = segment.index_path.read_bytes()
    except FileNotFoundError:
        return None
    body = data[:-_CHECKSUM_BYTES]
    if len(body) < _HEAD.size or data[-_CHECKSUM_BYTES:] != _checksum(segment.path, body):
        return None
    magic, version, count, end_bytes = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != _VERSION or len(body) != _HEAD.size + count * _ENTRY.size:
        return None
    return [Entry(*fields) for fields in _ENTRY.iter_unpack(body[_HEAD.size :])], end_bytes


def _checksum(segment: Path, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(segment.name.encode() + body)
