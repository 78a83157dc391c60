"""The listening side of a ZMQ channel: one ROUTER for each valid key generation, all on one port.

A ROUTER takes its CURVE server key at `bind`, and unbinding closes the connections that the ROUTER accepted. A key
rotation therefore opens a second ROUTER on the same port (SO_REUSEPORT), and existing connections continue. The
kernel distributes new connections over both ROUTERs. A peer whose handshake reaches the ROUTER of another generation
dials again (`transport.control.links`).

Each ROUTER accepts only the client key of its own generation. Closing a ROUTER therefore ends every connection made
with that generation.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from disagg.core.errors import ConfigError
from transport.keys.curve import ControlKeys

log = structlog.get_logger(__name__)

BACKLOG = 128


class _ClientKeys:
    """ZMQ's credentials provider. Each generation's ZAP domain is the generation's name; the domain accepts only that
    generation's client key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allowed: dict[str, bytes] = {}
        self.refused = 0

    def allow(self, generations: Sequence[ControlKeys]) -> None:
        """Sets the generations whose clients may connect."""
        with self._lock:
            self._allowed = {keys.name: keys.client_public.encode() for keys in generations}

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether a client key (Z85) is accepted. ZMQ calls this for each connection, on the authenticator's
        thread."""
        with self._lock:
            if self._allowed.get(domain) == key:
                return True
            self.refused += 1
        log.warning("control_client_refused", reason="the key does not belong to this cluster")
        return False


@dataclass(slots=True)
class _Door:
    keys: ControlKeys
    listener: socket.socket
    """The listening socket. ZMQ holds a duplicate of its file descriptor; `close` closes both."""
    router: zmq.Socket[bytes]

    def close(self) -> None:
        self.router.close()
        self.listener.close()


class Doors:
    """The ROUTERs of one channel. All methods run on the channel's thread, or before it starts."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        generations: Sequence[ControlKeys],
        *,
        max_frame_bytes: int,
        high_water_mark: int,
    ) -> None:
        """Listens on `host` and `port`; port 0 selects a free port. Raises `ConfigError` when listening fails."""
        self._context = context
        self._max_frame_bytes, self._high_water_mark = max_frame_bytes, high_water_mark
        self._host, self.port = host, port
        self._doors: list[_Door] = []
        self._clients = _ClientKeys()
        self._clients.allow(generations)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        try:
            for keys in generations:
                self._open(keys)
        except ConfigError:
            self.close()
            raise

    @property
    def routers(self) -> tuple[zmq.Socket[bytes], ...]:
        """The ROUTER sockets, for polling and reading."""
        return tuple(door.router for door in self._doors)

    @property
    def refused(self) -> int:
        """Number of connections refused because of an unknown client key."""
        return self._clients.refused

    def follow(self, generations: Sequence[ControlKeys]) -> None:
        """Sets the valid generations, and ends the connections of all others.

        Raises `ConfigError` when listening for a generation fails; the next call tries again.
        """
        self._clients.allow(generations)
        try:
            # Bind the new listeners before the old ones are closed: ZMQ releases a port with a delay, and only the
            # sockets of `_Door` can share the port.
            for keys in generations:
                if all(door.keys != keys for door in self._doors):
                    self._open(keys)
        finally:
            for door in [one for one in self._doors if one.keys not in generations]:
                if len(self._doors) > 1:  # keep the last ROUTER: it holds the port
                    self._doors.remove(door)
                    door.close()

    def close(self) -> None:
        """Stops listening and ends all connections."""
        while self._doors:
            self._doors.pop().close()
        self._authenticator.stop()

    def _open(self, keys: ControlKeys) -> None:
        listener = self.listen()
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            router.linger = 0
            router.set_hwm(self._high_water_mark)
            router.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
            router.curve_server = True
            router.curve_secretkey = keys.server_secret.encode()
            router.curve_publickey = keys.server_public.encode()
            router.zap_domain = keys.name.encode()
            self._authenticator.configure_curve_callback(keys.name, credentials_provider=self._clients)
            given = os.dup(listener.fileno())  # ZMQ closes the duplicate with the ROUTER
            try:
                router.setsockopt(zmq.USE_FD, given)
                router.bind(f"tcp://{self._host}:{self.port}")
            except zmq.ZMQError:
                os.close(given)
                raise
        except zmq.ZMQError as exc:
            router.close()
            listener.close()
            raise self._cannot_listen(exc) from exc
        self._doors.append(_Door(keys, listener, router))

    def listen(self) -> socket.socket:
        """Binds the port exclusively; during a rotation, a second listener of the same user shares the port."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._doors:
                for one in (listener, *(door.listener for door in self._doors)):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((self._host, self.port))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as exc:
            listener.close()
            raise self._cannot_listen(exc) from exc
        self.port = listener.getsockname()[1]
        return listener

    def _cannot_listen(self, exc: Exception) -> ConfigError:
        where = f"{self._host}:{self.port or 'any port'}"
        return ConfigError(f"the control channel cannot listen on {where}: {exc}")
