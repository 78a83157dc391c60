"""An in-process data plane for tests and for ranks that run as threads: deterministic, with injected faults.

The receiver copies the bytes once, from the sender's view, in `progress`. As on a real wire, no byte has
moved when `receive` returns, and a sender that reuses its view too early corrupts the message. One lock per
fabric guards everything, including the copies, so a fence holds by construction.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from disagg.core.errors import InvariantError, PeerLostError, TransportError
from transport.base import Arrival, Operation, Transport, TransportStatistics
from transport.faults import Faults
from transport.operation_tracker import OperationTracker
from transport.tags import unpack


@dataclass(slots=True, eq=False)
class _Message:
    """A message that its receiver has not consumed yet. A duplicate has its own copy of the bytes, and no
    `sender`."""

    source: str
    destination: str
    tag: int
    data: torch.Tensor
    sender: Operation | None
    void: bool = False
    """Whether the sender has fenced the receiver, so that the bytes must not be read."""


class InprocFabric:
    """The wire between in-process transports, with injected faults."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.lock = threading.RLock()
        self.transports: dict[str, InprocTransport] = {}
        self.held: list[_Message] = []
        self._observers: list[Callable[[str, str, int, torch.Tensor], None]] = []

    def observe(self, callback: Callable[[str, str, int, torch.Tensor], None]) -> None:
        """Registers a callback that receives source, destination, tag and bytes of every arriving message."""
        self._observers.append(callback)

    def release(self) -> None:
        """Delivers all held messages, in the order of their sends."""
        with self.lock:
            held, self.held = self.held, []
            for message in held:
                self.deliver(message)

    def kill(self, name: str) -> None:
        """Kills transport `name`: its operations, and its peers' operations with it, end with `PeerLostError`."""
        with self.lock:
            victim = self.transports.get(name)
            if victim is not None:
                victim.die()

    def sever(self, name: str, other: str) -> None:
        """Breaks the connection of transport `name` to `other`, on the side of `name` only; both ranks continue."""
        with self.lock:
            victim = self.transports.get(name)
            if victim is not None:
                victim.lose(other, f"the connection to {other} broke")

    def deliver(self, message: _Message) -> None:
        """Puts a message in the queue of its destination. The send fails if the destination is not on the fabric."""
        for observer in self._observers:
            observer(message.source, message.destination, message.tag, message.data)
        destination = self.transports.get(message.destination)
        if destination is not None:
            destination.accept(message)
        else:
            self.end_send(message, PeerLostError(f"{message.destination} is not on the fabric"))

    def end_send(self, message: _Message, error: TransportError | None = None) -> None:
        """Ends the send of a message, unless it has already ended."""
        if message.sender is not None and not message.sender.ended:
            source = self.transports.get(message.source)
            assert source is not None, "a transport ends its own sends before it leaves the fabric"
            source.end(message.sender, error)


class InprocTransport(Transport):
    """One rank's end of an `InprocFabric`; see `Transport`. `name_on_fabric` is unique on the fabric."""

    name: ClassVar[str] = "inproc"

    def __init__(self, fabric: InprocFabric, name_on_fabric: str) -> None:
        self._fabric = fabric
        self._name = name_on_fabric
        self._tracker = OperationTracker()
        self._peers: dict[str, str] = {}
        self._lost: set[str] = set()
        self._unread: deque[_Message] = deque()
        self.wire: list[_Message] = []
        """Messages sent by this transport whose memory may still be read."""
        self._receives: deque[tuple[Operation, _Message]] = deque()
        self._wake_up = threading.Event()
        self._closed = False
        with fabric.lock:
            if name_on_fabric in fabric.transports:
                raise ValueError(f"the fabric has a transport named {name_on_fabric} already")
            fabric.transports[name_on_fabric] = self

    @property
    def address(self) -> bytes:
        return self._name.encode()

    def connect(self, peer: str, address: bytes) -> None:
        with self._fabric.lock:
            self._ensure_open()
            name = address.decode(errors="replace")
            if self._peers.get(peer, name) != name:
                raise TransportError(
                    f"{peer} is connected as {self._peers[peer]}; disconnect it before {name}"
                )
            if peer in self._peers:
                return
            if name not in self._fabric.transports:
                raise TransportError(f"cannot connect to {peer}: no transport {name!r} on the fabric")
            self._peers[peer] = name

    def disconnect(self, peer: str) -> None:
        with self._fabric.lock:
            name = self._peers.pop(peer, None)
            if name is None:
                return
            self._lost.discard(peer)
            self._part(peer, name, PeerLostError(f"{peer} was disconnected"))

    def lost_peers(self) -> list[str]:
        with self._fabric.lock:
            return sorted(self._lost)

    def register(self, memory: torch.Tensor) -> None:
        with self._fabric.lock:
            self._ensure_open()
            self._tracker.register(memory)

    def deregister(self, memory: torch.Tensor) -> None:
        with self._fabric.lock:
            self._tracker.deregister(memory)

    def send(self, peer: str, tag: int, view: torch.Tensor, context: object = None) -> Operation:
        with self._fabric.lock:
            self._ensure_open()
            unpack(tag)
            self._tracker.check_view("send", view)
            operation = self._tracker.start("send", peer, tag, view.numel(), context, view)
            if not self._unusable(operation):
                self._transmit(_Message(self._name, self._peers[peer], tag, view, operation))
            return operation

    def arrivals(self) -> list[Arrival]:
        with self._fabric.lock:
            found = [Arrival(message.tag, message.data.numel(), message) for message in self._unread]
            self._unread.clear()
            self._tracker.hand_out(found)
            return found

    def receive(self, peer: str, arrival: Arrival, into: torch.Tensor, context: object = None) -> Operation:
        with self._fabric.lock:
            self._ensure_open()
            self._tracker.check_view("receive", into, arrival.nbytes)
            self._tracker.consume(arrival)
            operation = self._tracker.start("receive", peer, arrival.tag, arrival.nbytes, context, into)
            return self._consume(operation, arrival)

    def discard(self, peer: str | None, arrival: Arrival) -> Operation:
        with self._fabric.lock:
            self._ensure_open()
            self._tracker.consume(arrival)
            operation = self._tracker.start("discard", peer, arrival.tag, arrival.nbytes)
            return self._consume(operation, arrival)

    def progress(self) -> list[Operation]:
        with self._fabric.lock:
            if not self._receives:
                return self._tracker.take_ended()
            pending, self._receives = self._receives, deque()
            for operation, message in pending:
                if operation.kind == "receive" and message.void:
                    # The sender withdrew its memory. As on a real wire, only a disconnect by this rank ends
                    # the receive.
                    self._receives.append((operation, message))
                    continue
                into = self._tracker.view(operation)
                if into is not None:
                    into.copy_(message.data)
                    if into.is_cuda:  # once the receive has ended, every stream must see the bytes
                        torch.cuda.current_stream(into.device).synchronize()
                self.end(operation)
                self._fabric.end_send(message)
            return self._tracker.take_ended()

    def wait(self, timeout_s: float) -> None:
        self._wake_up.wait(timeout_s)
        self._wake_up.clear()

    def wake(self) -> None:
        self._wake_up.set()

    def statistics(self) -> TransportStatistics:
        with self._fabric.lock:
            return self._tracker.statistics(len(self._peers))

    def check(self) -> None:
        with self._fabric.lock:
            self._tracker.check()
            waiting = {operation for operation, _ in self._receives}
            sending = {message.sender for message in self.wire}
            for operation in self._tracker.pending():
                if operation not in (sending if operation.kind == "send" else waiting):
                    raise InvariantError(f"inproc {self._name}: {operation} can never end")

    def close(self) -> None:
        with self._fabric.lock:
            if not self._closed:
                self._fabric.kill(self._name)

    # The fabric and other transports call the following methods, under the fabric's lock.

    def accept(self, message: _Message) -> None:
        """Accepts a message delivered by the fabric."""
        self._unread.append(message)
        self._wake_up.set()

    def end(self, operation: Operation, error: TransportError | None = None) -> None:
        """Ends an operation of this transport."""
        self._tracker.end(operation, error)
        self.wire = [message for message in self.wire if message.sender is not operation]
        self._wake_up.set()

    def lose(self, name: str, why: str) -> None:
        """Marks the transport `name` as lost: operations with `name` fail until the next `connect`."""
        for peer in [peer for peer, address in self._peers.items() if address == name]:
            self._lost.add(peer)
            self._part(peer, name, PeerLostError(why))

    def die(self) -> None:
        """Leaves the fabric: ends all operations of this transport, and all operations of peers with this
        transport."""
        self._closed = True
        for peer, name in list(self._peers.items()):
            self._part(peer, name, PeerLostError(f"{self._name} was closed"))
        while self._receives:
            operation, message = self._receives.popleft()
            self.end(operation, PeerLostError(f"{self._name} was closed"))
            self._fabric.end_send(message, PeerLostError(f"{self._name} was closed"))
        for message in self._unread:
            self._fabric.end_send(message, PeerLostError(f"{self._name} was closed"))
        for arrival in self._tracker.take_arrivals():
            self._fabric.end_send(_message_of(arrival), PeerLostError(f"{self._name} was closed"))
        self._unread.clear()
        self._peers.clear()
        del self._fabric.transports[self._name]
        for other in list(self._fabric.transports.values()):
            other.lose(self._name, f"{self._name} was closed")

    def _transmit(self, message: _Message) -> None:
        rules = self._fabric.faults.take(message.source, message.destination, message.tag)
        self.wire.append(message)
        for rule in rules:
            if rule.action == "kill":
                self._fabric.kill(rule.victim)
            elif rule.action == "sever":
                self._fabric.sever(message.source, message.destination)
            elif rule.action == "fail":
                self._fabric.end_send(message, TransportError(f"tag {message.tag:#x}: injected failure"))
            elif rule.action == "truncate":
                message.data = message.data[: rule.nbytes]
            elif rule.action == "flip":
                message.data = _flipped(message.data, rule.bit)
            elif rule.action == "duplicate":
                self._fabric.deliver(
                    _Message(message.source, message.destination, message.tag, message.data.clone(), None)
                )
            elif rule.action == "hold":
                self._fabric.held.append(message)
        if message.sender is not None and not message.sender.ended and message not in self._fabric.held:
            self._fabric.deliver(message)

    def _consume(self, operation: Operation, arrival: Arrival) -> Operation:
        message = _message_of(arrival)
        if operation.kind == "receive" and self._unusable(operation):
            self._fabric.end_send(
                message, PeerLostError(f"{self._name} is not connected to {message.source}")
            )
        else:
            self._receives.append((operation, message))
            self._wake_up.set()
        return operation

    def _unusable(self, operation: Operation) -> bool:
        peer = operation.peer
        if peer in self._peers and peer not in self._lost:
            return False
        why = "is lost" if peer in self._lost else "is not connected"
        self.end(operation, PeerLostError(f"{operation.kind} tag {operation.tag:#x}: {peer} {why}"))
        return True

    def _part(self, peer: str, name: str, error: PeerLostError) -> None:
        """Ends all operations with `peer`, so that neither side accesses the other's memory afterwards.

        The peer is not notified: the peer's own operations end when the peer disconnects in turn, or when this
        transport dies.
        """
        for message in [message for message in self.wire if message.destination == name]:
            message.void = True
            self._fabric.end_send(message, error)
        for pair in [pair for pair in self._receives if pair[0].peer == peer]:
            self._receives.remove(pair)
            self.end(pair[0], error)
        self._fabric.held = [message for message in self._fabric.held if not message.void]

    def _ensure_open(self) -> None:
        if self._closed:
            raise ValueError(f"the in-process transport {self._name} is closed")


def _flipped(data: torch.Tensor, bit: int) -> torch.Tensor:
    flipped = data.clone()
    flipped[bit // 8 % data.numel()] ^= 1 << bit % 8
    return flipped


def _message_of(arrival: Arrival) -> _Message:
    assert isinstance(arrival.handle, _Message), "the tracker accepts only arrivals of this transport"
    return arrival.handle
