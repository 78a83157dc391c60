"""The dialing side of a ZMQ channel: one DEALER for each peer, with keys that the peer accepts.

A link first dials with the presented generation of the keys. After a failed handshake, the link dials with the next
valid generation. A handshake fails if the peer has reloaded its keys earlier or later, or if the kernel has selected
the peer's listener for another generation. An established link keeps its generation until that generation is retired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from transport.keys.curve import ControlKeys

log = structlog.get_logger(__name__)

HANDSHAKE_S = 2.0
"""Longest expected handshake. A peer that needs more time counts as absent, and its link is polled less often."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0
"""First and longest backoff between dialing rounds; each round doubles the backoff. A round dials once with each
valid generation."""
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REASONS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the peer closed the connection: its server key differs",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the peer uses another protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the peer refused the client key",
}
_WATCHED = _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED


@dataclass(slots=True)
class _Link:
    keys: ControlKeys
    dealer: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    """Socket for handshake events; open while the link could dial with another generation."""
    failures: int = 0
    """Number of consecutive failed handshakes."""
    dial_at_s: float = 0.0

    def drop(self) -> None:
        """Closes the connection and discards its queue; reliable streams retransmit the discarded messages."""
        self.unwatch()
        if self.dealer is not None:
            self.dealer.close()
            self.dealer = None

    def linger(self, flush_ms: int) -> None:
        """Sets how long the end of the ZMQ context waits for this link's queued frames. Call before `drop`."""
        if self.dealer is not None:
            self.dealer.linger = flush_ms

    def watch(self) -> None:
        if self.dealer is not None and self.monitor is None:
            self.monitor = self.dealer.get_monitor_socket(_WATCHED)

    def unwatch(self) -> None:
        if self.dealer is not None and self.monitor is not None:
            self.dealer.disable_monitor()
            self.monitor.close()
            self.monitor = None


class Links:
    """The DEALERs of one channel. All methods run under the channel's lock."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        generations: Sequence[ControlKeys],
        resend_at: Callable[[str, float], None],
        high_water_mark: int,
    ) -> None:
        """`resend_at(peer, at_s)` schedules retransmission of the unacknowledged messages to `peer` at `at_s`."""
        self._context, self._generations, self._resend_at = context, tuple(generations), resend_at
        self._high_water_mark = high_water_mark
        self._links: dict[str, _Link] = {}
        self._in_handshake: set[str] = set()
        self._dialed_s = 0.0
        self.failed_handshakes = 0

    @property
    def peers(self) -> tuple[str, ...]:
        """Peers that have a link, in the order in which they were first dialed."""
        return tuple(self._links)

    def __contains__(self, peer: str) -> bool:
        """Returns whether the peer has a link."""
        return peer in self._links

    def is_open(self, peer: str) -> bool:
        """Returns whether `socket` returns the peer's DEALER without dialing."""
        link = self._links.get(peer)
        return link is not None and link.dealer is not None

    @property
    def unsettled(self) -> bool:
        """Whether a handshake is in progress, and the latest handshake began less than `HANDSHAKE_S` ago."""
        return bool(self._in_handshake) and time.monotonic() - self._dialed_s < HANDSHAKE_S

    def socket(self, peer: str) -> zmq.Socket[bytes] | None:
        """Returns the peer's DEALER, connected on first use; None during the backoff after failed handshakes.

        Raises `zmq.ZMQError` for an address that cannot be dialed.
        """
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Link(self._generations[0])
        if link.dealer is None and time.monotonic() >= link.dial_at_s:
            try:
                self._dial(peer, link)
            except zmq.ZMQError:
                self.drop(peer)
                raise
        return link.dealer

    def follow(self, generations: Sequence[ControlKeys]) -> None:
        """Sets the valid generations. Links whose generation is no longer valid dial again."""
        self._generations = tuple(generations)
        for peer, link in self._links.items():
            if link.keys not in self._generations:
                link.drop()
                self._in_handshake.discard(peer)
                link.keys, link.failures = self._generations[0], 0
                self._resend_at(peer, time.monotonic())
            elif len(self._generations) > 1:
                link.watch()  # dials again if the peer retires this generation earlier

    def look(self) -> None:
        """Processes handshake events. A link whose handshake failed dials with the next generation."""
        for peer, link in self._links.items():
            while link.monitor is not None and link.monitor.poll(0):
                event = zmq.Event(recv_monitor_message(link.monitor)["event"])
                if event & _FAILED:
                    self._failed(peer, link, event)
                else:
                    self._succeeded(peer, link)

    def drop(self, peer: str) -> None:
        """Closes and removes the peer's link."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.drop()
            self._in_handshake.discard(peer)

    def close(self, flush_ms: int) -> None:
        """Closes all links. The end of the ZMQ context waits up to `flush_ms` for their queued frames."""
        for peer in self.peers:
            self._links[peer].linger(flush_ms)
            self.drop(peer)

    def _dial(self, peer: str, link: _Link) -> None:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        link.dealer, self._dialed_s = dealer, time.monotonic()
        self._in_handshake.add(peer)
        dealer.linger = 0
        dealer.set_hwm(self._high_water_mark)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        dealer.curve_serverkey = link.keys.server_public.encode()
        dealer.curve_publickey = link.keys.client_public.encode()
        dealer.curve_secretkey = link.keys.client_secret.encode()
        link.watch()  # before connect: no event is missed
        dealer.connect(peer)

    def _failed(self, peer: str, link: _Link, event: zmq.Event) -> None:
        link.drop()
        self._in_handshake.discard(peer)
        self.failed_handshakes += 1
        link.failures += 1
        valid = self._generations
        link.keys = valid[(valid.index(link.keys) + 1) % len(valid)]
        rounds, tried = divmod(link.failures, len(valid))
        now_s = time.monotonic()
        pause_s = 0.0 if tried else min(FIRST_PAUSE_S * 2 ** min(rounds - 1, 8), LAST_PAUSE_S)
        link.dial_at_s = now_s + pause_s
        if not tried and rounds > 1:
            log.warning(
                "control_handshake_failed",
                peer=peer,
                reason=_REASONS[event],
                hint="control.key_file must hold the same keys on both sides",
            )
        self._resend_at(peer, link.dial_at_s)

    def _succeeded(self, peer: str, link: _Link) -> None:
        again, link.failures = link.failures > 0, 0
        self._in_handshake.discard(peer)
        if len(self._generations) == 1:
            link.unwatch()
        if again:
            self._resend_at(peer, time.monotonic())
