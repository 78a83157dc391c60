"""The contract of the data plane: moving bytes from one rank's staging memory into another's.

Receives are *matched on arrival*. A receiver never asks for a message before it is there: it polls
`arrivals()`, decides from the tag where the bytes belong, and only then calls `receive` (or `discard` for
what is stale). So nothing ever waits for a message that may not come, and nothing has to be cancelled.

Every operation ends exactly once, `done` or `failed`, and is handed out once by `progress()`. What a peer or
the network can cause ends an operation; only the caller's own mistakes (a wrong tensor, a tag out of range, a
closed transport) raise `ValueError`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from disagg.core.errors import TransportError

OperationKind = Literal["send", "receive", "discard"]


class OperationState(enum.Enum):
    """Where an operation stands."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Operation:
    """One send, receive or discard. Made and changed by the transport only; others read it."""

    kind: OperationKind
    peer: str | None
    """Name given to `connect`; None for a discard whose sender is not known."""
    tag: int
    nbytes: int
    context: object = None
    """The caller's, untouched."""
    state: OperationState = OperationState.PENDING
    error: TransportError | None = None
    """Why it failed; None otherwise."""

    @property
    def ended(self) -> bool:
        """True once done or failed: from then on the transport does not touch its memory."""
        return self.state is not OperationState.PENDING


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A message that is here (eager) or announced (rendezvous). Ends with one `receive` or one `discard`."""

    tag: int
    nbytes: int
    handle: object = field(repr=False)
    """The backend's; opaque."""


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """Counts since the transport was made."""

    peers: int
    """Connected now (lost ones that were not yet disconnected included)."""
    pending: int
    """Operations that have not ended now."""
    registered_bytes: int
    """Memory registered now."""
    arrivals: int
    """Messages handed out by `arrivals()`."""
    sends_done: int
    sends_failed: int
    receives_done: int
    receives_failed: int
    discards_done: int
    discards_failed: int
    sent_bytes: int
    """Of sends that are done."""
    received_bytes: int
    """Of receives that are done."""


class Transport(ABC):
    """Moves bytes between ranks. Owned by ONE thread, the transfer thread; only `wake` and `address` are for
    any.

    All tensors are contiguous, one-dimensional, uint8, of at least one byte, and lie inside memory given to
    `register`. The caller keeps them alive and a send's bytes unchanged until the operation has ended.
    """

    name: ClassVar[str]
    """Word by which `make_transport` and the handshake know the backend."""

    @property
    @abstractmethod
    def address(self) -> bytes:
        """What a peer passes to its `connect`. Opaque."""

    @abstractmethod
    def connect(self, peer: str, address: bytes) -> None:
        """Makes `peer` known under that name. Again with the same address: nothing happens.

        Both sides connect to each other before bytes flow. Raises `TransportError` when the address cannot be
        used, or when `peer` is already connected with another address (disconnect it first).
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Fences `peer`: when this returns, no operation with it touches our memory any more.

        Its pending operations have ended with `PeerLostError` (the next `progress` hands them out). An
        unknown name is accepted. Raises `TransportError` when the fence cannot be proven; the memory of the
        operations still pending must then never be used again.

        The peer is not told: its operations with us end when it disconnects us in turn, or when this process
        ends. A peer that was reading our memory may even end its receive done, with bytes that we have
        overwritten since: tell it over the control channel that what it has not confirmed is void.
        """

    @abstractmethod
    def register(self, memory: torch.Tensor) -> None:
        """Declares a whole buffer from which views are sent or into which they are received. Once per
        buffer.
        """

    @abstractmethod
    def deregister(self, memory: torch.Tensor) -> None:
        """Takes back `register`. Raises `ValueError` for unknown memory or while a pending operation uses
        it.
        """

    @abstractmethod
    def send(self, peer: str, tag: int, view: torch.Tensor, context: object = None) -> Operation:
        """Starts sending `view`, uint8 `[nbytes]`. To a peer that is not connected or lost it ends failed.

        `done` means that the bytes may be overwritten; it does not mean that they are in the peer's memory.
        """

    @abstractmethod
    def arrivals(self) -> list[Arrival]:
        """Messages that came since the last call, each handed out once, in order of arrival."""

    @abstractmethod
    def receive(self, peer: str, arrival: Arrival, into: torch.Tensor, context: object = None) -> Operation:
        """Starts moving the bytes into `into`, uint8 `[arrival.nbytes]`. Consumes the arrival even if it
        fails.

        `peer` is the sender (the caller knows it from the tag): `disconnect(peer)` ends this operation.
        """

    @abstractmethod
    def discard(self, peer: str | None, arrival: Arrival) -> Operation:
        """Consumes a stale message without keeping its bytes, so that its sender's send ends."""

    @abstractmethod
    def progress(self) -> list[Operation]:
        """Drives the transport without blocking; returns the operations that ended since the last call."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Blocks until `progress` or `arrivals` may have news, `wake` was called, or `timeout_s` passed.

        May return early for no reason; never sleeps through news.
        """

    @abstractmethod
    def wake(self) -> None:
        """Ends the current or the next `wait`. For any thread, at any time, also after `close`."""

    @abstractmethod
    def statistics(self) -> TransportStatistics:
        """Counts; see `TransportStatistics`."""

    @abstractmethod
    def check(self) -> None:
        """Raises `InvariantError`, with a dump, when the transport's own books do not agree."""

    @abstractmethod
    def close(self) -> None:
        """Fences every peer and frees everything. Pending operations end failed. Again: nothing happens."""
