"""The control plane over ZMQ: ROUTERs that listen, one DEALER for each peer, all on the channel's thread.

Every connection is CURVE-encrypted, and ZMQ's ZAP checks the client's key before a frame comes in.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import replace

import structlog
import zmq

from disagg.core.config import ControlConfig
from disagg.core.errors import ConfigError, ProtocolError
from transport.control import ControlStatistics
from transport.control_doors import Doors
from transport.control_links import Links
from transport.control_thread import ThreadedControl, encode_envelope
from transport.hosts import own_host
from transport.key_ring import AnyKeys, as_ring
from transport.keys import ControlKeys
from transport.messages import MAX_MESSAGE_BYTES
from transport.reliable import MAX_PEERS, Envelope, ReliableOptions

log = structlog.get_logger(__name__)

HIGH_WATER_MARK = 20000
"""Frames that ZMQ queues for a peer; more are dropped there and sent again by the reliable streams."""
RECEIVE_BATCH = 512
MAX_STRAY_PEERS = 64
"""Connections kept to addresses that no stream is open with: we only told them that we do not know them."""
_ADDRESS = re.compile(r"tcp://[^/:@;]+:\d{1,5}")
_WILDCARDS = ("*", "", "::", "[::]")
ENVELOPE_BYTES = 4096
"""Room for the envelope around the largest message."""
UNSETTLED_S, SETTLED_S = 0.02, 0.25
"""Pauses between two looks at keys and handshakes: while a handshake is under way, and else."""
_MAX_SOCKETS = 3 * MAX_PEERS + 64
"""A DEALER for each peer, two sockets of its monitor, and a few of our own; ZMQ reserves a pointer for each."""


class ZmqControl(ThreadedControl):
    """A channel on TCP; see `ControlChannel`. Raises `ConfigError` when it cannot listen.

    It follows `keys`: connections stay when generations are added, and end with the generation that they were made
    with.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        keys: AnyKeys,
        options: ReliableOptions | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        if host in _WILDCARDS or _is_any(host):
            raise ConfigError(f"control host {host!r} is no address that peers can reach; name one interface")
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
        self._links = Links(self._context, self._generations, self._resend, HIGH_WATER_MARK)
        self._look_at_s, self._complaint = 0.0, ""
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = self._make_poller()
        address = f"tcp://{host}:{self._doors.port}"
        super().__init__(address, options or ReliableOptions(), max_message_bytes)

    def statistics(self) -> ControlStatistics:
        return replace(
            super().statistics(),
            clients_refused=self._doors.refused,
            handshakes_failed=self._links.failed_handshakes,
        )

    def close(self, linger_s: float = 0.0) -> None:
        started = self._thread.ident is not None
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
        self._links.look()
        self._look_at_s = now_s + self._look_every_s()

    def _follow(self, generations: tuple[ControlKeys, ...]) -> None:
        try:
            self._doors.follow(generations)
            self._generations, self._complaint = generations, ""
        except ConfigError as exc:  # tried again at the next look
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                log.error("control_keys_not_listened_for", channel=self.address, error=self._complaint)
        self._poller = self._make_poller()
        self._links.follow(generations)

    def _look_every_s(self) -> float:
        return UNSETTLED_S if self._links.unsettled else SETTLED_S

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for router in self._doors.routers:
            poller.register(router, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        return poller

    def _resend(self, peer: str, at_s: float) -> None:
        with self._lock:
            self._streams.hurry(peer, at_s)

    # --- frames

    def _transmit(self, peer: str, envelope: Envelope) -> None:
        dealer = self._dealer(peer)
        if dealer is not None:
            with contextlib.suppress(zmq.Again):  # full: sent again later, or the peer is lost
                dealer.send(encode_envelope(envelope), zmq.NOBLOCK)

    def _dealer(self, peer: str) -> zmq.Socket[bytes] | None:
        if not _ADDRESS.fullmatch(peer):
            self._bad_frame(ProtocolError(f"{peer[:100]!r} is no address of a control channel"))
            return None
        if peer not in self._links:
            self._drop_strays()
            self._look_at_s = 0.0
        try:
            return self._links.socket(peer)
        except zmq.ZMQError as exc:
            self._bad_frame(ProtocolError(f"{peer} is no address: {exc}"))
            return None

    def _drop_strays(self) -> None:
        strays = [peer for peer in self._links.peers if not self._streams.knows(peer)]
        for peer in strays[: max(0, len(strays) - MAX_STRAY_PEERS)]:
            self._hang_up(peer)

    def _frames(self) -> Iterable[bytes]:
        for router in self._doors.routers:
            for _ in range(RECEIVE_BATCH):
                try:
                    frames = router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(frames) == 2:
                    yield frames[1]
                else:
                    self._bad_frame(ProtocolError(f"a control message has 2 frames, not {len(frames)}"))

    def _wait(self, timeout_s: float) -> None:
        self._poller.poll(int(min(timeout_s, self._look_every_s()) * 1000) + 1)
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _hang_up(self, peer: str) -> None:
        self._links.drop(peer)

    def _released(self) -> None:
        if self._wake_fd < 0:
            return
        self._links.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._doors.close()
        self._context.term()


def _is_any(host: str) -> bool:
    """Whether the system takes it for 0.0.0.0: `0` and `0x0` are spellings of it."""
    try:
        return socket.inet_aton(host) == bytes(4)
    except OSError:
        return False


def make_control(config: ControlConfig, keys: AnyKeys, port: int = 0) -> ZmqControl:
    """A channel as configured, on this host; port 0 takes a free one. Raises `ConfigError` when it cannot listen."""
    options = ReliableOptions(peer_timeout_s=config.peer_timeout_s, heartbeat_s=config.heartbeat_s)
    largest = config.max_message_bytes
    host = own_host(config.host)
    return ZmqControl(host, port, keys=keys, options=options, max_message_bytes=largest)
