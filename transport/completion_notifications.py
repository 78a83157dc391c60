"""Completion notifications: small messages that confirm a direct write, from transfer thread to transfer
thread.

A completion notification reports that a segment has been written into the receiver's memory, and the segment's
checksum. The notification has the same tag as the segment. A sender that can write the memory could also forge the
bytes, so notifications need no authentication of their own. Notifications use the transport directly, without another
thread, encryption or a queue.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from disagg.core.errors import ProtocolError
from disagg.core.types import Segment
from transport.base import Arrival, Operation, Transport
from transport.slots import Slot, Slots

NOTIFICATION_BYTES = 256
"""Largest size of a completion notification."""


class Written(msgspec.Struct, frozen=True, array_like=True):
    """The body of a completion notification."""

    segment: Segment
    total: int
    """The checksum of the written bytes; 0 when checksums are off."""
    again: bool
    """Whether the segment was written a second time."""


@dataclass(slots=True, eq=False)
class CompletionNotification:
    """The context object of an operation that sends or receives a completion notification."""

    slot: Slot
    context: object


class CompletionNotifications:
    """Sends and receives completion notifications over a transport. Owned by the transfer thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._slots = transport, Slots(transport)

    def send(self, peer: str, tag: int, written: Written, context: object) -> None:
        """Starts sending a notification. `ended` returns `context` once the operation has ended."""
        body = _ENCODER.encode(written)
        notification = CompletionNotification(self._slots.take(len(body)), context)
        notification.slot.write(body)
        self._transport.send(peer, tag, notification.slot.view, context=notification)

    def receive(self, peer: str, arrival: Arrival, context: object) -> None:
        """Starts receiving a notification of at most `NOTIFICATION_BYTES`."""
        notification = CompletionNotification(self._slots.take(arrival.nbytes), context)
        self._transport.receive(peer, arrival, notification.slot.view, context=notification)

    def ended(self, operation: Operation) -> object | None:
        """Returns the context of an ended notification and frees its slot. None for other operations."""
        notification = operation.context
        if not isinstance(notification, CompletionNotification):
            return None
        self._slots.give(notification.slot)
        return notification.context

    def read(self, operation: Operation) -> Written:
        """Returns the body of a received notification. Raises `ProtocolError` for invalid bytes.

        Call this before the next `send` or `receive`, which may reuse the slot that `ended` has freed.
        """
        notification = operation.context
        assert isinstance(notification, CompletionNotification), (
            "not an operation of a completion notification"
        )
        try:
            return _DECODER.decode(notification.slot.read())
        except msgspec.DecodeError as exc:
            raise ProtocolError(
                f"a completion notification of {operation.nbytes} bytes cannot be decoded: {exc}"
            ) from exc


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Written)
