"""Finds the protocol of a listening TCP socket, and whether the server accepts a client without a key.

The probe observes the server's behaviour, not its configuration. The probe changes no state of the server: each
request reads only public information, or is refused.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple

ANSWER_S = 2.0
"""Timeout of a reply. A server on this host answers much sooner."""
GREETING_S = 0.2
"""Timeout of a server's greeting. ZMQ and gRPC servers greet within a millisecond after the connection."""

_ZMQ_GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03"
"""ZMTP signature and version. The server replies with its whole greeting before the client names its mechanism."""
_ZMQ_GREETING_BYTES = 64
_ZMQ_MECHANISM = slice(12, 32)
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _HEADERS, _DATA = 4, 1, 0
_END_STREAM, _END_HEADERS = 1, 4
_TLS_RECORDS = (b"\x15", b"\x16")
"""First byte of a TLS reply: the type of an alert record or of a handshake record."""
_RAY_METHODS = (
    "NodeInfoGcsService/CheckAlive",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "CoreWorkerService/GetCoreWorkerStats",
    "ReporterService/HealthCheck",
)
"""One method of each gRPC service; every Ray server implements at least one of these services."""
_UNAUTHENTICATED, _UNIMPLEMENTED = 16, 12


class ProbeReply(NamedTuple):
    """The reply of a server to a client without a key."""

    protocol: str
    """Protocol: `http`, `zmq`, `grpc` or `tls`; `unknown`: no reply, or a reply of an unknown protocol; `closed`: no
    server listens."""
    guarded: bool = False
    """Whether the server requires a key; True for every TLS server, without a test."""
    mechanism: str = ""
    """ZMQ security mechanism (`CURVE`, `NULL`); empty for other protocols."""


def probe(host: str, port: int) -> ProbeReply:
    """Probes the server at an IP address with a few connections. Each read times out after `ANSWER_S`."""
    at = (_reachable(host), port)
    greeting = _exchange(at, b"", GREETING_S)
    if greeting is None:
        return ProbeReply("closed")
    if greeting[:1] == b"\xff":
        mechanism = _zmq_mechanism(at)
        return ProbeReply("zmq", mechanism not in ("", "NULL"), mechanism)
    if _is_http2(greeting):
        return ProbeReply("grpc", _ray_requires_token(at))
    reply = _exchange(at, _http_request(host, port), ANSWER_S) or b""
    if reply.startswith(b"HTTP/1."):
        return ProbeReply("http", reply.split(b" ", 2)[1:2] == [b"401"])
    if (_exchange(at, _client_hello(), ANSWER_S) or b"")[:1] in _TLS_RECORDS:
        return ProbeReply("tls", guarded=True)
    return ProbeReply("unknown")


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _exchange(
    at: tuple[str, int], request: bytes, wait_s: float, whole: Callable[[bytes], bool] = lambda reply: True
) -> bytes | None:
    """Returns the reply to `request`; None when no server listens.

    The reply ends when `whole(reply)` is true, the server closes the connection, or `wait_s` pass without a byte.
    """
    try:
        connection = socket.create_connection(at, timeout=ANSWER_S)
    except OSError:
        return None
    reply = b""
    with connection:
        connection.settimeout(wait_s)
        with contextlib.suppress(OSError):
            connection.sendall(request)
            while data := connection.recv(4096):
                reply += data
                if whole(reply):
                    break
    return reply


def _zmq_mechanism(at: tuple[str, int]) -> str:
    greeting = _exchange(at, _ZMQ_GREETING, ANSWER_S, lambda reply: len(reply) >= _ZMQ_GREETING_BYTES) or b""
    return greeting[_ZMQ_MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def _http_request(host: str, port: int) -> bytes:
    return f"GET /v1/models HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def _is_http2(greeting: bytes) -> bool:
    """Returns whether the first frame of `greeting` is SETTINGS on stream 0."""
    return len(greeting) >= 9 and greeting[3] == _SETTINGS and greeting[5:9] == bytes(4)


def _ray_requires_token(at: tuple[str, int]) -> bool:
    statuses = [
        _grpc_status(_exchange(at, grpc_call(f"/ray.rpc.{one}"), ANSWER_S, _has_status))
        for one in _RAY_METHODS
    ]
    known = [status for status in statuses if status != _UNIMPLEMENTED]
    return bool(known) and all(status == _UNAUTHENTICATED for status in known)


def grpc_call(path: str) -> bytes:
    """Returns the bytes of an HTTP/2 connection with one gRPC call: an empty message, no token."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(b"\0" + _hpack_text(name) + _hpack_text(value) for name, value in headers.items())
    return (
        _HTTP2_PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, block)
        + _frame(_DATA, _END_STREAM, 1, bytes(5))
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _hpack_text(text: str) -> bytes:
    """Encodes a literal HPACK string without Huffman coding. `text` is shorter than 127 bytes."""
    return bytes((len(text),)) + text.encode()


def _has_status(reply: bytes) -> bool:
    return _grpc_status(reply) is not None


def _grpc_status(reply: bytes | None) -> int | None:
    """Returns the status in a reply's trailers, which gRPC servers do not compress; None if the reply has none."""
    _, found, rest = (reply or b"").partition(b"grpc-status")
    if not found or not rest or len(rest) <= rest[0]:
        return None
    text = rest[1 : 1 + rest[0]]
    return int(text) if text.isdigit() else None
