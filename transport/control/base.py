"""The contract of the control plane: small typed messages between named peers, exactly once and in order.

A peer's name is the address on which its channel listens. A sent message either reaches the peer's handler once, in
the order of `send`, or `on_peer_lost` is called for that peer. A message is dropped without either only after
`forget`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from transport.control.messages import Message

Handler = Callable[[str, Message], None]
"""Callback `handler(peer, message)` for received messages, on the channel's own thread. A handler must not block,
because the channel waits for it. Exceptions are logged and counted, and the channel continues."""

PeerLost = Callable[[str], None]
"""Callback `on_peer_lost(peer)`, on the channel's own thread: the peer died, restarted, or cannot be reached. No
earlier message of the peer is delivered afterwards; a later `send` starts a new stream."""

PeerMet = Callable[[str], None]
"""Callback `on_peer_met(peer)`, on the channel's own thread: a watched peer is reachable in both directions. The
callback runs when the peer is first reached, and once more after each loss."""

PeerSuspected = Callable[[str, bool], None]
"""Callback `on_peer_suspected(peer, silent)`, on the channel's own thread. `silent` is True when a watched peer has
been silent for a part of the peer timeout, and False when the peer sends again. A loss ends a suspicion without a
further call."""


@dataclass(frozen=True, slots=True)
class ControlStatistics:
    """Counts since the channel was created."""

    peers: int
    """Peers known now."""
    unacknowledged: int
    """Sent messages that are not acknowledged now."""
    sent: int
    """Messages accepted by `send`."""
    delivered: int
    """Messages passed to the handler."""
    retransmitted: int
    """Envelopes retransmitted because no acknowledgement arrived."""
    duplicates: int
    """Envelopes dropped because their message was already delivered."""
    bad_frames: int
    """Frames dropped because they could not be decoded, or because the peer table was full."""
    handler_errors: int
    """Exceptions raised by handlers or by the channel itself (a bug; the work is retried)."""
    peers_lost: int
    last_lost: str = ""
    """Peer and reason of the latest loss; empty when no peer was lost."""
    refused: int = 0
    """Envelopes of stale or unknown streams, refused with a reset."""
    clients_refused: int = 0
    """Connections refused because their key does not belong to this cluster."""
    handshakes_failed: int = 0
    """Outgoing connections that a peer refused; each was dialed again."""


class ControlChannel(ABC):
    """The control-plane endpoint of one process (in tests, of one rank)."""

    address: str
    """Address of this channel, also its name as a peer: `tcp://host:port`, or a name on an in-process hub."""

    @abstractmethod
    def start(
        self,
        handler: Handler,
        on_peer_lost: PeerLost,
        on_peer_met: PeerMet = lambda peer: None,
        on_peer_suspected: PeerSuspected = lambda peer, silent: None,
    ) -> None:
        """Starts the channel's thread. Call it once."""

    @abstractmethod
    def call_soon(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the channel's own thread; any thread may call this; never blocks.

        On a closed channel, it has no effect.
        """

    @abstractmethod
    def send(self, peer: str, message: Message) -> None:
        """Queues a message; any thread may call it; never blocks. Order is kept per peer and sending thread.

        Raises `ProtocolError` when the message is too large. On a closed channel, it has no effect.
        """

    @abstractmethod
    def cork(self) -> None:
        """Until `uncork`, messages do not wake the channel's thread, which may still send them earlier.

        Only one thread of the process may cork, for at most a few milliseconds.
        """

    @abstractmethod
    def uncork(self) -> None:
        """Ends `cork`: wakes the thread once for all messages."""

    @abstractmethod
    def watch(self, peer: str) -> None:
        """Pings `peer` regularly until `peer` is lost or forgotten, even when there is no message to send.

        A call after a loss starts the pings again.
        """

    @abstractmethod
    def forget(self, peer: str) -> None:
        """Drops all state of `peer`, including unsent and unacknowledged messages. Calls no callback.

        If the peer continues to send, it sees this channel as a lost peer.
        """

    @abstractmethod
    def statistics(self) -> ControlStatistics:
        """Returns counts since the channel was created."""

    @abstractmethod
    def check(self) -> None:
        """Raises `InvariantError`, with a dump, when the channel's internal state is inconsistent."""

    @abstractmethod
    def close(self, linger_s: float = 0.0) -> None:
        """Waits up to `linger_s` for acknowledgements of both sides, then stops the thread. No callback runs
        afterwards."""
