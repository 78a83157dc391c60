"""Bytes that no honest client sends, for every kind of port: UCX, ZMQ, HTTP/2, HTTP and TLS, whole and broken."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from dataclasses import dataclass

UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
"""What UCX's TCP expects first. It is all that UCX asks of a peer."""
_UCX_CONNECT, _UCX_PUT = 32, 33
_MOST_PER_CONNECTION = 20
_TIMEOUT_S = 5.0
_GREETINGS = (
    UCX_MAGIC,
    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32),  # ZMQ
    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",  # gRPC
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
)


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """What was done to a port."""

    frames: int
    """Given to the kernel. A server that hangs up has not read those behind."""
    connections: int


def ucx_put(address: int, data: bytes) -> bytes:
    """UCX's TCP writes `data` at `address` of the process that reads this behind `UCX_MAGIC`."""
    request = struct.pack("<QQI", address, len(data), 1)
    return struct.pack("<BI", _UCX_PUT, len(request)) + request + data


def hostile_frame(draw: random.Random) -> bytes:
    """One frame. Its kind, its lengths and its bytes are drawn."""
    noise = draw.randbytes(draw.choice((0, 1, 7, 20, 64, 500, 3000)))
    length = draw.choice((0, len(noise), draw.getrandbits(16), (1 << 32) - 1, 1 << 31))
    match draw.randrange(7):
        case 0:
            return ucx_put(draw.choice((0, 1, draw.getrandbits(47), draw.getrandbits(64))), noise)
        case 1:
            return struct.pack("<BI", draw.randrange(256), length) + noise  # UCX's active messages
        case 2:
            return struct.pack("<BIIB", _UCX_CONNECT, length, draw.choice((1, 2, 3, 4, 1 << 31)), 1) + noise
        case 3:
            return struct.pack(">BQ", draw.choice((0, 1, 2, 4, 6)), length) + noise  # ZMQ
        case 4:
            return length.to_bytes(8, "big")[-3:] + draw.randbytes(6) + noise  # HTTP/2
        case 5:
            return b"\x17\x03\x03" + (length & 0xFFFF).to_bytes(2, "big") + noise  # TLS
        case _:
            return noise or b"\0"


def fuzz_port(host: str, port: int, frames: int, seed: int) -> Fuzzed:
    """Sends so many frames, some behind a protocol's true greeting. Raises `OSError` when nobody listens."""
    draw, sent, connections = random.Random(seed), 0, 0
    while sent < frames:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            connections += 1
            # A reset at the end: closed ports that linger would soon be all that there are.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            count = min(frames - sent, draw.randint(1, _MOST_PER_CONNECTION))
            with contextlib.suppress(OSError):  # it hangs up
                if draw.random() < 0.75:
                    connection.sendall(draw.choice(_GREETINGS))
                for _ in range(count):
                    connection.sendall(hostile_frame(draw))
            sent += count
    return Fuzzed(sent, connections)
