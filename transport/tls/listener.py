"""Accepts TLS connections and authenticates the peers by the cluster's keys.

Each handshake has its own thread and deadline, so no handshake delays another. The number of unauthenticated
connections is limited: beyond the limit, the address with the most such connections loses its oldest one. A
connection from an address that dials faster than `transport.tls.pace` allows is closed before any computation.
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
from transport.tls.frames import FrameReader, Hello
from transport.tls.identity import Contexts, Identities
from transport.tls.pace import ConnectionPace
from transport.tls.stream import TlsStream, make_stream

log = structlog.get_logger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MAX_HANDSHAKES = 256
MAX_HANDSHAKES_PER_ADDRESS = 64
_BACKLOG = 256
_PAUSE_S = 0.05
"""Pause after a failed `accept`, for example for lack of file descriptors."""
OnConnection = Callable[[Hello, TlsStream, FrameReader], None]
"""Callback for an authenticated connection and its hello. The callback returns when the connection ends, and frees
the stream. The callback raises `ProtocolError` to refuse a connection; the listener then frees the stream."""
_EXPECTED = (OSError, ProtocolError, RuntimeError)
"""Errors that peers cause, or a system that cannot start a thread. Any other error is a bug."""


class TLSListener:
    """A listening socket on `host` and a free port. Raises `ConfigError` when `host` cannot be bound."""

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
        """Unauthenticated connections with their addresses, oldest first."""
        self._pace = ConnectionPace()
        self._threads = 0
        self._closed = False
        self.refused = 0
        """Number of connections that failed before authentication, or that `on_connection` refused."""
        self._thread = threading.Thread(target=self._run, name=f"tls-accept-{self.port}", daemon=True)

    def start(self) -> None:
        """Starts accepting connections."""
        self._thread.start()

    @property
    def handshakes(self) -> int:
        """Number of unauthenticated connections."""
        with self._lock:
            return len(self._handshakes)

    def close(self, timeout_s: float) -> bool:
        """Closes the listening socket and ends every handshake.

        Returns whether all threads have ended within `timeout_s`, including the threads of established connections.
        """
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
            host = str(where[0])
            try:
                self._admit(raw, host)
            except _EXPECTED as exc:
                raw.close()
                self._refuse(host, exc)
            except Exception as exc:  # an error of one connection: the thread accepts the next one
                log.exception("tls_fault", peer=host)
                raw.close()
                self._refuse(host, exc)

    def _admit(self, raw: socket.socket, host: str) -> None:
        if not self._pace.admits(host):
            raise ConnectionRefusedError("this address opens too many connections")
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
        except BaseException:
            self._forget(stream)
            self._left()
            stream.close()
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
        oldest.shut()  # the connection's own thread closes it

    def _serve(self, stream: TlsStream, contexts: Contexts, host: str) -> None:
        try:
            hello, reader = self._authenticated(stream, contexts)
            stream.wait_forever()
            self._on_connection(hello, stream, reader)
        except _EXPECTED as exc:
            stream.close()
            self._refuse(host, exc)
        except Exception as exc:
            log.exception("tls_fault", peer=host)
            stream.close()
            self._refuse(host, exc)
        finally:
            self._left()

    def _authenticated(self, stream: TlsStream, contexts: Contexts) -> tuple[Hello, FrameReader]:
        deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
        try:
            stream.authenticate(contexts, deadline_s)
            reader = FrameReader(stream)
            return reader.hello(), reader
        finally:
            self._forget(stream)

    def _forget(self, stream: TlsStream) -> None:
        with self._lock:
            self._handshakes.pop(stream, None)

    def _left(self) -> None:
        with self._quiet:
            self._threads -= 1
            self._quiet.notify_all()

    def _refuse(self, host: str, exc: Exception) -> None:
        """Counts and logs a refused connection, within the limits of `disagg.core.log_limits`."""
        with self._lock:
            self.refused += 1
            if self._closed:
                return
            refused = self.refused
        log.info("tls_refused", address=host, refused=refused, error=str(exc) or type(exc).__name__)


def _listening(family: int, where: tuple[Any, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.bind(where)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
