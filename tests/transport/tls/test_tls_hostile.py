"""Strangers, and holders of the keys that break the protocol, against the port of a TLS transport."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
from conditions import PATIENCE_S
from structlog.testing import capture_logs
from tls_peers import (
    HOST,
    MIB,
    Station,
    authenticated,
    dial,
    intruder,
    is_hung_up,
    keys,
    link,
    move,
    pump_until,
    stations,
)

import transport.tls.incoming
import transport.tls.listener
import transport.tls.pace
import transport.tls.transport
from disagg.core.errors import PeerLostError, ProtocolError, TransportError
from disagg.sockets.probe import ProbeReply, probe
from transport.base import Arrival
from transport.operation_tracker import OperationTracker
from transport.tls.address import MAX_ADDRESS_BYTES, Address, parse_address
from transport.tls.frames import (
    EAGER_BYTES,
    PIECE_BYTES,
    REPLY_LANE,
    Frame,
    FrameReader,
    Hello,
    Kind,
)
from transport.tls.identity import Contexts
from transport.tls.incoming import ArrivalHandle, IncomingChannel
from transport.tls.pieces import PieceSink
from transport.tls.state import ChannelState
from transport.tls.stream import TlsStream, make_stream

OURS = Contexts([keys("ours")])
UCX_MAGIC = struct.pack("<QQ", 0, 33)


@contextmanager
def guarded() -> Iterator[list[Station]]:
    """Two stations that work before and after the block. Within it, all their own connections are accepted."""
    with stations(2) as [a, b]:
        link(a, b)
        move(a, b, 100)
        move(b, a, 100, 8, "b", "a")
        yield [a, b]
        move(a, b, 2 * MIB)
        move(b, a, 100, 8, "b", "a")


def stranger_context(certificate: Contexts | None) -> ssl.SSLContext:
    """A client that accepts any server."""
    context = certificate.client if certificate else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# --- before authentication


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 49,
        UCX_MAGIC * 16,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000,
        Hello(0, bytes(16), b"a", b"b").pack() + Frame(Kind.PIECE, 0, 0, 8).pack() + b"\xff" * 8,
    ],
    ids=["zeros", "ucx", "http", "record", "ours without tls"],
)
def test_garbage_is_hung_up_on(garbage: bytes) -> None:
    with guarded() as [a, b], dial(b) as stranger:
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        assert is_hung_up(stranger)
        pump_until(lambda: b.transport.listener.refused > 0, a, b)
        assert not b.arrived


@pytest.mark.parametrize("certificate", [None, Contexts([keys("theirs")])], ids=["none", "another's"])
def test_a_client_without_our_certificate_is_refused(certificate: Contexts | None) -> None:
    with guarded() as [a, b], dial(b) as raw:
        raw.settimeout(PATIENCE_S)
        client = stranger_context(certificate).wrap_socket(raw)
        with client:
            # In TLS 1.3 a client learns with its first read that the server refused its certificate.
            client.sendall(Hello(REPLY_LANE, bytes(16), a.transport.address, b.transport.address).pack())
            assert is_hung_up(client)
        pump_until(lambda: b.transport.listener.refused > 0, a, b)
        assert len(b.transport.incoming) == 1


def test_the_list_of_sockets_knows_the_port() -> None:
    with guarded() as [_, b]:
        assert probe(HOST, b.where.port) == ProbeReply("tls", guarded=True)


def test_older_versions_of_tls_are_refused() -> None:
    context = stranger_context(None)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with guarded() as [_, b], dial(b) as raw, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(raw)


@pytest.mark.parametrize("certificate", [None, Contexts([keys("theirs")])], ids=["none", "another's"])
def test_a_server_without_our_certificate_gets_nothing(certificate: Contexts | None) -> None:
    """Who takes over a peer's port learns nothing, and no send hangs."""
    received: list[bytes] = []
    with socket.create_server((HOST, 0)) as server, stations(1) as [a]:

        def serve() -> None:
            raw, _ = server.accept()
            server.close()  # the next attempt is refused
            with raw:
                raw.settimeout(PATIENCE_S)
                if certificate is None:
                    raw.sendall(b"\x15\x03\x03\x00\x02\x02\x28")
                    return
                context = certificate.server
                context.verify_mode = ssl.CERT_NONE
                try:
                    with context.wrap_socket(raw, server_side=True) as secured:
                        received.append(secured.recv(1 << 16))
                except OSError:
                    return

        address = Address(HOST, server.getsockname()[1], bytes(16)).pack()
        thread = threading.Thread(target=serve)
        thread.start()
        a.transport.connect("b", address)
        sends = [a.transport.send("b", 1, a.memory[:size]) for size in (10, MIB)]
        pump_until(lambda: all(send.ended for send in sends), a)
        thread.join(PATIENCE_S)
        assert all(isinstance(send.error, PeerLostError) for send in sends)
        assert received in ([], [b""])


def test_silent_connections_block_no_peer_and_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.tls.listener, "MAX_HANDSHAKES_PER_ADDRESS", 8)
    monkeypatch.setattr(transport.tls.listener, "HANDSHAKE_TIMEOUT_S", 1.0)
    with stations(2) as [a, b]:
        silent = [dial(b) for _ in range(100)]
        pump_until(lambda: b.transport.listener.refused >= 92, a, b)
        assert b.transport.listener.handshakes <= 8
        link(a, b)
        move(a, b, MIB)
        assert all(is_hung_up(connection) for connection in silent)
        pump_until(lambda: b.transport.listener.handshakes == 0, a, b)
        for connection in silent:
            connection.close()


def test_an_address_that_dials_too_often_costs_no_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded() as [_, b]:
        before = b.transport.listener.refused
        with monkeypatch.context() as counted:
            counted.setattr(transport.tls.pace, "BURST", 0)
            stranger = dial(b)
            counted.setattr(transport.tls.listener, "make_stream", lambda *_: pytest.fail("it was let in"))
            assert is_hung_up(stranger)
            stranger.close()
        pump_until(lambda: b.transport.listener.refused == before + 1)
        pump_until(lambda: is_let_in(b))  # the address has tokens again


def is_let_in(station: Station) -> bool:
    """Whether a holder of the keys gets through the handshake."""
    with dial(station) as raw, suppress(OSError), OURS.client.wrap_socket(raw):
        return True
    return False


def test_a_handshake_that_drips_has_a_deadline_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.tls.listener, "HANDSHAKE_TIMEOUT_S", 0.5)
    with guarded() as [a, b], dial(b) as stranger:
        stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        record = iter(b"\x16\x03\x01\x40\x00" + bytes(1 << 14))
        stranger.settimeout(0.05)

        def drip() -> bool:
            try:
                stranger.sendall(bytes([next(record)]))
                return stranger.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        pump_until(drip, a, b)


def about(lines: list[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    """Of a log, the lines about connections that were refused."""
    return [line for line in lines if line["event"] in ("tls_fault", "tls_refused")]


@pytest.mark.parametrize("step", ["make_stream", "FrameReader"], ids=["accepted", "authenticated"])
def test_a_fault_of_one_connection_ends_that_connection_only(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any exception: the thread that accepts goes on, and the descriptor is freed."""
    with guarded() as [_, b]:
        before = b.transport.listener.refused

        def fail(*arguments: object) -> None:
            raise KeyError("no such thing")

        with monkeypatch.context() as faulty, capture_logs() as lines:
            faulty.setattr(transport.tls.listener, step, fail)
            with dial(b) as raw:
                raw.settimeout(PATIENCE_S)
                if step == "FrameReader":
                    with OURS.client.wrap_socket(raw) as client:
                        assert is_hung_up(client)
                else:
                    assert is_hung_up(raw)
            pump_until(lambda: b.transport.listener.refused == before + 1)
            pump_until(lambda: len(about(lines)) == 2)
        assert [line["event"] for line in about(lines)] == ["tls_fault", "tls_refused"]
        assert b.transport.listener.handshakes == 0


def test_each_address_that_is_refused_has_its_line() -> None:
    """Counted, and logged within the log's limits; see `test_log_limits`."""
    with guarded() as [_, b], capture_logs() as lines:
        before = b.transport.listener.refused
        for count in range(1, 4):
            with dial(b) as stranger:
                stranger.sendall(UCX_MAGIC * 16)
                assert is_hung_up(stranger)
            pump_until(lambda count=count: len(about(lines)) == count)
        assert [line["address"] for line in about(lines)] == [HOST] * 3
        assert about(lines)[-1]["refused"] == before + 3


def test_a_connection_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes of an honest connection, sent again: TLS refuses them, and nothing arrives twice."""
    with stations(2) as [a, b], socket.create_server((HOST, 0)) as tap:
        recorded: list[bytearray] = []
        threads: list[threading.Thread] = []

        def carry(source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
            try:
                while data := source.recv(1 << 16):
                    if record is not None:
                        record += data
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)
            except OSError:
                return

        def accept() -> None:
            for _ in range(2):
                client, _ = tap.accept()
                server = socket.socket()
                server.settimeout(PATIENCE_S)
                server.connect((HOST, b.transport.listener.port))  # resolves no name
                recorded.append(bytearray())
                for ends in ((client, server, recorded[-1]), (server, client, None)):
                    threads.append(threading.Thread(target=carry, args=ends))
                    threads[-1].start()
                opened.extend((client, server))

        opened: list[socket.socket] = []
        accepting = threading.Thread(target=accept)
        accepting.start()
        resolve = socket.getaddrinfo

        def through_the_tap(host: str, port: int, **more: Any) -> Any:
            return resolve(host, tap.getsockname()[1] if port == b.where.port else port, **more)

        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", through_the_tap)
            a.transport.connect("b", b.transport.address)
            b.transport.connect("a", a.transport.address)
            move(a, b, 100)
        accepting.join(PATIENCE_S)
        a.transport.close()
        for thread in threads:
            thread.join(PATIENCE_S)
        arrivals = b.transport.statistics().arrivals
        refused = b.transport.listener.refused
        for record in recorded:
            with dial(b) as again:
                again.sendall(record)
                assert is_hung_up(again)
        pump_until(lambda: b.transport.listener.refused == refused + len(recorded), b)
        assert b.transport.statistics().arrivals == arrivals
        for connection in opened:
            connection.close()


def fuzz_port(frames: int) -> None:
    """Frames with TLS's, UCX's and our own beginnings, and noise, at a port that knows none of the senders."""
    rng = random.Random(frames)
    begin = [b"", UCX_MAGIC, b"\x16\x03\x01", b"\x17\x03\x03\x40\x00", Hello(0, bytes(16), b"a", b"b").pack()]
    with guarded() as [a, b]:
        for _ in range(frames // 50):
            with dial(b) as stranger:
                try:
                    for _ in range(50):
                        stranger.sendall(rng.choice(begin) + rng.randbytes(rng.randrange(120)))
                except ConnectionError:
                    continue
        pump_until(lambda: b.transport.listener.handshakes == 0, a, b)
        assert not b.arrived


def test_noise_at_the_port_does_nothing() -> None:
    fuzz_port(2000)


@pytest.mark.slow
def test_a_hundred_thousand_frames_of_noise_do_nothing() -> None:
    fuzz_port(100_000)


# --- with the keys


@pytest.mark.parametrize(
    "frames",
    [
        struct.pack("<B7xQQQ", 99, 0, 0, 0),
        struct.pack("<B7xQQQ", 0, 0, 0, 0),
        Frame(Kind.WELCOME, 0).pack(),
        Frame(Kind.CLEAR, 0).pack(),
        Frame(Kind.EAGER, 0, 1, 0).pack(),
        Frame(Kind.EAGER, 0, 1, EAGER_BYTES + 1).pack(),
        Frame(Kind.EAGER, 1, 1, 10).pack() + bytes(10),
        Frame(Kind.ANNOUNCE, 0, 1, EAGER_BYTES).pack(),
        Frame(Kind.ANNOUNCE, 0, 1, (1 << 64) - 1).pack(),
        Frame(Kind.PIECE, 0, 0, PIECE_BYTES).pack(),
        Frame(Kind.ANNOUNCE, 0, 1, MIB).pack() + Frame(Kind.PIECE, 0, 0, PIECE_BYTES).pack(),
        b"".join(Frame(Kind.ANNOUNCE, number, 1, MIB).pack() for number in range(5000)),
        b"".join(Frame(Kind.EAGER, n, 1, EAGER_BYTES).pack() + bytes(EAGER_BYTES) for n in range(1100)),
    ],
)
def test_a_bad_frame_ends_its_channel_and_nothing_else(frames: bytes) -> None:
    with guarded() as [a, b]:
        with intruder(b, OURS) as channel:
            with suppress(OSError):  # thrown out before the end of it
                channel.lane.write(frames)
            assert channel.is_thrown_out()
        pump_until(lambda: len(b.transport.incoming) == 1, a, b)
        for arrival in b.arrived:
            b.transport.discard(None, arrival)
        b.arrived.clear()


@pytest.mark.parametrize("kept", [1, 31, 33])
def test_a_truncated_frame_ends_its_channel(kept: int) -> None:
    with guarded() as [a, b]:
        with intruder(b, OURS) as channel:
            channel.lane.write((Frame(Kind.EAGER, 0, 1, 10).pack() + bytes(10))[:kept])
            channel.lane.close()
            assert channel.is_thrown_out()
        pump_until(lambda: len(b.transport.incoming) == 1, a, b)
        assert not b.arrived


@pytest.mark.parametrize(
    "piece",
    [
        Frame(Kind.PIECE, 0, 0, PIECE_BYTES - 1),
        Frame(Kind.PIECE, 0, 0, 2 * PIECE_BYTES),
        Frame(Kind.PIECE, 0, 1, PIECE_BYTES),
        Frame(Kind.PIECE, 0, 2 * PIECE_BYTES, PIECE_BYTES),
        Frame(Kind.PIECE, 0, 4 * PIECE_BYTES, PIECE_BYTES),
        Frame(Kind.PIECE, 0, (1 << 64) - PIECE_BYTES, PIECE_BYTES),
        Frame(Kind.PIECE, 7, 0, PIECE_BYTES),
        Frame(Kind.PIECE, 0, PIECE_BYTES, PIECE_BYTES),
    ],
)
def test_a_piece_that_does_not_fit_touches_nothing(piece: Frame) -> None:
    """2.5 pieces are expected; what was right is written, the receive fails, nothing else is written."""
    with stations(2) as [a, b], intruder(b, OURS, a.transport.address) as channel:
        link(a, b)
        nbytes = 5 * PIECE_BYTES // 2
        channel.lane.write(Frame(Kind.ANNOUNCE, 0, 1, nbytes).pack())
        pump_until(lambda: bool(b.arrived), b)
        into = b.memory[MIB : MIB + nbytes]
        receive = b.transport.receive("a", b.arrived.pop(), into)
        clear = channel.reader.frame()
        assert clear is not None
        assert clear.kind is Kind.CLEAR
        good = Frame(Kind.PIECE, 0, PIECE_BYTES, PIECE_BYTES).pack() + b"\x01" * PIECE_BYTES
        with suppress(OSError):
            channel.lane.write(good, piece.pack(), b"\x02" * 100)
        assert channel.is_thrown_out()
        pump_until(lambda: receive.ended, b)
        assert isinstance(receive.error, PeerLostError)
        expected = torch.zeros_like(b.memory)
        expected[2 * MIB : 2 * MIB + PIECE_BYTES] = 1
        assert torch.equal(b.memory, expected)


@pytest.mark.parametrize(
    "hello",
    [
        b"DTL2" + bytes(60),
        Hello(0, bytes(16), b"x" * (MAX_ADDRESS_BYTES + 1), b"y").pack(),
        Hello(77, bytes(16), b"x", b"y").pack(),
        Hello(REPLY_LANE, bytes(16), b"x", b"y").pack(),
        Hello(0, bytes(16), b"x", b"y").pack(),
    ],
)
def test_a_bad_hello_is_hung_up_on(hello: bytes) -> None:
    with guarded() as [_, b]:
        stream = authenticated(b, OURS)
        try:
            stream.write(hello)
            assert not read_or_end(stream)
        finally:
            stream.close()
        assert len(b.transport.incoming) == 1


def test_a_connection_that_was_led_elsewhere_is_hung_up_on() -> None:
    """The network sends a's connection to c instead of b: both hold the keys, but c is not who a wants."""
    with guarded() as [a, b]:
        stream = authenticated(b, OURS)
        try:
            stream.write(Hello(REPLY_LANE, bytes(16), a.transport.address, a.transport.address).pack())
            assert not read_or_end(stream)
        finally:
            stream.close()


def test_a_peer_has_few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer one replaces its oldest; those of other peers stay."""
    monkeypatch.setattr(transport.tls.transport, "MAX_CHANNELS_PER_PEER", 2)
    with guarded() as [a, b], ExitStack() as stack:
        source = Address(HOST, 9, os.urandom(16)).pack()
        first, second, third = (stack.enter_context(intruder(b, OURS, source)) for _ in range(3))
        assert first.is_thrown_out()
        for number, channel in enumerate((second, third), start=1):
            channel.lane.write(Frame(Kind.EAGER, 0, number, 1).pack() + b"x")
            pump_until(lambda number=number: len(b.arrived) == number, a, b)
        pump_until(lambda: len(b.transport.incoming) == 3, a, b)
        for arrival in b.arrived:
            b.transport.discard(None, arrival)
        b.arrived.clear()


def test_all_peers_together_have_a_limit_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever addresses a holder of the keys claims to have: those that are open go on, one more is refused."""
    monkeypatch.setattr(transport.tls.transport, "MAX_CHANNELS", 3)
    with guarded() as [a, b], intruder(b, OURS), intruder(b, OURS):
        refused = b.transport.listener.refused
        stream = authenticated(b, OURS)
        try:
            source = Address(HOST, 10, bytes(16)).pack()
            stream.write(Hello(REPLY_LANE, bytes(16), source, b.transport.address).pack())
            assert not read_or_end(stream)
        finally:
            stream.close()
        pump_until(lambda: b.transport.listener.refused == refused + 1, a, b)
        move(a, b, 100)


def test_a_channel_has_a_limit_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a thread, also those that wait for the end of the one before."""
    monkeypatch.setattr(transport.tls.incoming, "MAX_LANE_CONNECTIONS", 3)
    with guarded() as [a, b], ExitStack() as stack:
        source, name = Address(HOST, 9, os.urandom(16)).pack(), os.urandom(16)

        def connect(lane: int) -> TlsStream:
            stream = authenticated(b, OURS)
            stack.callback(stream.close)
            stream.write(Hello(lane, name, source, b.transport.address).pack())
            return stream

        assert FrameReader(connect(REPLY_LANE)).frame() == Frame(Kind.WELCOME, 0)
        channel, opened = b.transport.incoming[name], []
        for count in range(1, 4):  # one after another: the first one has the lane
            opened.append(connect(0))
            pump_until(lambda count=count: channel.lane_connections == count, a, b)
        refused = b.transport.listener.refused
        assert not read_or_end(connect(0))
        pump_until(lambda: b.transport.listener.refused == refused + 1, a, b)
        opened[0].write(Frame(Kind.EAGER, 0, 1, 1).pack() + b"x")
        pump_until(lambda: len(b.arrived) == 1, a, b)
        b.transport.discard(None, b.arrived.pop())


def read_or_end(stream: TlsStream) -> int:
    try:
        return stream.read_into(memoryview(bytearray(1)))
    except ConnectionError:
        return 0


def test_a_peer_that_stops_reading_can_be_fenced() -> None:
    """A peer accepts the channel, starts a large receive and reads no byte: other channels and the fence work."""
    with guarded() as [a, b], socket.create_server((HOST, 0)) as server:
        streams: list[TlsStream] = []
        address = Address(HOST, server.getsockname()[1], bytes(16)).pack()

        def serve() -> None:
            for _ in range(2):
                raw, _ = server.accept()
                stream = make_stream(raw, OURS, True)
                streams.append(stream)
                stream.authenticate(OURS, time.monotonic() + PATIENCE_S)
                FrameReader(stream).hello()
                if len(streams) == 1:
                    stream.write(Frame(Kind.WELCOME, 0).pack())
            reader = FrameReader(streams[1])
            assert reader.frame() == Frame(Kind.ANNOUNCE, 0, 1, a.memory.numel())
            streams[0].write(Frame(Kind.CLEAR, 0).pack())

        thread = threading.Thread(target=serve)
        thread.start()
        a.transport.connect("deaf", address)
        sends = [a.transport.send("deaf", tag, a.memory) for tag in (1, 2)]
        thread.join(PATIENCE_S)
        move(a, b, MIB, 99)
        assert not sends[0].ended
        a.transport.disconnect("deaf")
        assert all(isinstance(send.error, PeerLostError) for send in sends)
        for stream in streams:
            stream.close()


class NoisyStream:
    """Decrypted bytes of someone who holds the keys."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = memoryview(data), 0

    def read_into(self, into: memoryview) -> int:
        count = min(len(into), len(self._data) - self._at, 1 << 14)
        into[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count


def fuzz_frames(count: int) -> None:
    """Frames that are right, nearly right and noise. Guard bytes around the memory stay as they are."""
    rng = random.Random(count)
    left = count
    while left > 0:
        state = ChannelState()
        channel = IncomingChannel(state, b"peer", "peer")
        memory = torch.zeros(64 + 3 * PIECE_BYTES, dtype=torch.uint8)
        into = memory[32:-32]
        state.tracker.register(memory)
        data = bytearray(Frame(Kind.ANNOUNCE, 0, 1, into.numel()).pack())
        used = 1
        while left > used and rng.random() > 0.2:
            data += noisy_frame(rng, used)
            used += 1
        left -= used
        reader, sink = FrameReader(NoisyStream(bytes(data))), PieceSink()
        channel.read(reader, sink)
        receive_first(state, channel, into)
        try:
            while channel.read(reader, sink):
                state.tracker.check()
        except ProtocolError as exc:
            channel.end(str(exc))
        channel.end("after a RENEW, that nothing followed")
        assert not state.tracker.pending()
        assert not memory[:32].any()
        assert not memory[-32:].any()
        state.close()


def noisy_frame(rng: random.Random, number: int) -> bytes:
    kind = rng.choice([*Kind, 0, 5, 255])
    offsets = [0, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES, rng.getrandbits(64)]
    sizes = [PIECE_BYTES, 1, EAGER_BYTES, 100, rng.getrandbits(64)]
    numbers = [number, 0, rng.getrandbits(64)]
    if rng.random() < 0.3:
        body = bytes([kind]) + bytes(7) + rng.randbytes(24)
    else:
        body = struct.pack("<B7xQQQ", kind, rng.choice(numbers), rng.choice(offsets), rng.choice(sizes))
    return body + rng.randbytes(rng.choice([0, 0, 1, 100, EAGER_BYTES]))


def receive_first(state: ChannelState, channel: IncomingChannel, into: torch.Tensor) -> None:
    [arrival] = state.unread
    assert isinstance(arrival, Arrival)
    assert isinstance(arrival.handle, ArrivalHandle)
    tracker: OperationTracker = state.tracker
    with state.lock:
        channel.receive(arrival.handle, tracker.start("receive", "p", 1, into.numel(), None, into), into)


def test_frames_of_noise_end_the_channel_only() -> None:
    fuzz_frames(1000)


@pytest.mark.slow
def test_a_hundred_thousand_frames_of_noise_end_their_channels_only() -> None:
    fuzz_frames(100_000)


@pytest.mark.parametrize("position", range(0, 40, 3))
def test_an_address_with_a_flipped_bit_is_none(position: int) -> None:
    good = Address("127.0.0.1", 4711, bytes(range(16))).pack()
    assert parse_address("b", good) == Address("127.0.0.1", 4711, bytes(range(16)))
    bad = bytearray(good)
    bad[position % len(bad)] ^= 1
    for address in (bytes(bad), good[:-1], good + b"x", good * 20):
        with pytest.raises(TransportError, match="cannot connect to b"):
            parse_address("b", address)
