"""Hostile bytes for any socket: noise, and the first bytes of each protocol with noise behind."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator

from disagg.sockets.probe import grpc_call
from disagg.sockets.processes import Listener

_MAGICS = (
    b"",
    b"\xff" + bytes(8) + b"\x7f\x03\x01",  # ZMTP
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 64\r\n\r\n",
    b"\x16\x03\x01",  # TLS
    struct.pack("=Q", 0xCAFEBABE12345678),  # UCX's TCP connection manager
    grpc_call("/ray.rpc.CoreWorkerService/PushTask"),
)
MAX_FRAME_BYTES = 400
_NO_LINGER = struct.pack("ii", 1, 0)
"""A reset at the end: a port in TIME_WAIT for each frame would use up all ports."""


def frames(seed: int, count: int) -> Iterator[bytes]:
    """Alike for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        yield draw.choice(_MAGICS) + draw.randbytes(draw.randrange(MAX_FRAME_BYTES))


def fuzz(listener: Listener, count: int, seed: int = 0) -> int:
    """Sends `count` frames, over a new connection whenever the server hangs up. Returns the connections made; 0 when
    nobody listens."""
    if listener.family == "unix":
        return _datagrams(listener.host, count, seed)
    made = 0
    connection: socket.socket | None = None
    for number, frame in enumerate(frames(seed, count)):
        if connection is None or number % 8 == 0:
            _reset(connection)
            connection = _connect(listener)
            made += connection is not None
        if connection is None:
            continue
        try:
            connection.sendall(frame)
        except OSError:
            _reset(connection)
            connection = None
    _reset(connection)
    return made


def _connect(listener: Listener) -> socket.socket | None:
    try:
        connection = socket.create_connection((listener.host, listener.port), timeout=5)
    except OSError:
        return None
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    return connection


def _reset(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()


def _datagrams(path: str, count: int, seed: int) -> int:
    """To a datagram socket in the abstract namespace, empty ones among them."""
    address = "\0" + path[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for number, frame in enumerate(frames(seed, count)):
            with contextlib.suppress(BlockingIOError):  # its queue is full
                try:
                    sender.sendto(frame if number % 4 else b"", address)
                except ConnectionRefusedError:
                    return 0
    return 1
