"""Where a segment's checksum stands: in the last 8 bytes of its message, in staging, on the wire and in the ring.

A message begins at a multiple of 8 bytes and its checksum stands at one, so up to 7 bytes without a meaning may lie
between the segment and its checksum.
"""

from __future__ import annotations

import torch

from disagg.core.types import CHECKSUM_BYTES


def message_bytes(segment_bytes: int, checked: bool) -> int:
    """Bytes of the message that carries a segment: the segment's own and, if `checked`, those of its checksum."""
    if not checked:
        return segment_bytes
    return -(-segment_bytes // CHECKSUM_BYTES) * CHECKSUM_BYTES + CHECKSUM_BYTES


def largest_segment_bytes(limit_bytes: int, checked: bool) -> int:
    """Bytes of the largest segment whose message has at most `limit_bytes`."""
    return limit_bytes // CHECKSUM_BYTES * CHECKSUM_BYTES - CHECKSUM_BYTES if checked else limit_bytes


def trailer(message: torch.Tensor) -> torch.Tensor:
    """The checksum's place in a message: int64 `[1]`, a view of the last bytes of `message`, uint8 `[n]`."""
    return message[-CHECKSUM_BYTES:].view(torch.int64)
