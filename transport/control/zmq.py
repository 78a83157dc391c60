"""The control plane over ZMQ: listening ROUTERs on the channel's thread; under its lock, one DEALER for each peer.

Every connection is CURVE-encrypted, and ZMQ's ZAP checks the client's key before any frame is received.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
from collections.abc import Iterable
from dataclasses import replace

import structlog
import zmq

from disagg.core.config.read import ControlConfig
from disagg.core.errors import ConfigError, ProtocolError
from transport.alarm import Alarm
from transport.control.base import ControlStatistics
from transport.control.doors import Doors
from transport.control.links import Links
from transport.control.messages import MAX_MESSAGE_BYTES
from transport.control.reliable import MAX_PEERS, Envelope, ReliableOptions
from transport.control.thread import ThreadedControl, TurnPace, encode_envelope
from transport.hosts import own_host
from transport.keys.curve import ControlKeys
from transport.keys.ring import AnyKeys, as_ring

log = structlog.get_logger(__name__)

FLUSH_MS = 100
"""Time limit, at `close` with a linger time, for frames that ZMQ has queued, such as the last acknowledgement."""
HIGH_WATER_MARK = 20000
"""Largest number of frames that ZMQ queues for a peer. Further frames are dropped, and retransmitted by the reliable
streams."""
RECEIVE_BATCH = 512
MAX_STRAY_PEERS = 64
"""Largest number of connections kept to addresses without an open stream. Only resets were sent to these
addresses."""
_ADDRESS = re.compile(r"tcp://[^/:@;]+:\d{1,5}")
_WILDCARDS = ("*", "", "::", "[::]")
ENVELOPE_BYTES = 4096
"""Space for the envelope around the largest message."""
UNSETTLED_S, SETTLED_S = 0.02, 0.25
"""Intervals between checks of keys and handshakes: the first during a handshake, the second at other times.

`SETTLED_S` also bounds how late the channel's thread sees a retransmission that falls due because another thread has
sent a message, so it is less than `FIRST_RESEND_S`.
"""
_MAX_SOCKETS = 3 * MAX_PEERS + 64
"""Limit of ZMQ sockets: a DEALER and two monitor sockets per peer, and a few others. ZMQ allocates a pointer for each
socket."""


class ZmqControl(ThreadedControl):
    """A channel over TCP; see `ControlChannel`. Raises `ConfigError` when it cannot listen.

    The channel follows changes of `keys`. Existing connections stay when a generation is added, and end when their
    own generation is retired.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        keys: AnyKeys,
        options: ReliableOptions | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        pace: TurnPace | None = None,
    ) -> None:
        if host in _WILDCARDS or _is_any(host):
            raise ConfigError(
                f"control host {host!r} cannot be reached by peers; set control.host to the address of one interface"
            )
        self._keys = as_ring(keys)
        self._generations = self._keys.generations
        self._context = zmq.Context()
        self._context.max_sockets = _MAX_SOCKETS
        try:
            self._doors = Doors(
                self._context,
                host,
                port,
                self._generations,
                max_frame_bytes=max_message_bytes + ENVELOPE_BYTES,
                high_water_mark=HIGH_WATER_MARK,
            )
        except ConfigError:
            self._context.term()
            raise
        self.links = Links(self._context, self._generations, self._resend, HIGH_WATER_MARK)
        """Outgoing connections; used under the channel's lock."""
        self._look_at_s, self._complaint = 0.0, ""
        self._flush_ms = 0
        self._alarm = Alarm()
        self._poller = self._make_poller()
        address = f"tcp://{host}:{self._doors.port}"
        super().__init__(address, options or ReliableOptions(), max_message_bytes, pace=pace)

    def statistics(self) -> ControlStatistics:
        return replace(
            super().statistics(),
            clients_refused=self._doors.refused,
            handshakes_failed=self.links.failed_handshakes,
        )

    def close(self, linger_s: float = 0.0) -> None:
        started = self._thread.ident is not None
        self._flush_ms = min(FLUSH_MS, int(1e3 * linger_s))
        super().close(linger_s)
        if not started:
            self._released()

    # --- keys

    def _upkeep(self, now_s: float) -> None:
        if now_s < self._look_at_s:
            return
        generations = self._keys.generations
        if generations != self._generations:
            self._follow(generations)
        self.links.look()
        self._look_at_s = now_s + self._look_every_s()

    def _follow(self, generations: tuple[ControlKeys, ...]) -> None:
        try:
            self._doors.follow(generations)
            self._generations, self._complaint = generations, ""
        except ConfigError as exc:  # retried at the next check
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                log.error("control_keys_not_listened_for", channel=self.address, error=self._complaint)
        self._poller = self._make_poller()
        self.links.follow(generations)

    def _look_every_s(self) -> float:
        return UNSETTLED_S if self.links.unsettled else SETTLED_S

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for router in self._doors.routers:
            poller.register(router, zmq.POLLIN)
        poller.register(self._alarm.fd, zmq.POLLIN)
        return poller

    def _resend(self, peer: str, at_s: float) -> None:
        self._streams.resend_at(peer, at_s)

    # --- frames

    def _transmit(self, peer: str, envelope: Envelope) -> None:
        dealer = self._dealer(peer)
        if dealer is not None:
            with contextlib.suppress(
                zmq.Again
            ):  # the queue is full: retransmitted later, or the peer is lost
                dealer.send(encode_envelope(envelope), zmq.NOBLOCK)

    def _is_open(self, peer: str) -> bool:
        return self.links.is_open(peer)

    def _dealer(self, peer: str) -> zmq.Socket[bytes] | None:
        if not _ADDRESS.fullmatch(peer):
            self._bad_frame(ProtocolError(f"{peer[:100]!r} is not the address of a control channel"))
            return None
        if peer not in self.links:
            self._drop_strays()
            self._look_at_s = 0.0
        try:
            return self.links.socket(peer)
        except zmq.ZMQError as exc:
            self._bad_frame(ProtocolError(f"{peer} is not an address: {exc}"))
            return None

    def _drop_strays(self) -> None:
        strays = [peer for peer in self.links.peers if not self._streams.knows(peer)]
        for peer in strays[: max(0, len(strays) - MAX_STRAY_PEERS)]:
            self._hang_up(peer)

    def _frames(self) -> Iterable[bytes]:
        for router in self._doors.routers:
            for _ in range(RECEIVE_BATCH):
                try:
                    router.recv(zmq.NOBLOCK)  # the connection's identity
                except zmq.Again:
                    break
                frame = router.recv(copy=False)  # whole messages arrive, so this does not block
                if frame.more:
                    count = 2 + len(router.recv_multipart())
                    self._bad_frame(ProtocolError(f"a control message has 2 frames, not {count}"))
                else:
                    yield frame.bytes

    def _wait(self, timeout_s: float) -> None:
        self._poller.poll(int(min(timeout_s, self._look_every_s()) * 1000) + 1)
        self._alarm.clear()

    def _wake(self) -> None:
        self._alarm.wake()

    def _hang_up(self, peer: str) -> None:
        self.links.drop(peer)

    def _released(self) -> None:
        if self._alarm.closed:
            return
        self.links.close(self._flush_ms)
        self._alarm.close()
        self._doors.close()
        self._context.term()


def _is_any(host: str) -> bool:
    """Returns whether the system reads `host` as 0.0.0.0, which can also be written as `0` or `0x0`."""
    try:
        return socket.inet_aton(host) == bytes(4)
    except OSError:
        return False


def make_control(
    config: ControlConfig, keys: AnyKeys, port: int = 0, pace: TurnPace | None = None
) -> ZmqControl:
    """Creates the configured channel on this host; port 0 selects a free port. Raises `ConfigError` if the channel
    cannot listen."""
    options = ReliableOptions(config.peer_timeout_s, config.heartbeat_s, config.suspect_after_s or math.inf)
    largest = config.max_message_bytes
    host = own_host(config.host)
    return ZmqControl(host, port, keys=keys, options=options, max_message_bytes=largest, pace=pace)
