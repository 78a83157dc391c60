"""Items in the queues of an outgoing channel: messages, batches of small frames, and pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transport.base import Operation
from transport.tls.pieces import Bytes


@dataclass(slots=True, eq=False)
class Send:
    """A message whose operation has not ended."""

    operation: Operation
    number: int
    view: torch.Tensor
    frame: bytes
    """The EAGER frame with the message's bytes, or the ANNOUNCE frame."""
    eager_bytes: int
    """Bytes that count towards the eager window; 0 for an announced message."""
    announced: bool = False
    next_offset: int = 0
    unwritten_bytes: int = 0
    cleared: bool = False


@dataclass(slots=True, eq=False)
class Batch:
    """Small frames that are written together."""

    frames: bytes
    sends: list[Send]


@dataclass(slots=True, eq=False)
class SendPiece:
    """A piece of a large message, written by one lane."""

    send: Send
    offset: int
    nbytes: int
    read: Bytes | None = None
    """Function that returns the bytes of the piece; None until the piece is staged."""
