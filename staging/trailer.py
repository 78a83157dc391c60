"""Position of a segment's checksum: the last 8 bytes of its message, in staging, on the wire and in the ring.

A message starts at a multiple of 8 bytes, and so does its checksum. Up to 7 unused bytes may therefore
precede the checksum.
"""

from __future__ import annotations

import torch

from disagg.core.types import CHECKSUM_BYTES


def message_bytes(segment_bytes: int, checked: bool) -> int:
    """Returns the message size for a segment: the segment's bytes and, if `checked`, the aligned checksum."""
    if not checked:
        return segment_bytes
    return -(-segment_bytes // CHECKSUM_BYTES) * CHECKSUM_BYTES + CHECKSUM_BYTES


def largest_segment_bytes(limit_bytes: int, checked: bool) -> int:
    """Returns the size of the largest segment whose message has at most `limit_bytes`."""
    return limit_bytes // CHECKSUM_BYTES * CHECKSUM_BYTES - CHECKSUM_BYTES if checked else limit_bytes


def trailer(message: torch.Tensor) -> torch.Tensor:
    """Returns the checksum field of a message: int64 `[1]`, a view of the last bytes of `message`, uint8
    `[n]`."""
    return message[-CHECKSUM_BYTES:].view(torch.int64)
