"""Transports over TLS on loopback, and strangers who attack them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from conditions import PATIENCE_S
from pumped import Pumped

from transport.base import Arrival, Operation
from transport.keys.curve import ControlKeys
from transport.keys.ring import AnyKeys, as_ring
from transport.tls.address import Address, parse_address
from transport.tls.frames import REPLY_LANE, FrameReader, Hello
from transport.tls.identity import Contexts
from transport.tls.stream import TlsStream, make_stream
from transport.tls.transport import TlsTransport

MIB = 1 << 20
HOST = "127.0.0.1"


def keys(word: str) -> ControlKeys:
    """A generation by its name."""
    return ControlKeys(f"{word} a", f"{word} b", f"{word} c", f"{word} d")


@dataclass
class Station(Pumped):
    """A transport with registered memory, and what came out of it."""

    transport: TlsTransport
    memory: torch.Tensor
    ended: list[Operation] = field(default_factory=list)
    arrived: list[Arrival] = field(default_factory=list)

    @property
    def where(self) -> Address:
        """Where it listens."""
        return parse_address("it", self.transport.address)


def pump_until(condition: Callable[[], bool], *stations: Station, timeout_s: float = PATIENCE_S) -> None:
    """Drives the stations until `condition` holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        for station in stations:
            station.pump()
            station.transport.wait(0.001)
        if not stations:
            threading.Event().wait(0.002)
        assert time.monotonic() < deadline_s, [station.transport.statistics() for station in stations]


@contextmanager
def stations(count: int = 2, secret: AnyKeys | None = None, lanes: int = 1) -> Iterator[list[Station]]:
    """Stations that hold the same keys; closed at the end."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            transport = TlsTransport(HOST, as_ring(secret or keys("ours")), lanes)
            stack.callback(transport.close)
            memory = torch.zeros(16 * MIB, dtype=torch.uint8)
            transport.register(memory)
            made.append(Station(transport, memory))
        yield made


def link(a: Station, b: Station, a_name: str = "a", b_name: str = "b") -> None:
    """Both ways."""
    a.transport.connect(b_name, b.transport.address)
    b.transport.connect(a_name, a.transport.address)


def move(a: Station, b: Station, nbytes: int, tag: int = 7, a_name: str = "a", b_name: str = "b") -> None:
    """Moves random bytes from a to b and compares them."""
    sent, into = a.memory[:nbytes], b.memory[MIB : MIB + nbytes]
    sent.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    into.zero_()
    send = a.transport.send(b_name, tag, sent)
    pump_until(lambda: any(one.tag == tag for one in b.arrived), a, b)
    [arrival] = [one for one in b.arrived if one.tag == tag]
    b.arrived.remove(arrival)
    receive = b.transport.receive(a_name, arrival, into)
    pump_until(lambda: send.ended and receive.ended, a, b)
    assert (send.error, receive.error) == (None, None)
    assert torch.equal(sent, into)


def dial(station: Station) -> socket.socket:
    """A stranger's connection."""
    return socket.create_connection((HOST, station.transport.listener.port), PATIENCE_S)


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other side ends the connection; waits for that."""
    connection.settimeout(PATIENCE_S)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:  # a reset, or the alert of TLS
        return True
    return True


def authenticated(station: Station, contexts: Contexts) -> TlsStream:
    """A connection of someone who holds the keys, and has not said hello."""
    stream = make_stream(socket.socket(), contexts, False)
    deadline_s = time.monotonic() + PATIENCE_S
    try:
        stream.connect((HOST, station.where.port), deadline_s)
        stream.authenticate(contexts, deadline_s)
    except BaseException:
        stream.close()
        raise
    return stream


@dataclass
class Intruder:
    """A channel of someone who holds the keys and does not keep to the protocol."""

    replies: TlsStream
    reader: FrameReader
    lane: TlsStream

    def is_thrown_out(self) -> bool:
        """Whether the station ends the channel; waits for that."""
        try:
            while self.reader.frame() is not None:
                pass
        except OSError as exc:
            return not isinstance(exc, TimeoutError)
        return True


@contextmanager
def intruder(station: Station, contexts: Contexts, source: bytes = b"") -> Iterator[Intruder]:
    """A channel to the station, its lane 0 open. `source` is whose address it claims to have."""
    source = source or Address(HOST, 9, os.urandom(16)).pack()
    channel = os.urandom(16)
    with ExitStack() as stack:
        opened = []
        for lane in (REPLY_LANE, 0):
            stream = authenticated(station, contexts)
            stack.callback(stream.close)
            stream.write(Hello(lane, channel, source, station.transport.address).pack())
            if lane == REPLY_LANE:
                reader = FrameReader(stream)
                assert reader.frame() is not None
            opened.append(stream)
        yield Intruder(opened[0], reader, opened[1])
