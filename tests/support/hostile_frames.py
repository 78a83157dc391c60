"""Hostile bytes for every kind of socket: frames of UCX, ZMQ, HTTP/2, HTTP and TLS, whole and broken."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from dataclasses import dataclass

from disagg.sockets.probe import grpc_call
from disagg.sockets.processes import ListeningSocket

UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
"""First bytes of a connection to UCX over TCP. UCX authenticates a peer by nothing else."""
_UCX_CONNECT, _UCX_PUT = 32, 33
_MOST_PER_CONNECTION = 20
_TIMEOUT_S = 5.0
_GREETINGS = (
    UCX_MAGIC,
    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32),  # ZMQ
    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",  # gRPC
    grpc_call("/ray.rpc.CoreWorkerService/PushTask"),
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
)


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """Frames and connections that a socket received."""

    frames: int
    """Passed to the kernel. A server that closes a connection does not read the frames left in it."""
    connections: int


def ucx_put(address: int, data: bytes) -> bytes:
    """Returns a frame that, sent after `UCX_MAGIC`, makes UCX write `data` at `address` of the receiving process."""
    request = struct.pack("<QQI", address, len(data), 1)
    return struct.pack("<BI", _UCX_PUT, len(request)) + request + data


def hostile_frame(draw: random.Random) -> bytes:
    """Returns one frame of random protocol, length fields and content."""
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


def fuzz(listener: ListeningSocket, frames: int, seed: int) -> Fuzzed:
    """Sends `frames` hostile frames to the socket. Raises `OSError` when the socket refuses a connection."""
    if listener.family == "unix":
        return _fuzz_datagrams(listener.host, frames, seed)
    return fuzz_port(listener.host, listener.port, frames, seed)


def fuzz_port(host: str, port: int, frames: int, seed: int) -> Fuzzed:
    """Sends `frames` hostile frames to a TCP port. Raises `OSError` when the port refuses a connection.

    A connection carries up to 20 frames, written with one call; three of four connections start with a valid
    greeting.
    """
    draw, sent, connections = random.Random(seed), 0, 0
    while sent < frames:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            connections += 1
            # Close with a reset: sockets in TIME_WAIT would use up the local ports.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            count = min(frames - sent, draw.randint(1, _MOST_PER_CONNECTION))
            greeting = draw.choice(_GREETINGS) if draw.random() < 0.75 else b""
            with contextlib.suppress(OSError):  # the server closed the connection
                connection.sendall(greeting + b"".join(hostile_frame(draw) for _ in range(count)))
            sent += count
    return Fuzzed(sent, connections)


def _fuzz_datagrams(name: str, frames: int, seed: int) -> Fuzzed:
    """Sends to a datagram socket of the abstract namespace, whose `name` starts with `@`. Every fourth is empty."""
    draw = random.Random(seed)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for number in range(frames):
            with contextlib.suppress(BlockingIOError):  # the receive queue is full
                sender.sendto(hostile_frame(draw) if number % 4 else b"", "\0" + name[1:])
    return Fuzzed(frames, 1)
