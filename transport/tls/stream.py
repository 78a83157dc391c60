"""A TLS connection as a byte stream, either read or written by one thread at a time.

Without kernel TLS offload, `ssl` encrypts in memory, and large buffers are written to and read from the socket.
Reading each record (16 KiB) straight from the socket would cost two more system calls per record. With kernel TLS
offload, OpenSSL reads and writes the socket itself.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import socket
import ssl
import time
from abc import ABC, abstractmethod
from typing import Any, cast

from transport.tls.identity import Contexts

BUFFER_BYTES = 1 << 18
"""Number of bytes that are encrypted, or read from the socket, at a time."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
_STALL_TIMEOUT_MS = 60_000
"""Time after which the kernel ends a connection whose peer acknowledges no bytes."""
_TCP_ULP = 31
_SOL_TLS, _TLS_TX, _CRYPTO_INFO_BYTES = 282, 1, 4


class TlsStream(ABC):
    """An authenticated connection. Any thread may call `shut`, which unblocks a thread that reads or writes."""

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        self.certificates: frozenset[bytes] = frozenset()
        """Certificates of both sides in DER; empty until the connection is authenticated."""

    @property
    @abstractmethod
    def cipher(self) -> str:
        """Name of the cipher suite, such as `TLS_AES_256_GCM_SHA384`."""

    def connect(self, where: tuple[Any, ...], deadline_s: float) -> None:
        """Connects to `where`, a socket address of `getaddrinfo`. Raises `OSError`, also after `shut`."""
        self._raw.settimeout(_left_s(deadline_s))
        self._raw.connect(where)

    def authenticate(self, contexts: Contexts, deadline_s: float) -> None:
        """Runs the TLS handshake; `deadline_s` is a time of `time.monotonic`. Raises `OSError`, including
        `ssl.SSLError`."""
        certificate = self._handshake(deadline_s)
        contexts.check(certificate)
        assert certificate is not None, "an absent certificate is not trusted"
        self.certificates = frozenset((contexts.certificate_of(self._context), certificate))

    def wait_forever(self) -> None:
        """Removes the deadline of reads and writes."""
        self._raw.settimeout(None)

    @property
    @abstractmethod
    def _context(self) -> ssl.SSLContext:
        """The TLS context at the end of the handshake. SNI may have replaced the initial context."""

    @abstractmethod
    def _handshake(self, deadline_s: float) -> bytes | None:
        """Runs the handshake and returns the peer's certificate, DER."""

    @abstractmethod
    def read_into(self, into: memoryview) -> int:
        """Reads decrypted bytes into `into`, as in `Readable`. Raises `OSError`."""

    @abstractmethod
    def write(self, *buffers: bytes | memoryview) -> None:
        """Writes `buffers`, and blocks until the kernel has all bytes. Raises `OSError`."""

    def wait_for_end(self) -> None:
        """Blocks until the peer has closed the connection. Raises `OSError` when the peer sends bytes."""
        if self.read_into(memoryview(bytearray(1))):
            raise ConnectionAbortedError("received bytes on a connection that the peer only reads")

    def kernel_tls(self) -> bool:
        """Returns whether the kernel encrypts this connection's writes, as reported by the kernel."""
        try:
            return bool(self._raw.getsockopt(_SOL_TLS, _TLS_TX, _CRYPTO_INFO_BYTES))
        except OSError:
            return False

    def shut(self) -> None:
        """Ends all traffic in both directions. A second call has no effect."""
        with contextlib.suppress(OSError):
            # `SSLSocket.shutdown` would drop the TLS state, and a later write would send plain bytes.
            socket.socket.shutdown(self._raw, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket. Called by the last thread that used the stream."""
        self.shut()
        self._raw.close()


class BufferedStream(TlsStream):
    """TLS in memory buffers (`ssl.MemoryBIO`); this class moves the bytes between the buffers and the socket."""

    def __init__(
        self, raw: socket.socket, context: ssl.SSLContext, server_side: bool, server_name: str | None
    ) -> None:
        super().__init__(raw)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side, server_name)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    @property
    def cipher(self) -> str:
        found = self._tls.cipher()
        return found[0] if found else ""

    @property
    def _context(self) -> ssl.SSLContext:
        return self._tls.context

    def _handshake(self, deadline_s: float) -> bytes | None:
        while True:
            self._raw.settimeout(_left_s(deadline_s))
            try:
                self._tls.do_handshake()
                self._flush()
                return self._tls.getpeercert(binary_form=True)
            except ssl.SSLWantReadError:
                self._flush()
                if not self._receive():
                    raise ConnectionResetError("the peer ended the connection in the handshake") from None
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # sends the alert
                raise

    def read_into(self, into: memoryview) -> int:
        while True:
            try:
                return cast(int, self._tls.read(len(into), into))  # bytes only without a buffer
            except ssl.SSLWantReadError:
                if not self._receive():
                    return 0
            except ssl.SSLZeroReturnError:
                return 0

    def write(self, *buffers: bytes | memoryview) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), BUFFER_BYTES):
                self._tls.write(view[start : start + BUFFER_BYTES])
                if self._out.pending >= BUFFER_BYTES:
                    self._flush()
        self._flush()

    def _receive(self) -> bool:
        count = self._raw.recv_into(self._buffer)
        self._in.write(self._buffer[:count])
        return count > 0

    def _flush(self) -> None:
        if self._out.pending:
            self._raw.sendall(self._out.read())


class DirectStream(TlsStream):
    """TLS by OpenSSL on the socket itself, which lets OpenSSL pass the keys to the kernel for offload."""

    _raw: ssl.SSLSocket

    def __init__(
        self, raw: socket.socket, context: ssl.SSLContext, server_side: bool, server_name: str | None
    ) -> None:
        super().__init__(
            context.wrap_socket(
                raw,
                server_side=server_side,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=False,
                server_hostname=server_name,
            )
        )

    @property
    def cipher(self) -> str:
        found = self._raw.cipher()
        return found[0] if found else ""

    @property
    def _context(self) -> ssl.SSLContext:
        return self._raw.context

    def _handshake(self, deadline_s: float) -> bytes | None:
        self._raw.settimeout(_left_s(deadline_s))
        self._raw.do_handshake()
        return self._raw.getpeercert(binary_form=True)

    def read_into(self, into: memoryview) -> int:
        try:
            return self._raw.recv_into(into)
        except ssl.SSLEOFError:
            return 0

    def write(self, *buffers: bytes | memoryview) -> None:
        for buffer in buffers:
            self._raw.sendall(buffer)


def make_stream(raw: socket.socket, contexts: Contexts, server_side: bool) -> TlsStream:
    """Returns an unauthenticated stream over `raw`; the stream closes `raw`."""
    _tune(raw)
    kind = DirectStream if kernel_offload() else BufferedStream
    if server_side:
        return kind(raw, contexts.server, True, None)
    return kind(raw, contexts.client, False, contexts.server_name)


@functools.cache
def kernel_offload() -> bool:
    """Returns whether this kernel can encrypt TLS on sockets."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, _TCP_ULP, b"tls")
        except OSError as exc:
            return exc.errno == errno.ENOTCONN  # the kernel has TLS, but requires a connected socket
    return True


def _tune(raw: socket.socket) -> None:
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        raw.setsockopt(socket.IPPROTO_TCP, option, value)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALL_TIMEOUT_MS)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the connection and its TLS handshake took too long")
    return left_s
