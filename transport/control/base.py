"""The contract of the control plane: small typed messages between named peers, exactly once and in order.

A peer's name is the address on which its channel listens. A sent message either reaches the peer's handler once, in
the order of `send`, or `on_peer_lost` is called for that peer. After `forget`, messages can be dropped without this
call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from transport.control.messages import Message

Handler = Callable[[str, Message], None]
"""Callback `handler(peer, message)` for received messages, on the channel's own thread. A handler must not block,
because a blocked handler stops the channel. Exceptions are logged and counted, and the channel continues."""

PeerLost = Callable[[str], None]
"""Callback `on_peer_lost(peer)`, on the channel's own thread: the peer died, restarted, or cannot be reached. No
earlier message of the peer is delivered afterwards; a later `send` starts a new stream."""

PeerMet = Callable[[str], None]
"""Callback `on_peer_met(peer)`, on the channel's own thread: a watched peer is reachable in both directions. The
callback runs when the peer is first reached, and once more after each loss."""

PeerSuspected = Callable[[str, bool], None]
"""Callback `on_peer_suspected(peer, silent)`, on the channel's own thread. `silent` is True when a watched peer has
been silent for a part of the peer timeout, and False when the peer sends again. For a silent peer that is lost, only
`on_peer_lost` follows."""


@dataclass(frozen=True, slots=True)
class ControlStatistics:
    """Counts since the channel was created."""

    peers: int
    """Number of peers for which the channel keeps state now."""
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
    """Exceptions raised by handlers, or by the channel itself: each is a bug. Only the channel's own work is
    retried."""
    peers_lost: int
    last_lost: str = ""
    """Peer and reason of the latest loss; empty when no peer was lost."""
    refused: int = 0
    """Envelopes of stale or unknown streams, refused with a reset."""
    clients_refused: int = 0
    """Connections refused because their key does not belong to this cluster."""
    handshakes_failed: int = 0
    """Outgoing connections that a peer refused; the channel dialed each one again."""


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
        """Starts the channel's thread. Call this method once."""

    @abstractmethod
    def call_soon(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the channel's own thread; any thread may call this; never blocks.

        The call has no effect on a closed channel.
        """

    @abstractmethod
    def send(self, peer: str, message: Message) -> None:
        """Sends or queues a message; any thread may call this; never blocks. Order is kept per peer and sending
        thread.

        Raises `ProtocolError` when the message is too large. The call has no effect on a closed channel.
        """

    @abstractmethod
    def cork(self) -> None:
        """Lets messages wait until `uncork`, so that several messages are transmitted together.

        The channel's thread may still send the messages before `uncork`. Only one thread of the process may cork, for
        at most a few milliseconds.
        """

    @abstractmethod
    def uncork(self) -> None:
        """Ends `cork`: transmits all messages sent since then."""

    @abstractmethod
    def watch(self, peer: str) -> None:
        """Watches `peer`: pings it regularly, even without messages to send, until `peer` is lost or forgotten.

        A call after a loss starts the pings again.
        """

    @abstractmethod
    def forget(self, peer: str) -> None:
        """Drops all state of `peer`, including unsent and unacknowledged messages. Calls no callback.

        If the peer continues to send, the peer detects the loss of this channel.
        """

    @abstractmethod
    def statistics(self) -> ControlStatistics:
        """Returns counts since the channel was created."""

    @abstractmethod
    def check(self) -> None:
        """Raises `InvariantError`, with a dump, when the channel's internal state is inconsistent."""

    @abstractmethod
    def close(self, linger_s: float = 0.0) -> None:
        """Waits up to `linger_s` until both sides have acknowledged all messages, then stops the thread. No callback
        runs afterwards."""
