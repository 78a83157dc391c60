"""Accepts connections, and lets only holders of the cluster's keys in.

Each handshake has a thread of its own and a deadline, so none waits for another. Of connections that are not
authenticated yet only few are kept: beyond the bound the oldest one goes, of the address that has most.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog

from disagg.core.errors import ConfigError, ProtocolError
from transport.tls_frames import FrameReader, Hello
from transport.tls_identity import Contexts, Identities
from transport.tls_stream import TlsStream, make_stream

log = structlog.get_logger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MAX_HANDSHAKES = 256
MAX_HANDSHAKES_PER_ADDRESS = 64
_BACKLOG = 256
_LOG_INTERVAL_S = 10.0
_PAUSE_S = 0.05
"""After an `accept` that failed for want of descriptors."""
OnConnection = Callable[[Hello, TlsStream, FrameReader], None]
"""Takes an authenticated connection and its hello; runs as long as the connection lasts, and frees the stream."""


class Listener:
    """One listening socket on `host` and a free port. Raises `ConfigError` when `host` cannot be bound."""

    def __init__(self, host: str, identities: Identities, on_connection: OnConnection) -> None:
        self._identities, self._on_connection = identities, on_connection
        try:
            family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = _listening(family, where)
        except OSError as exc:
            raise ConfigError(
                f"transport tls cannot listen on {host}: {exc.strerror}; set control.host to an address of this host"
            ) from exc
        self.port = int(self._socket.getsockname()[1])
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._handshakes: dict[TlsStream, str] = {}
        """Not authenticated yet, oldest first, with their address."""
        self._threads = 0
        self._closed = False
        self.refused = 0
        """Connections that ended before they were authenticated."""
        self._log_after_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"tls-accept-{self.port}", daemon=True)

    def start(self) -> None:
        """Begins to accept."""
        self._thread.start()

    @property
    def handshakes(self) -> int:
        """Connections that are not authenticated yet."""
        with self._lock:
            return len(self._handshakes)

    def close(self, timeout_s: float) -> bool:
        """Ends the socket and every handshake; whether all threads ended, those of connections included."""
        with self._lock:
            self._closed = True
            for stream in self._handshakes:
                stream.shut()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._socket.close()
        with self._quiet:
            return self._quiet.wait_for(lambda: self._threads == 0, timeout_s)

    def _run(self) -> None:
        while not self._closed:
            try:
                raw, where = self._socket.accept()
            except OSError as exc:
                if not self._closed:
                    self._refuse("", exc)
                    time.sleep(_PAUSE_S)
                continue
            try:
                self._admit(raw, str(where[0]))
            except (OSError, RuntimeError) as exc:  # the peer is gone again, or the system has no thread left
                raw.close()
                self._refuse(str(where[0]), exc)

    def _admit(self, raw: socket.socket, host: str) -> None:
        contexts = self._identities.contexts
        stream = make_stream(raw, contexts, True)
        with self._lock:
            if self._closed:
                stream.close()
                return
            self._make_room(host)
            self._handshakes[stream] = host
            self._threads += 1
        try:
            threading.Thread(
                target=self._serve, args=(stream, contexts, host), name="tls-accepted", daemon=True
            ).start()
        except RuntimeError:
            self._forget(stream)
            self._left()
            raise

    def _make_room(self, host: str) -> None:
        counts = Counter(self._handshakes.values())
        if counts[host] >= MAX_HANDSHAKES_PER_ADDRESS:
            crowded = host
        elif len(self._handshakes) >= MAX_HANDSHAKES:
            crowded = counts.most_common(1)[0][0]
        else:
            return
        oldest = next(stream for stream, address in self._handshakes.items() if address == crowded)
        del self._handshakes[oldest]
        oldest.shut()  # its thread frees it

    def _serve(self, stream: TlsStream, contexts: Contexts, host: str) -> None:
        try:
            deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
            try:
                stream.authenticate(contexts, deadline_s)
                reader = FrameReader(stream)
                hello = reader.hello()
            except (OSError, ProtocolError) as exc:
                stream.close()
                self._refuse(host, exc)
                return
            finally:
                self._forget(stream)
            stream.wait_forever()
            self._on_connection(hello, stream, reader)
        finally:
            self._left()

    def _forget(self, stream: TlsStream) -> None:
        with self._lock:
            self._handshakes.pop(stream, None)

    def _left(self) -> None:
        with self._quiet:
            self._threads -= 1
            self._quiet.notify_all()

    def _refuse(self, host: str, exc: Exception) -> None:
        """Counts; a stranger may cause one line in `_LOG_INTERVAL_S` and no more."""
        with self._lock:
            self.refused += 1
            now_s = time.monotonic()
            if now_s < self._log_after_s or self._closed:
                return
            self._log_after_s = now_s + _LOG_INTERVAL_S
            refused = self.refused
        log.info("tls_refused", address=host, refused=refused, error=str(exc))


def _listening(family: int, where: tuple[Any, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.bind(where)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
