"""Active messages: small messages from transfer thread to transfer thread, sent over the data plane.

A control message costs six thread wake-ups, too many for small requests. Leases and watermarks therefore use
the transport directly, without another thread, encryption or a queue.

Each link of a rank with a peer has an *inbox*, whose number is part of the tag. The receiver announces the number
with `Linked` over the control channel. The sender holds its messages until `Linked` arrives, so no message reaches a
rank that has not linked the sender yet. A fence closes the inbox: a message from before the fence carries a closed
number, and is dropped.

Small messages to one peer that a transfer thread sends in one turn share a *frame*, one message of the transport.

A process that can forge the tag could also write the ring directly, so the tag needs no authentication. Messages
of one sender are handled in the order of `send`; a control message may overtake them. A message is lost without an
error if the connection breaks after its send operation is done. A sender that needs a reply therefore sets a timeout.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from disagg.core.errors import ProtocolError, TransportError
from transport.base import Arrival, Operation, OperationState, Transport
from transport.control.messages import MAX_MESSAGE_BYTES, Linked, Message, decode_frame, encode, join
from transport.slots import SLOT_BYTES, Slot, Slots
from transport.tags import INBOX_NUMBERS, active_message_tag, inbox_of, is_active_message

log = structlog.get_logger(__name__)

Handler = Callable[[str, Any], None]
"""Callback `handler(peer, message)`; `message` has the type under which the handler is registered."""


FRAME_BYTES = SLOT_BYTES
"""Largest frame of several messages. A larger one would need a buffer of its own."""
MOST_IN_FRAME = 15
MAX_HELD_BYTES = 1 << 20
"""Limit of the bytes held for one peer that is not linked yet; a message beyond the limit is dropped."""


@dataclass(slots=True, eq=False)
class _Inbox:
    """The messages that one peer sends to this rank, from `link` until the peer is fenced."""

    peer: str
    number: int
    coming: deque[_Incoming] = field(default_factory=deque)
    """Incoming messages in order of arrival. UCX may complete a small message before an earlier large message."""
    closed: bool = False


@dataclass(slots=True, eq=False)
class _Incoming:
    """The context object of a receive operation."""

    slot: Slot
    inbox: _Inbox
    came: bool | None = None
    """Whether the bytes arrived; None until the receive ends."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    """The context object of a send operation."""

    slot: Slot
    peer: str
    messages: list[Message]


@dataclass(slots=True)
class _Held:
    """Messages for a linked peer that has not announced its inbox yet, or for one frame."""

    messages: list[tuple[Message, bytes]] = field(default_factory=list)
    nbytes: int = 0


class ActiveMessages:
    """Sends and receives the active messages of one rank. Owned by the transfer thread."""

    def __init__(
        self,
        transport: Transport,
        announce: Callable[[str, Message], None],
        handlers: Mapping[type[Message], Handler],
        undelivered: Callable[[str, Message, TransportError], None],
    ) -> None:
        """`announce` sends over the control channel. `undelivered` is called for each message whose send failed."""
        self._transport, self._slots = transport, Slots(transport)
        self._announce = announce
        self._handlers, self._undelivered = dict(handlers), undelivered
        self._last_number = secrets.randbelow(INBOX_NUMBERS)
        self._inboxes: dict[int, _Inbox] = {}
        """Open inboxes of this rank by number."""
        self._linked: dict[str, _Inbox] = {}
        """Open inboxes of this rank by peer."""
        self._numbers: dict[str, int] = {}
        """Inbox numbers that peers have announced; a peer may announce its inbox before this rank links the peer."""
        self._held: dict[str, _Held] = {}
        self._collects = False
        self._frames: dict[str, _Held] = {}
        """Messages of the current turn that share a frame, by peer."""
        self.dropped = 0
        """Number of messages dropped because of a closed inbox, an unknown type, invalid bytes or
        `MAX_HELD_BYTES`."""

    def link(self, peer: str) -> None:
        """Opens an inbox for the connected `peer` and announces its number. No effect if the peer's inbox is open."""
        if peer in self._linked:
            return
        self._last_number = (self._last_number + 1) % INBOX_NUMBERS
        inbox = _Inbox(peer, self._last_number)
        self._inboxes[inbox.number] = self._linked[peer] = inbox
        self._announce(peer, Linked(inbox.number))

    def is_linked(self, peer: str) -> bool:
        """Returns whether this rank has an open inbox for `peer`."""
        return peer in self._linked

    def on_linked(self, peer: str, message: Linked) -> bool:
        """Handles the inbox number that a peer announces: sends the messages held for the peer.

        The announcement may arrive before this rank has linked the peer. Returns False if a linked peer announces a
        new number: the peer has fenced this rank since then, and messages to the old inbox may be lost.
        """
        fenced = peer in self._linked and self._numbers.get(peer, message.inbox) != message.inbox
        self._numbers[peer] = message.inbox
        if fenced:
            self._frames.pop(peer, None)  # for the old inbox
        for held, body in self._held.pop(peer, _Held()).messages:
            self._post(peer, [held], body)
        return not fenced

    def forget(self, peer: str) -> None:
        """Closes a fenced peer's inbox: drops its unhandled messages, and the messages held for the peer."""
        self._numbers.pop(peer, None)
        self._held.pop(peer, None)
        self._frames.pop(peer, None)
        inbox = self._linked.pop(peer, None)
        if inbox is not None:
            del self._inboxes[inbox.number]
            inbox.closed = True
            for entry in inbox.coming:
                if entry.came is not None:
                    self._slots.give(entry.slot)  # `ended` frees the slots of unfinished receives
            inbox.coming.clear()

    def send(self, peer: str, message: Message) -> None:
        """Starts sending `message`, or holds it until the peer announces its inbox, or until `flush`.

        The caller passes each ended operation of the transport to `ended`.
        """
        body = encode(message)
        if (
            peer not in self._linked
        ):  # the send fails at once: after a link later in this turn, the message would reach a new inbox
            self._post(peer, [message], body)
            return
        if peer in self._numbers:
            self._send(peer, message, body)
            return
        held = self._held.setdefault(peer, _Held())
        if held.nbytes + len(body) > MAX_HELD_BYTES:
            self.dropped += 1
            log.warning(
                "active_message_dropped",
                peer=peer,
                error=f"{held.nbytes} bytes are held until the peer links",
            )
            return
        held.messages.append((message, body))
        held.nbytes += len(body)

    def collect(self) -> None:
        """Begins a turn of the transfer thread: from now on, messages wait for `flush`, to share a transport message
        with other messages to the same peer."""
        self._collects = True

    def flush(self) -> None:
        """Starts sending the messages that wait. Later messages do not wait, until `collect` is called again."""
        self._collects = False
        while self._frames:
            peer, frame = self._frames.popitem()
            self._post_frame(peer, frame)

    def _send(self, peer: str, message: Message, body: bytes) -> None:
        frame = self._frames.get(peer)
        if frame is not None and (
            frame.nbytes + len(body) >= FRAME_BYTES or len(frame.messages) == MOST_IN_FRAME
        ):
            self._post_frame(peer, self._frames.pop(peer))
            frame = None
        if not self._collects or len(body) >= FRAME_BYTES:
            self._post(peer, [message], body)
            return
        if frame is None:
            frame = self._frames[peer] = _Held()
        frame.messages.append((message, body))
        frame.nbytes += len(body)

    def _post_frame(self, peer: str, frame: _Held) -> None:
        messages, bodies = [one for one, _ in frame.messages], [body for _, body in frame.messages]
        self._post(peer, messages, bodies[0] if len(bodies) == 1 else join(bodies))

    def _post(self, peer: str, messages: list[Message], body: bytes) -> None:
        entry = _Outgoing(self._slots.take(len(body)), peer, messages)
        entry.slot.write(body)
        tag = active_message_tag(self._numbers.get(peer, 0))
        self._transport.send(peer, tag, entry.slot.view, context=entry)

    def arrived(self, arrival: Arrival) -> bool:
        """Starts receiving an active message. Returns False if the arrival is not an active message."""
        if not is_active_message(arrival.tag):
            return False
        inbox = self._inboxes.get(inbox_of(arrival.tag))
        if inbox is None or not 0 < arrival.nbytes <= MAX_MESSAGE_BYTES:
            self.dropped += 1
            self._transport.discard(inbox.peer if inbox is not None else None, arrival)
        else:
            entry = _Incoming(self._slots.take(arrival.nbytes), inbox)
            inbox.coming.append(entry)
            self._transport.receive(inbox.peer, arrival, entry.slot.view, context=entry)
        return True

    def ended(self, operation: Operation) -> bool:
        """Handles an ended operation, and passes complete messages to their handlers.

        Returns False for an operation that is not of an active message.
        """
        entry = operation.context
        failed = operation.state is OperationState.FAILED
        if isinstance(entry, _Incoming):
            entry.came = not failed
            if entry.inbox.closed:
                self._slots.give(entry.slot)
            else:
                self._hand_over(entry.inbox.coming)
        elif isinstance(entry, _Outgoing):
            self._slots.give(entry.slot)
            if failed:
                error = operation.error or TransportError("the active message was not delivered")
                for message in entry.messages:
                    self._undelivered(entry.peer, message, error)
        return isinstance(entry, _Incoming | _Outgoing)

    def _hand_over(self, coming: deque[_Incoming]) -> None:
        """Handles the received messages at the head of the queue, up to the first message that is incomplete."""
        while coming and coming[0].came is not None:
            entry = coming.popleft()
            body = entry.slot.read()
            self._slots.give(entry.slot)
            if entry.came:
                try:
                    self._read(entry.inbox, body)
                except Exception:
                    self._hand_over(coming)  # nothing else would look at what has arrived meanwhile
                    raise

    def _read(self, inbox: _Inbox, body: bytes) -> None:
        try:
            messages = decode_frame(body)
            for message in messages:
                if type(message) not in self._handlers:
                    raise ProtocolError(f"{type(message).__name__} is not an active message")
        except ProtocolError as exc:
            self.dropped += 1
            log.warning("active_message_dropped", peer=inbox.peer, error=str(exc))
        else:
            self._handle(inbox, messages)

    def _handle(self, inbox: _Inbox, messages: list[Message]) -> None:
        """Handles the messages of a frame. A message that raises does not keep the others from being handled."""
        for number, message in enumerate(messages, 1):
            if inbox.closed:
                return
            try:
                self._handlers[type(message)](inbox.peer, message)
            except Exception:
                self._handle(inbox, messages[number:])
                raise
