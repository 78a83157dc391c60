"""The contract of the data plane: moving bytes from one rank's memory into another rank's memory.

Receives are *matched on arrival*. A receiver polls `arrivals()`, derives the destination from the tag, and then calls
`receive`, or `discard` for a stale message. No receive is posted before its message has arrived or is announced, so
no receive has to be cancelled.

Every operation ends exactly once, `done` or `failed`, and `progress()` returns it once. An error of a peer or
the network ends an operation. A mistake of the caller (a wrong tensor, a tag out of range, a closed
transport) raises `ValueError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from disagg.core.errors import TransportError
from disagg.core.state_table import StateEnum

OperationKind = Literal["send", "receive", "discard"]


class OperationState(StateEnum):
    """State of an operation."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Operation:
    """One send, receive or discard. Only the transport creates and changes operations."""

    kind: OperationKind
    peer: str | None
    """Peer name given to `connect`; None for a discard whose sender is unknown."""
    tag: int
    nbytes: int
    context: object = None
    """An object of the caller, which the transport does not use."""
    state: OperationState = OperationState.PENDING
    error: TransportError | None = None
    """Error of a failed operation; None otherwise."""

    @property
    def ended(self) -> bool:
        """True once the operation is done or failed: the transport no longer accesses the operation's memory."""
        return self.state is not OperationState.PENDING


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A message that has arrived (eager) or is announced (rendezvous). One `receive` or one `discard`
    consumes it."""

    tag: int
    nbytes: int
    handle: object = field(repr=False)
    """The backend's own object for this message."""


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """Counts since the transport was created."""

    peers: int
    """Peers connected now, including lost peers that were not yet disconnected."""
    pending: int
    """Operations pending now."""
    registered_bytes: int
    """Size of the memory that is registered now."""
    arrivals: int
    """Messages returned by `arrivals()`."""
    sends_done: int
    sends_failed: int
    receives_done: int
    receives_failed: int
    discards_done: int
    discards_failed: int
    sent_bytes: int
    """Bytes of completed sends."""
    received_bytes: int
    """Bytes of completed receives."""


class Transport(ABC):
    """Moves bytes between ranks. One thread, the transfer thread, owns the transport; any thread may call `wake` and
    read `address`.

    All tensors are contiguous, one-dimensional, uint8, of at least one byte, and lie inside memory given to
    `register`. The caller keeps them alive, and a send's bytes unchanged, until the operation has ended.
    """

    name: ClassVar[str]
    """Name of the backend in `make_transport` and in the handshake."""

    @property
    @abstractmethod
    def address(self) -> bytes:
        """Opaque address that a peer passes to its `connect`."""

    @abstractmethod
    def connect(self, peer: str, address: bytes) -> None:
        """Connects to `peer`. A second call with the same address has no effect.

        Both sides connect to each other before bytes flow. Raises `TransportError` when the address cannot be
        used, or when `peer` is already connected with another address (disconnect it first).
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Fences `peer`: once this method returns, only the peer's pending operations still touch this rank's memory.

        Usually all operations with the peer have then ended with `PeerLostError`, and the next `progress` returns
        them. If a backend needs longer, `progress` continues the fence, and ends each operation once its memory is
        free. `disconnect` and `progress` raise `TransportError` when the fence cannot be proven in time. The rank
        must then end, and the memory of the pending operations must never be used again. An unknown name has no
        effect.

        The peer is not notified: its operations with this rank end when the peer disconnects in turn, or when
        this process ends. A peer's receive from this rank may even end `done` with bytes that this rank has
        overwritten after the fence. The caller therefore sends a control message that invalidates every segment
        the peer has not confirmed.
        """

    @abstractmethod
    def lost_peers(self) -> list[str]:
        """Returns the peers whose connection broke. Operations with a lost peer fail until `disconnect` and a new
        `connect`.

        A connection may break on one side only.
        """

    @abstractmethod
    def register(self, memory: torch.Tensor) -> None:
        """Registers a whole buffer, once, before its views are sent or received into."""

    @abstractmethod
    def deregister(self, memory: torch.Tensor) -> None:
        """Reverts `register`. Raises `ValueError` for unknown memory, or while a pending operation uses the
        memory."""

    @abstractmethod
    def send(self, peer: str, tag: int, view: torch.Tensor, context: object = None) -> Operation:
        """Starts sending `view`, uint8 `[nbytes]`. The operation fails if the peer is not connected or is
        lost.

        `done` means that the caller may overwrite the bytes, not that the bytes are in the peer's memory.
        """

    @abstractmethod
    def arrivals(self) -> list[Arrival]:
        """Returns the messages that arrived since the last call, each once, in order of arrival."""

    @abstractmethod
    def receive(self, peer: str, arrival: Arrival, into: torch.Tensor, context: object = None) -> Operation:
        """Starts moving the message's bytes into `into`, uint8 `[arrival.nbytes]`. Consumes the arrival even on
        failure.

        `peer` is the sender, which the caller derives from the tag: `disconnect(peer)` ends this operation.
        """

    @abstractmethod
    def discard(self, peer: str | None, arrival: Arrival) -> Operation:
        """Consumes a stale message and drops its bytes, which completes the sender's send."""

    @abstractmethod
    def progress(self) -> list[Operation]:
        """Advances the transport without blocking; returns the operations that ended since the last call.

        Raises `TransportError` when a fence cannot be proven; see `disconnect`.
        """

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Blocks until `progress` or `arrivals` may have a result, `wake` is called, or `timeout_s` has passed.

        Spurious early returns are possible. Never blocks while an ended operation or an arrival is available.
        """

    @abstractmethod
    def wake(self) -> None:
        """Ends the current or the next `wait`. Any thread may call this at any time, also after `close`."""

    @abstractmethod
    def statistics(self) -> TransportStatistics:
        """Returns counts since the transport was created."""

    @abstractmethod
    def check(self) -> None:
        """Raises `InvariantError`, with a dump, when the transport's internal state is inconsistent."""

    @abstractmethod
    def close(self) -> None:
        """Fences every peer and frees all resources. Pending operations fail. A second call has no effect."""
