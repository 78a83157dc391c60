"""Active messages: small messages from transfer thread to transfer thread, sent over the data plane.

A control message costs six thread wake-ups, too many for small requests. Leases and watermarks therefore use
the transport directly, without another thread, encryption or a queue.

The tag of an active message identifies its sender. A process that can forge the tag could also write the ring
directly, so the tag needs no authentication. Messages of one sender are handled in the order of `send`; a
control message may overtake them. A message arrives or its operation fails. If the connection breaks after
the send, neither happens, so a sender that needs a reply sets a timeout.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
import xxhash

from disagg.core.errors import ProtocolError, TransportError
from transport.base import Arrival, Operation, OperationState, Transport
from transport.control.messages import MAX_MESSAGE_BYTES, Message, decode, encode
from transport.slots import Slot, Slots
from transport.tags import active_message_tag, is_active_message

log = structlog.get_logger(__name__)

Handler = Callable[[str, Any], None]
"""Called as `(peer, message)`; `message` has the type under which the handler is registered."""


@dataclass(slots=True, eq=False)
class _ActiveMessage:
    """The context of an active message's operation."""

    slot: Slot
    peer: str
    message: Message | None
    """None for a message being received."""
    came: bool | None = None
    """For a received message: None while its operation runs, then whether the bytes arrived."""


class ActiveMessages:
    """Sends and receives the active messages of one rank. Owned by the transfer thread."""

    def __init__(
        self,
        transport: Transport,
        address: str,
        handlers: Mapping[type[Message], Handler],
        undelivered: Callable[[str, Message, TransportError], None],
    ) -> None:
        """`address` is this rank's name. `undelivered` is called for each message whose send failed."""
        self._transport, self._slots = transport, Slots(transport)
        self._tag = _tag(address)
        self._handlers, self._undelivered = dict(handlers), undelivered
        self._peers: dict[int, str] = {}
        self._coming: defaultdict[str, deque[_ActiveMessage]] = defaultdict(deque)
        """Incoming messages by sender, in order of arrival. UCX may still fetch a large one after later ones
        are complete."""
        self.dropped = 0
        """Number of messages dropped: the sender or the type is unknown, or the bytes cannot be decoded."""

    def know(self, peer: str) -> None:
        """Accepts active messages of `peer`. Raises `TransportError` when another peer has the same tag."""
        tag = _tag(peer)
        if self._peers.setdefault(tag, peer) != peer or tag == self._tag:
            raise TransportError(
                f"{peer} and {self._peers[tag]} have the same active-message tag; let one rank listen on another port"
            )

    def forget(self, peer: str) -> None:
        """Drops active messages of `peer` from now on."""
        self._peers.pop(_tag(peer), None)

    def send(self, peer: str, message: Message) -> None:
        """Starts sending `message`. Pass the operation to `ended` when it has ended."""
        body = encode(message)
        entry = _ActiveMessage(self._slots.take(len(body)), peer, message)
        entry.slot.write(body)
        self._transport.send(peer, self._tag, entry.slot.view, context=entry)

    def arrived(self, arrival: Arrival) -> bool:
        """Starts receiving an active message. Returns False for an arrival that is not one."""
        if not is_active_message(arrival.tag):
            return False
        peer = self._peers.get(arrival.tag)
        if peer is None or not 0 < arrival.nbytes <= MAX_MESSAGE_BYTES:
            self.dropped += 1
            self._transport.discard(peer, arrival)
        else:
            entry = _ActiveMessage(self._slots.take(arrival.nbytes), peer, None)
            self._coming[peer].append(entry)
            self._transport.receive(peer, arrival, entry.slot.view, context=entry)
        return True

    def ended(self, operation: Operation) -> bool:
        """Passes complete messages to their handlers. Returns False for an operation of another kind."""
        entry = operation.context
        if not isinstance(entry, _ActiveMessage):
            return False
        failed = operation.state is OperationState.FAILED
        if entry.message is None:
            entry.came = not failed
            self._hand_over(self._coming[entry.peer])
            return True
        self._slots.give(entry.slot)
        if failed:
            self._undelivered(entry.peer, entry.message, operation.error or TransportError("not delivered"))
        return True

    def _hand_over(self, coming: deque[_ActiveMessage]) -> None:
        """Handles the received messages at the head of the queue, up to the first that is incomplete."""
        while coming and coming[0].came is not None:
            entry = coming.popleft()
            body = entry.slot.read()
            self._slots.give(entry.slot)
            if entry.came:
                self._read(entry.peer, body)

    def _read(self, peer: str, body: bytes) -> None:
        try:
            message = decode(body)
            handler = self._handlers.get(type(message))
            if handler is None:
                raise ProtocolError(f"{type(message).__name__} is not an active message")
        except ProtocolError as exc:
            self.dropped += 1
            log.warning("active_message_dropped", peer=peer, error=str(exc))
        else:
            handler(peer, message)


def _tag(address: str) -> int:
    return active_message_tag(xxhash.xxh32_intdigest(address.encode()))
