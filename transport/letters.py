"""Messages from transfer thread to transfer thread, over the data plane: no other thread, no encryption, no queue.

The control channel takes six thread wake-ups for each message, which small requests cannot afford. So what transfer
threads alone have to do with each other (leases, watermarks) goes the way of the data. A letter's tag names its
sender: whoever can forge it could as well write the ring that it asks for. A sender's letters are handed over in the
order in which they were sent; but a message of the control channel may overtake them. A letter arrives, or its
operation fails; or, when the connection breaks behind it, neither: who needs an answer sets a time for it.
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
from transport.messages import MAX_MESSAGE_BYTES, Message, decode, encode
from transport.slots import Slot, Slots
from transport.tags import is_letter, letter_tag

log = structlog.get_logger(__name__)

Handler = Callable[[str, Any], None]
"""Takes `(peer, message)`, a message of the type that it is named for."""


@dataclass(slots=True, eq=False)
class _Letter:
    """The context of a letter's operation."""

    slot: Slot
    peer: str
    message: Message | None
    """None while it is being received."""
    came: bool | None = None
    """Of one that is received: None until its operation has ended, then whether its bytes are here."""


class Letters:
    """One rank's letter box. Owned by the transfer thread."""

    def __init__(
        self,
        transport: Transport,
        address: str,
        handlers: Mapping[type[Message], Handler],
        undelivered: Callable[[str, Message, TransportError], None],
    ) -> None:
        """`address` is this rank's name, `handlers` take what comes, `undelivered` what could not be sent."""
        self._transport, self._slots = transport, Slots(transport)
        self._tag = _tag(address)
        self._handlers, self._undelivered = dict(handlers), undelivered
        self._peers: dict[int, str] = {}
        self._coming: defaultdict[str, deque[_Letter]] = defaultdict(deque)
        """By sender, in the order of arrival: UCX fetches a large one while those behind it are here already."""
        self.strange = 0
        """Letters of unknown senders, of unknown kinds, or that cannot be read; dropped."""

    def know(self, peer: str) -> None:
        """Letters of `peer` are taken from now on. Raises `TransportError` when its tag is that of another peer."""
        tag = _tag(peer)
        if self._peers.setdefault(tag, peer) != peer or tag == self._tag:
            raise TransportError(
                f"{peer} and {self._peers[tag]} have one tag: let one listen on another port"
            )

    def forget(self, peer: str) -> None:
        """Letters of `peer` are strange from now on."""
        self._peers.pop(_tag(peer), None)

    def send(self, peer: str, message: Message) -> None:
        """Its operation is for `ended`."""
        body = encode(message)
        letter = _Letter(self._slots.take(len(body)), peer, message)
        letter.slot.write(body)
        self._transport.send(peer, self._tag, letter.slot.view, context=letter)

    def arrived(self, arrival: Arrival) -> bool:
        """Receives a letter; False for an arrival that is none, and somebody else's."""
        if not is_letter(arrival.tag):
            return False
        peer = self._peers.get(arrival.tag)
        if peer is None or not 0 < arrival.nbytes <= MAX_MESSAGE_BYTES:
            self.strange += 1
            self._transport.discard(peer, arrival)
        else:
            letter = _Letter(self._slots.take(arrival.nbytes), peer, None)
            self._coming[peer].append(letter)
            self._transport.receive(peer, arrival, letter.slot.view, context=letter)
        return True

    def ended(self, operation: Operation) -> bool:
        """Hands letters to their handler; False for an operation that is no letter's."""
        letter = operation.context
        if not isinstance(letter, _Letter):
            return False
        failed = operation.state is OperationState.FAILED
        if letter.message is None:
            letter.came = not failed
            self._hand_over(self._coming[letter.peer])
            return True
        self._slots.give(letter.slot)
        if failed:
            self._undelivered(letter.peer, letter.message, operation.error or TransportError("not delivered"))
        return True

    def _hand_over(self, coming: deque[_Letter]) -> None:
        """Those that nothing before them is still waited for."""
        while coming and coming[0].came is not None:
            letter = coming.popleft()
            body = letter.slot.read()
            self._slots.give(letter.slot)
            if letter.came:
                self._read(letter.peer, body)

    def _read(self, peer: str, body: bytes) -> None:
        try:
            message = decode(body)
            handler = self._handlers.get(type(message))
            if handler is None:
                raise ProtocolError(f"{type(message).__name__} does not come as a letter")
        except ProtocolError as exc:
            self.strange += 1
            log.warning("strange_letter", peer=peer, error=str(exc))
        else:
            handler(peer, message)


def _tag(address: str) -> int:
    return letter_tag(xxhash.xxh32_intdigest(address.encode()))
