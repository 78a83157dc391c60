"""Small messages beside the data, from transfer thread to transfer thread: no other thread, no encryption, no queue.

A notice says that a segment has been written into the receiver's memory, and with which checksum; its tag is the
segment's. Whoever can send it can write that memory, so it is trusted no less than the bytes it speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from disagg.core.errors import ProtocolError
from disagg.core.types import Segment
from transport.base import Arrival, Operation, Transport
from transport.slots import Slot, Slots

NOTICE_BYTES = 256
"""The most that one takes."""


class Written(msgspec.Struct, frozen=True, array_like=True):
    """The body of a notice."""

    segment: Segment
    total: int
    """The checksum of the bytes that were written; 0 where none is computed."""
    again: bool
    """Whether this was the second write of the segment."""


@dataclass(slots=True, eq=False)
class Notice:
    """A notice on its way: the context of its operation."""

    slot: Slot
    context: object


class Notices:
    """Sends and receives notices over a transport. Owned by the transfer thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._slots = transport, Slots(transport)

    def send(self, peer: str, tag: int, written: Written, context: object) -> None:
        """Its operation ends like any other; `ended` gives `context` back then."""
        body = _ENCODER.encode(written)
        notice = Notice(self._slots.take(len(body)), context)
        notice.slot.write(body)
        self._transport.send(peer, tag, notice.slot.view, context=notice)

    def receive(self, peer: str, arrival: Arrival, context: object) -> None:
        """The arrival is of `NOTICE_BYTES` at most."""
        notice = Notice(self._slots.take(arrival.nbytes), context)
        self._transport.receive(peer, arrival, notice.slot.view, context=notice)

    def ended(self, operation: Operation) -> object | None:
        """The context of a notice whose operation has ended; its slot is free again. None for other operations."""
        notice = operation.context
        if not isinstance(notice, Notice):
            return None
        self._slots.give(notice.slot)
        return notice.context

    def read(self, operation: Operation) -> Written:
        """The body of a received notice; read it before anything else is received. Raises `ProtocolError`."""
        notice = operation.context
        assert isinstance(notice, Notice), "asked of a notice only"
        try:
            return _DECODER.decode(notice.slot.read())
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"a notice of {operation.nbytes} bytes cannot be read: {exc}") from exc


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Written)
