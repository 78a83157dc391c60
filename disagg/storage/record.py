"""Format of a stored page, called a record: a header with checksums, then the content.

The content's checksum is xxh3-128, the header's own checksum is xxh3-64. Both detect accidents (torn writes, bit
flips, misplaced writes), not deliberate changes: every process that may write to the folder or the server is trusted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from disagg.storage.contract import KEY_BYTES

MAGIC = b"DISAGGKV"
VERSION = 1
_BODY = struct.Struct(f"<8sHHI{KEY_BYTES}sQ16s")
_OWN_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _BODY.size + _OWN_CHECKSUM.size


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Header of one stored page."""

    key: bytes
    length_bytes: int
    """Length of the content."""
    checksum: bytes
    """xxh3-128 of the content, 16 bytes."""

    @classmethod
    def of(cls, key: bytes, content: memoryview) -> RecordHeader:
        """Returns the header of a record with `content`, including its checksum."""
        return cls(key, content.nbytes, checksum_of(content))

    @property
    def record_bytes(self) -> int:
        """Size of header and content."""
        return HEADER_BYTES + self.length_bytes

    def packed(self) -> bytes:
        """Returns the header's `HEADER_BYTES` bytes, little endian."""
        body = _BODY.pack(MAGIC, VERSION, HEADER_BYTES, 0, self.key, self.length_bytes, self.checksum)
        return body + _OWN_CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def checksum_of(content: memoryview | bytes) -> bytes:
    """Returns the xxh3-128 of `content`, 16 bytes."""
    return xxhash.xxh3_128_digest(content)


def parse_header(data: memoryview | bytes) -> RecordHeader | None:
    """Returns the header at the start of `data`; None if `data` does not start with a valid header."""
    if len(data) < HEADER_BYTES:
        return None
    body = bytes(data[: _BODY.size])
    magic, version, header_bytes, _, key, length_bytes, checksum = _BODY.unpack(body)
    if magic != MAGIC or version != VERSION or header_bytes != HEADER_BYTES:
        return None
    (own,) = _OWN_CHECKSUM.unpack(data[_BODY.size : HEADER_BYTES])
    if own != xxhash.xxh3_64_intdigest(body):
        return None
    return RecordHeader(key, length_bytes, checksum)


def content_of(record: memoryview, key: bytes) -> memoryview | None:
    """Returns the verified content of a record; None unless `record` is intact and has the key `key`.

    `record` may have padding at its end.
    """
    header = parse_header(record)
    if header is None or header.key != key or len(record) < header.record_bytes:
        return None
    content = record[HEADER_BYTES : header.record_bytes]
    return content if checksum_of(content) == header.checksum else None
