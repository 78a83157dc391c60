"""Measures the data plane's backends and their ceilings between two processes of one host, by message size."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from disagg.bench.common.ceilings import size_text
from disagg.bench.common.noise import WORD_BYTES, words
from disagg.bench.common.processes import Processes, Remote
from disagg.bench.common.report import Measurement, Result
from disagg.core.errors import InvariantError
from disagg.core.threads import SWITCH_INTERVAL_S
from transport.base import Operation
from transport.hosts import LOOPBACK
from transport.keys.curve import ControlKeys, make_keys
from transport.keys.ring import KeyRing
from transport.select import TLSOptions, make_transport
from transport.ucx.reach import Reach

WINDOW = 4
"""Number of messages in flight at once."""
RECORD_BYTES = 1 << 14
"""Size of a TLS record."""
_DATA, _GO = 1, 2
_LEAST, _MOST = 8, 512
_WAIT_S = 0.05
CIPHER_BYTES = 256 << 20


@dataclass(frozen=True)
class Backend:
    """One backend that the benchmark measures, with its settings."""

    title: str
    name: str
    """Name for `make_transport`; `tcp` for plain sockets."""
    reach: Reach = Reach.ONE_HOST
    lanes: int = 1


@dataclass(frozen=True)
class WireBench:
    """Settings of a run."""

    sizes: tuple[int, ...]
    lanes: tuple[int, ...]
    """Numbers of TLS lanes."""
    most_bytes: int
    """Number of bytes that one measurement moves; at least 8 and at most 512 messages are sent."""
    repeats: int


def run(bench: WireBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures GB/s of each backend by message size, and the ceilings. Raises `InvariantError` for wrong
    bytes."""
    report_progress("ciphers")
    results = [
        Result(f"AES-{8 * size}-GCM, one core, 16 KiB", cipher_rate(size, bench.repeats)) for size in (16, 32)
    ]
    backends = [Backend("plain TCP", "tcp")]
    backends += [
        Backend(f"TLS, {lanes} lane{'s' * (lanes > 1)}", "tls", lanes=lanes) for lanes in bench.lanes
    ]
    backends += [Backend("UCX over TCP", "ucx", Reach.TCP), Backend("UCX over shared memory", "ucx")]
    ceilings: dict[int, Measurement] = {}
    for backend in backends:
        report_progress(backend.title)
        for size, rate in measured_rates(bench, backend).items():
            labels: dict[str, str | int | float] = {"backend": backend.title, "bytes": size}
            results.append(
                Result(f"{backend.title}, messages of {size_text(size)}", rate, ceilings.get(size), labels)
            )
            if backend.name == "tcp":
                ceilings[size] = rate
    return results


def cipher_rate(key_bytes: int, repeats: int) -> Measurement:
    """Measures AES-GCM encryption alone, on one core, in blocks of the size of a TLS record."""
    cipher, nonce = AESGCM(os.urandom(key_bytes)), bytes(12)
    plain, sealed = os.urandom(RECORD_BYTES), bytearray(RECORD_BYTES + 16)
    count = CIPHER_BYTES // RECORD_BYTES
    found: list[float] = []
    for _ in range(repeats + 1):
        started_s = time.perf_counter()
        for _ in range(count):
            cipher.encrypt_into(nonce, plain, None, sealed)
        found.append(count * RECORD_BYTES / (time.perf_counter() - started_s) / 1e9)
    return Measurement(f"AES-{8 * key_bytes}-GCM", "GB/s", tuple(found[1:]))


def measured_rates(bench: WireBench, backend: Backend) -> dict[int, Measurement]:
    with Processes() as processes:
        make = TcpEnd if backend.name == "tcp" else WireEnd
        keys = make_keys()
        sender, receiver = (
            processes.start(f"{backend.title} {side}", None, make, backend, keys, max(bench.sizes))
            for side in ("sender", "receiver")
        )
        addresses = [end.call("address") for end in (sender, receiver)]
        receiver.start_call("connect", addresses[0])
        sender.call("connect", addresses[1])
        receiver.answer()
        sender.call("fill")
        return {size: _rate(bench, sender, receiver, size) for size in bench.sizes}


def _rate(bench: WireBench, sender: Remote, receiver: Remote, size: int) -> Measurement:
    count = min(_MOST, max(_LEAST, bench.most_bytes // size))
    found: list[float] = []
    for _ in range(bench.repeats + 1):
        receiver.call("poison")
        sender.start_call("send", size, count)
        found.append(size * count / receiver.call("receive", size, count) / 1e9)
        sender.answer()
        receiver.call("check", size)
    # Leave out the first round, which opens connections and touches memory.
    return Measurement("wire", "GB/s", tuple(found[1:]))


class _End:
    """One end of the measured connection, in its own process, with a buffer of `WINDOW` messages."""

    def __init__(self, largest: int) -> None:
        torch.set_num_threads(1)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.buffer = torch.zeros(WINDOW * largest, dtype=torch.uint8)

    def fill(self) -> None:
        """Fills the whole buffer with noise."""
        self.buffer.view(torch.int64).copy_(words(self.buffer.numel() // WORD_BYTES, self.buffer.device))

    def poison(self) -> None:
        """Poisons the buffer before a receive."""
        self.buffer.fill_(0xFF)

    def check(self, size: int) -> None:
        """Raises `InvariantError` unless the last `WINDOW` messages contain the sender's noise."""
        used = WINDOW * size // WORD_BYTES
        if not torch.equal(self.buffer.view(torch.int64)[:used], words(used, self.buffer.device)):
            raise InvariantError(f"wrong bytes in messages of {size}")

    def _view(self, index: int, size: int) -> torch.Tensor:
        start = index % WINDOW * size
        return self.buffer[start : start + size]


class WireEnd(_End):
    """An end that uses a transport in the same way as a rank."""

    def __init__(self, backend: Backend, keys: ControlKeys, largest: int) -> None:
        super().__init__(largest)
        self._transport = make_transport(
            backend.name,
            reach=backend.reach,
            interface="lo",
            tls=TLSOptions(KeyRing(keys), LOOPBACK, backend.lanes),
        )
        self._transport.register(self.buffer)

    def address(self) -> bytes:
        """Returns this end's address, which the other end passes to its `connect`."""
        return self._transport.address

    def connect(self, address: bytes) -> None:
        """Connects to the other end; call once, before any transfer."""
        self._transport.connect("other", address)

    def send(self, size: int, count: int) -> None:
        """Sends `count` messages once the other end is ready."""
        while not (arrived := self._transport.arrivals()):
            self._drive()
        self._transport.discard("other", arrived[0])
        pending: deque[Operation] = deque()
        for index in range(count):
            if len(pending) == WINDOW:
                self._finish(pending.popleft())
            pending.append(self._transport.send("other", _DATA, self._view(index, size)))
        while pending:
            self._finish(pending.popleft())

    def receive(self, size: int, count: int) -> float:
        """Receives `count` messages and returns the seconds taken."""
        started_s = time.perf_counter()
        self._finish(self._transport.send("other", _GO, self.buffer[:1]))
        pending: deque[Operation] = deque()
        index = 0
        while index < count or pending:
            for arrival in self._transport.arrivals():
                view = self._view(index, size)
                pending.append(self._transport.receive("other", arrival, view))
                index += 1
            while pending and pending[0].ended:
                self._finish(pending.popleft())
            self._drive()
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Ends the connection."""
        self._transport.close()

    def _finish(self, operation: Operation) -> None:
        while not operation.ended:
            self._drive()
        if operation.error is not None:
            raise operation.error

    def _drive(self) -> None:
        if not self._transport.progress():
            self._transport.wait(_WAIT_S)


class TcpEnd(_End):
    """An end of a plain TCP connection, without TLS or a protocol."""

    def __init__(self, backend: Backend, keys: ControlKeys, largest: int) -> None:
        super().__init__(largest)
        self._listening = socket.create_server((LOOPBACK, 0))
        self._port = int(self._listening.getsockname()[1])
        self._connection = socket.socket()

    def address(self) -> int:
        """Returns this end's port, which the other end passes to its `connect`."""
        return self._port

    def connect(self, port: int) -> None:
        """Connects both ends; the end with the lower port accepts."""
        self._connection.close()
        if self._port < port:
            self._connection, _ = self._listening.accept()
        else:
            self._connection = socket.create_connection((LOOPBACK, port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, size: int, count: int) -> None:
        """Sends `count` messages once the other end is ready."""
        self._connection.recv(1)
        for index in range(count):
            self._connection.sendall(self._view(index, size).numpy().data)

    def receive(self, size: int, count: int) -> float:
        """Receives `count` messages and returns the seconds taken."""
        started_s = time.perf_counter()
        self._connection.sendall(b"g")
        for index in range(count):
            target, got = self._view(index, size).numpy().data, 0
            while got < size:
                got += self._connection.recv_into(target[got:])
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
        self._listening.close()
