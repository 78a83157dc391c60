"""The contract of the control plane: small typed messages between named peers, exactly once and in order.

A peer's name is the address its channel listens on. What is sent either reaches the peer's handler once, in
the order of `send`, or `on_peer_lost` is called for that peer; there is no third outcome for a peer that
stays known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from transport.messages import Message

Handler = Callable[[str, Message], None]
"""Called as `handler(peer, message)` on the channel's own thread. It must not block: the channel stands still
meanwhile. What it raises is logged and counted, and the channel goes on."""

PeerLost = Callable[[str], None]
"""Called as `on_peer_lost(peer)` on the channel's own thread: the peer died, restarted, or cannot be reached.
Nothing of before arrives any more; a later `send` starts afresh."""

PeerMet = Callable[[str], None]
"""Called as `on_peer_met(peer)` on the channel's own thread: a watched peer was heard, for the first time or for the
first time since it was lost."""


@dataclass(frozen=True, slots=True)
class ControlStatistics:
    """Counts since the channel was made."""

    peers: int
    """Known now."""
    unacknowledged: int
    """Messages sent that no peer has confirmed yet, now."""
    sent: int
    """Messages accepted by `send`."""
    delivered: int
    """Messages given to the handler."""
    retransmitted: int
    """Envelopes sent again because no acknowledgement came."""
    duplicates: int
    """Envelopes dropped because their message was already delivered."""
    bad_frames: int
    """Frames dropped because they could not be read, or came from too many peers."""
    handler_errors: int
    """Exceptions that handlers raised, or the channel's own code (a bug: what it did is done again)."""
    peers_lost: int
    last_lost: str = ""
    """Peer and reason of the latest loss; empty when there was none."""
    clients_refused: int = 0
    """Connections refused because their key is not of this cluster."""
    handshakes_failed: int = 0
    """Connections of ours that a peer did not accept; each was dialed again."""


class ControlChannel(ABC):
    """One process's (or, in tests, one rank's) end of the control plane."""

    address: str
    """`tcp://host:port`, or a name on an in-process hub; also this channel's name as a peer."""

    @abstractmethod
    def start(
        self, handler: Handler, on_peer_lost: PeerLost, on_peer_met: PeerMet = lambda peer: None
    ) -> None:
        """Starts the channel's thread. Once."""

    @abstractmethod
    def send(self, peer: str, message: Message) -> None:
        """Queues a message; for any thread; never blocks. Order is kept per peer and sending thread.

        Raises `ProtocolError` when the message is too large. On a closed channel nothing happens.
        """

    @abstractmethod
    def watch(self, peer: str) -> None:
        """Keeps asking whether `peer` is alive, also while there is nothing to send, until lost or
        forgotten. Watched again after a loss, it is asked until it is there again.
        """

    @abstractmethod
    def forget(self, peer: str) -> None:
        """Drops all that is known of `peer`, messages on their way included. Calls nothing back.

        A peer that still talks to us learns of it as a lost peer of its own.
        """

    @abstractmethod
    def statistics(self) -> ControlStatistics:
        """Counts; see `ControlStatistics`."""

    @abstractmethod
    def check(self) -> None:
        """Raises `InvariantError`, with a dump, when the channel's own books do not agree."""

    @abstractmethod
    def close(self, linger_s: float = 0.0) -> None:
        """Stops the thread; no callback runs afterwards. Waits up to `linger_s` for acknowledgements
        first.
        """
