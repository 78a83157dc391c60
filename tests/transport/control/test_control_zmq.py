"""What only a network has: keys, strangers, ports, bytes of anybody."""

from __future__ import annotations

import gc
import io
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import structlog
import zmq
from conditions import PATIENCE_S, until

from disagg.core.config.read import LogConfig
from disagg.core.errors import ConfigError, ProtocolError
from disagg.core.log import configure
from disagg.core.log_limits import MAX_VALUE_CHARS, PER_KIND_LINES
from disagg.core.types import RequestKey
from transport.control.messages import Message, Plan, Released, encode
from transport.control.reliable import RESET, Envelope, ReliableOptions
from transport.control.thread import encode_envelope
from transport.control.zmq import MAX_STRAY_PEERS, ZmqControl
from transport.keys.curve import ControlKeys, KeySet, make_keys
from transport.keys.file import load_keys, save_keys
from transport.keys.ring import AnyKeys

OPTIONS = ReliableOptions(peer_timeout_s=1.0, heartbeat_s=0.1)
LIMIT_BYTES = 1 << 16
HELLO = Released(RequestKey("r"))


@contextmanager
def listening(keys: AnyKeys) -> Iterator[tuple[ZmqControl, queue.Queue[tuple[str, Message]]]]:
    """Yields a started channel and the queue of its received messages."""
    channel = ZmqControl("127.0.0.1", keys=keys, options=OPTIONS, max_message_bytes=LIMIT_BYTES)
    received: queue.Queue[tuple[str, Message]] = queue.Queue()
    channel.start(lambda peer, message: received.put((peer, message)), lambda peer: None)
    try:
        yield channel, received
    finally:
        channel.close()


@contextmanager
def raw(address: str | None, keys: ControlKeys | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A plain ZMQ client that says what it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if keys is not None:
            socket.curve_serverkey = keys.server_public.encode()
            socket.curve_publickey = keys.client_public.encode()
            socket.curve_secretkey = keys.client_secret.encode()
        if address is not None:
            socket.connect(address)
        yield socket


def speak(source: str) -> bytes:
    return encode_envelope(Envelope(source, 1, 1, 1, 0, 0, 0, encode(HELLO)))


def test_the_shared_keys_let_in() -> None:
    keys = make_keys()
    with listening(keys) as (channel, received), raw(channel.address, keys) as socket:
        socket.send(speak("tcp://127.0.0.1:9"))
        assert received.get(timeout=PATIENCE_S) == ("tcp://127.0.0.1:9", HELLO)


@pytest.mark.parametrize("stranger", ["no keys", "own client key", "own server key"])
def test_clients_with_other_keys_are_refused(stranger: str) -> None:
    keys, other = make_keys(), make_keys()
    wrong: ControlKeys | None = None
    if stranger == "own client key":
        wrong = msgspec.structs.replace(
            keys, client_public=other.client_public, client_secret=other.client_secret
        )
    if stranger == "own server key":
        wrong = msgspec.structs.replace(keys, server_public=other.server_public)
    with (
        listening(keys) as (channel, received),
        raw(None, wrong) as outside,
        raw(channel.address, keys) as inside,
    ):
        monitor = outside.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_DISCONNECTED
        )
        outside.connect(channel.address)  # after the monitor: a refused client may not try again
        outside.send(speak("tcp://127.0.0.1:8"))
        assert monitor.poll(20_000), "the stranger was not turned away"
        outside.disable_monitor()
        monitor.close()
        # The door works, and the stranger's message did not come through it before.
        inside.send(speak("tcp://127.0.0.1:9"))
        assert received.get(timeout=PATIENCE_S)[0] == "tcp://127.0.0.1:9"
        assert received.empty()
        assert channel.statistics().peers == 1


def test_bytes_of_anybody_are_counted_and_dropped() -> None:
    frames = [
        [b""],
        [b"\xc1"],
        [b"two", b"frames"],
        [msgspec.msgpack.encode(["source"])],
        [msgspec.msgpack.encode({"a": 1})],
        [encode_envelope(Envelope("tcp://127.0.0.1:9", 1, 1, 1, 0, 0, 0, b"no message"))],
    ]
    keys = make_keys()
    with listening(keys) as (channel, received), raw(channel.address, keys) as socket:
        for frame in frames:
            socket.send_multipart(frame)
        until(lambda: channel.statistics().bad_frames >= len(frames))
        socket.send(encode_envelope(Envelope("tcp://127.0.0.1:9", 1, 2, 1, 0, 0, 0, encode(HELLO))))
        assert received.get(timeout=PATIENCE_S)[1] == HELLO


def test_a_frame_that_is_too_large_ends_only_its_connection() -> None:
    keys = make_keys()
    with (
        listening(keys) as (channel, received),
        raw(channel.address, keys) as big,
        raw(channel.address, keys) as small,
    ):
        big.send(bytes(1 << 20))
        small.send(speak("tcp://127.0.0.1:9"))
        assert received.get(timeout=PATIENCE_S)[1] == HELLO
        assert received.empty()


def test_only_addresses_are_connected_to() -> None:
    """A source that is a file, another protocol or prose must not make us open anything."""
    sources = [
        "ipc:///tmp/x",
        "inproc://x",
        "tcp://*:1",
        "tcp://h:1;tcp://i:2",
        "",
        "http://h:80",
        "x" * 5000,
    ]
    keys = make_keys()
    with listening(keys) as (channel, received), raw(channel.address, keys) as socket:
        for source in sources:
            socket.send(speak(source))
        for _ in sources:
            received.get(timeout=PATIENCE_S)
        until(lambda: channel.statistics().bad_frames >= len(sources) - 1)
        assert not [peer for peer in channel.links.peers if not peer.startswith("tcp://")]


def test_answers_to_strangers_do_not_pile_up() -> None:
    keys = make_keys()
    with listening(keys) as (channel, _), raw(channel.address, keys) as socket:
        count = 3 * MAX_STRAY_PEERS
        for number in range(count):
            # It goes on with a stream that we do not know: answered by a reset, and then forgotten.
            socket.send(encode_envelope(Envelope(f"tcp://127.0.0.1:{1000 + number}", 5, 9, 9, 0, 3, 0, b"")))
        until(lambda: channel.statistics().refused == count)
        until(lambda: f"tcp://127.0.0.1:{1000 + count - 1}" in channel.links.peers)
        assert len(channel.links.peers) <= MAX_STRAY_PEERS + 1
        assert channel.statistics().peers == 0


def test_numbers_out_of_range_are_bad_frames() -> None:
    """A reset could else make us go on from a number that no envelope can hold."""
    keys = make_keys()
    with listening(keys) as (channel, received), raw(channel.address, keys) as socket:
        for stream, seq in ((1 << 62, 1), (-1, 1), (1, -1), (1, 1 << 63)):
            socket.send(
                encode_envelope(Envelope("tcp://127.0.0.1:9", stream, seq, 1, 0, 0, 0, encode(HELLO)))
            )
        until(lambda: channel.statistics().bad_frames == 4)
        socket.send(speak("tcp://127.0.0.1:9"))
        assert received.get(timeout=PATIENCE_S)[1] == HELLO


def test_a_killed_process_is_lost_in_time(tmp_path: Path) -> None:
    keys, lost = make_keys(), queue.Queue[str]()
    save_keys(keys, tmp_path / "keys")
    channel = ZmqControl("127.0.0.1", keys=keys, options=OPTIONS)
    received: queue.Queue[tuple[str, Message]] = queue.Queue()
    channel.start(lambda peer, message: received.put((peer, message)), lost.put)
    code = (
        "import sys; from test_control_zmq import *;"
        "child = ZmqControl('127.0.0.1', keys=load_keys(sys.argv[1]), options=OPTIONS);"
        "child.start(lambda peer, message: child.send(peer, message), lambda peer: None);"
        "child.send(sys.argv[2], HELLO); threading.Event().wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "keys"), channel.address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    try:
        peer, message = received.get(timeout=PATIENCE_S)
        assert message == HELLO
        channel.watch(peer)
        channel.send(peer, HELLO)
        assert received.get(timeout=PATIENCE_S) == (peer, HELLO)
        process.kill()
        killed_s = time.monotonic()
        assert lost.get(timeout=PATIENCE_S) == peer
        assert time.monotonic() - killed_s < OPTIONS.peer_timeout_s + 2
    finally:
        process.kill()
        process.wait()
        channel.close()


def test_nothing_is_leaked() -> None:
    keys = make_keys()

    def use() -> None:
        with listening(keys) as (a, _), listening(keys) as (b, received):
            a.send(b.address, HELLO)
            assert received.get(timeout=PATIENCE_S)[1] == HELLO
            port = int(a.address.rsplit(":", 1)[1])
            with pytest.raises(ConfigError):
                ZmqControl("127.0.0.1", port, keys=keys)
        ZmqControl("127.0.0.1", keys=keys).close()  # never started

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    use()
    gc.collect()  # sockets of earlier tests, which would close in between
    files, threads = open_files(), threading.active_count()
    for _ in range(5):
        use()
    assert (open_files(), threading.active_count()) == (files, threads)


def test_a_port_in_use() -> None:
    with listening(make_keys()) as (channel, _):
        port = int(channel.address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            ZmqControl("127.0.0.1", port, keys=make_keys())


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "", "0", "0.0", "0x0"])
def test_an_address_that_peers_cannot_reach(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot be reached by peers"):
        ZmqControl(host, keys=make_keys())


def test_keys_are_kept_to_their_owner(tmp_path: Path) -> None:
    keys, path = make_keys(), tmp_path / "keys.json"
    save_keys(keys, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_keys(path) == KeySet(keys)
    for secret in (keys.server_secret, keys.client_secret):
        assert secret not in repr(keys)
    with pytest.raises(ConfigError, match="exists already"):
        save_keys(keys, path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(path)
    with pytest.raises(ConfigError, match="disagg keys"):
        load_keys(tmp_path / "none")
    path.write_text("{}")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a key file"):
        load_keys(path)


def test_a_message_that_peers_would_drop_is_refused_at_once() -> None:
    keys = make_keys()
    with listening(keys) as (a, _), listening(keys) as (b, received):
        room = LIMIT_BYTES - len(encode(Plan(1, b""))) - 4  # what the length of so many bytes takes more
        with pytest.raises(ProtocolError, match=rf"may take {LIMIT_BYTES} bytes \(control.max_message_bytes"):
            a.send(b.address, Plan(1, bytes(LIMIT_BYTES)))
        largest = Plan(1, bytes(room))
        assert LIMIT_BYTES - 4 <= len(encode(largest)) <= LIMIT_BYTES
        a.send(b.address, largest)
        assert received.get(timeout=PATIENCE_S) == (a.address, largest)


def test_one_forged_frame_does_nothing() -> None:
    """Whatever keys a stranger has, its frames that claim to be a known peer's are not read."""
    keys, other = make_keys(), make_keys()
    strangers = {
        "no keys": None,
        "keys of its own": other,
        "the right server key": msgspec.structs.replace(other, server_public=keys.server_public),
        "the right client key": msgspec.structs.replace(keys, server_public=other.server_public),
    }
    with listening(keys) as (rank, received), listening(keys) as (leader, _):
        leader.send(rank.address, HELLO)
        assert received.get(timeout=PATIENCE_S) == (leader.address, HELLO)
        with ExitStack() as stack:
            for theirs in strangers.values():
                socket = stack.enter_context(raw(rank.address, theirs))
                # As from the leader: a plan on a later stream, and a reset of the one that is open.
                frames = [
                    encode_envelope(envelope)
                    for source in (leader.address, rank.address, "tcp://127.0.0.1:9")
                    for envelope in (
                        Envelope(source, 1 << 61, 1, 1, 0, 0, 0, encode(Plan(1, b""))),
                        Envelope(source, 1 << 61, 0, 1, 0, 1, RESET),
                    )
                ]
                with suppress(zmq.Again):  # turned away already
                    for frame in frames:
                        socket.send(frame, zmq.NOBLOCK)
            until(lambda: rank.statistics().clients_refused >= 1)  # the others do not get as far as their key
            for number in range(20):
                message = Plan(number, b"real")
                leader.send(rank.address, message)
                assert received.get(timeout=PATIENCE_S) == (leader.address, message)
        assert rank.statistics().peers == 1
        assert rank.statistics().peers_lost == rank.statistics().bad_frames == 0
        rank.check()


def test_a_key_holder_cannot_fill_the_log() -> None:
    stream, keys, count = io.StringIO(), make_keys(), 5000
    configure(LogConfig(format="json"), stream)
    try:
        with listening(keys) as (channel, _), raw(channel.address, keys) as socket:
            for number in range(count):
                socket.send(b"\xc1" * 2000)
                socket.send(speak(f"no address {number}" * 300))
            until(lambda: channel.statistics().bad_frames >= 2 * count)
            lines = stream.getvalue().splitlines()
    finally:
        structlog.reset_defaults()
    assert 0 < len(lines) <= 2 * PER_KIND_LINES
    assert max(len(line) for line in lines) < 4 * MAX_VALUE_CHARS
