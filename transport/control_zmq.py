"""The control plane over ZMQ: one ROUTER that listens, one DEALER for each peer, all on the channel's thread.

With keys every connection is CURVE-encrypted, and ZMQ's ZAP asks for the client's key before a frame comes in.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from disagg.core.config import ControlConfig
from disagg.core.errors import ConfigError, ProtocolError
from transport.control_thread import ThreadedControl, encode_envelope
from transport.hosts import own_host
from transport.keys import ControlKeys
from transport.messages import MAX_MESSAGE_BYTES
from transport.reliable import Envelope, ReliableOptions

ZAP_DOMAIN = "disagg"
HIGH_WATER_MARK = 20000
"""Frames that ZMQ queues for a peer; more are dropped there and sent again by the reliable streams."""
RECEIVE_BATCH = 512
MAX_STRAY_PEERS = 64
"""Connections kept to addresses that no stream is open with: we only told them that we do not know them."""
_ADDRESS = re.compile(r"tcp://[^/:@;]+:\d{1,5}")
_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")
ENVELOPE_BYTES = 4096
"""Room for the envelope around the largest message."""


class _OneKey:
    """ZMQ's credentials provider: exactly one client key is let in."""

    def __init__(self, client_public: str) -> None:
        self._allowed = client_public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked for every connection; `key` is in Z85."""
        return key == self._allowed


class ZmqControl(ThreadedControl):
    """A channel on TCP; see `ControlChannel`. Raises `ConfigError` when it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        keys: ControlKeys | None = None,
        options: ReliableOptions | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        if host in _WILDCARDS:
            raise ConfigError(f"control host {host!r} is no address that peers can reach; name one interface")
        self._keys = keys
        self._context = zmq.Context()
        self._authenticator = self._authenticate() if keys else None
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + ENVELOPE_BYTES)
        try:
            if keys:
                self._router.curve_server = True
                self._router.curve_secretkey = keys.server_secret.encode()
                self._router.curve_publickey = keys.server_public.encode()
                self._router.zap_domain = ZAP_DOMAIN.encode()
            self._router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as exc:
            self._free()
            raise ConfigError(
                f"the control channel cannot listen on {host}:{port or 'any port'}: {exc}"
            ) from exc
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        super().__init__(f"tcp://{host}:{bound}", options or ReliableOptions(), max_message_bytes)

    def close(self, linger_s: float = 0.0) -> None:
        started = self._thread.ident is not None
        super().close(linger_s)
        if not started:
            self._released()

    def _authenticate(self) -> ThreadAuthenticator:
        assert self._keys is not None, "only a channel with keys authenticates"
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback(
            ZAP_DOMAIN, credentials_provider=_OneKey(self._keys.client_public)
        )
        return authenticator

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(HIGH_WATER_MARK)
        return socket

    def _transmit(self, peer: str, envelope: Envelope) -> None:
        dealer = self._dealers.get(peer) or self._connect(peer)
        if dealer is None:
            return
        try:
            dealer.send(encode_envelope(envelope), zmq.NOBLOCK)
        except zmq.Again:
            return  # full: sent again later, or the peer is lost

    def _connect(self, peer: str) -> zmq.Socket[bytes] | None:
        if not _ADDRESS.fullmatch(peer):
            self._bad_frame(ProtocolError(f"{peer[:100]!r} is no address of a control channel"))
            return None
        self._drop_strays()
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            if self._keys:
                dealer.curve_serverkey = self._keys.server_public.encode()
                dealer.curve_publickey = self._keys.client_public.encode()
                dealer.curve_secretkey = self._keys.client_secret.encode()
            dealer.connect(peer)
        except zmq.ZMQError as exc:
            dealer.close()
            self._bad_frame(ProtocolError(f"{peer} is no address: {exc}"))
            return None
        self._dealers[peer] = dealer
        return dealer

    def _drop_strays(self) -> None:
        strays = [peer for peer in self._dealers if not self._streams.knows(peer)]
        for peer in strays[: max(0, len(strays) - MAX_STRAY_PEERS)]:
            self._hang_up(peer)

    def _frames(self) -> Iterable[bytes]:
        for _ in range(RECEIVE_BATCH):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                yield frames[1]
            else:
                self._bad_frame(ProtocolError(f"a control message has 2 frames, not {len(frames)}"))

    def _wait(self, timeout_s: float) -> None:
        self._poller.poll(int(timeout_s * 1000) + 1)
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _hang_up(self, peer: str) -> None:
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            dealer.close()  # with what is still queued: it belongs to streams that are dead

    def _released(self) -> None:
        if self._wake_fd < 0:
            return
        for peer in list(self._dealers):
            self._hang_up(peer)
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._free()

    def _free(self) -> None:
        self._router.close()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()


def make_control(config: ControlConfig, keys: ControlKeys | None, port: int = 0) -> ZmqControl:
    """A channel as configured, on this host; port 0 takes a free one. Raises `ConfigError` when it cannot listen."""
    options = ReliableOptions(peer_timeout_s=config.peer_timeout_s, heartbeat_s=config.heartbeat_s)
    largest = config.max_message_bytes
    host = own_host(config.host)
    return ZmqControl(host, port, keys=keys, options=options, max_message_bytes=largest)
