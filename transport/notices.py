"""Small messages beside the data, from transfer thread to transfer thread: no other thread, no encryption, no queue.

A notice tells that a segment has been written into the receiver's memory; its tag is the segment's. Whoever can
send it can write that memory, so it is trusted no less than the bytes it speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from disagg.core.errors import ProtocolError
from disagg.core.types import Segment
from transport.base import Arrival, Operation, Transport

NOTICE_BYTES = 256
"""Room for one."""
_SLOTS = 64
"""Made at a time."""


@dataclass(slots=True, eq=False)
class Notice:
    """A notice on its way: the context of its operation."""

    slot: torch.Tensor
    """uint8 `[NOTICE_BYTES]`."""
    context: object


class Notices:
    """Sends and receives notices over a transport. Owned by the transfer thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._free: list[torch.Tensor] = []

    def send(self, peer: str, tag: int, segment: Segment, context: object) -> None:
        """Its operation ends like any other; `ended` gives `context` back then."""
        body = _ENCODER.encode(segment)
        notice = Notice(self._slot(), context)
        memory: Any = notice.slot.numpy()
        memoryview(memory)[: len(body)] = body
        self._transport.send(peer, tag, notice.slot[: len(body)], context=notice)

    def receive(self, peer: str, arrival: Arrival, context: object) -> None:
        """The arrival is of `NOTICE_BYTES` at most."""
        notice = Notice(self._slot(), context)
        self._transport.receive(peer, arrival, notice.slot[: arrival.nbytes], context=notice)

    def ended(self, operation: Operation) -> object | None:
        """The context of a notice whose operation has ended; its slot is free again. None for other operations."""
        notice = operation.context
        if not isinstance(notice, Notice):
            return None
        self._free.append(notice.slot)
        return notice.context

    def segment(self, operation: Operation) -> Segment:
        """What a received notice speaks of; to be asked before anything else is received. Raises `ProtocolError`."""
        notice = operation.context
        assert isinstance(notice, Notice), "asked of a notice only"
        try:
            return _DECODER.decode(notice.slot[: operation.nbytes].numpy().tobytes())
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"a notice of {operation.nbytes} bytes cannot be read: {exc}") from exc

    def _slot(self) -> torch.Tensor:
        if not self._free:
            memory = torch.empty((_SLOTS, NOTICE_BYTES), dtype=torch.uint8)
            self._transport.register(memory)
            self._free.extend(memory)
        return self._free.pop()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Segment)
