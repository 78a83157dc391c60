"""The TLS transport beyond the contract: keys, windows, lanes, renewal."""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from conditions import PATIENCE_S
from tls_peers import MIB, Station, authenticated, keys, link, move, pump_until, stations

import transport.tls.incoming
import transport.tls.outgoing
import transport.tls.stream
import transport.tls.transport
from disagg.core.errors import ConfigError, PeerLostError, TransportError
from transport.base import Operation
from transport.keys.curve import KeySet
from transport.keys.ring import KeyRing
from transport.select import make_transport
from transport.tls.frames import EAGER_BYTES, PIECE_BYTES, REPLY_LANE, WINDOW_BYTES, WINDOW_MESSAGES
from transport.tls.identity import Contexts, derive
from transport.tls.outgoing import OutgoingChannel
from transport.tls.pieces import PieceSink, PieceSource
from transport.tls.stream import TlsStream
from transport.tls.transport import TlsTransport


def test_every_process_derives_the_same_certificate() -> None:
    code = (
        "from transport.keys.curve import ControlKeys; from transport.tls.identity import derive\n"
        "print(derive(ControlKeys('x a', 'x b', 'x c', 'x d')).pem.decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == derive(keys("x")).pem.decode().strip()
    assert derive(keys("x")).certificate != derive(keys("y")).certificate
    assert "PRIVATE" not in repr(derive(keys("x")))


@pytest.mark.parametrize("field", ["server_secret", "client_secret"])
def test_both_secrets_count(field: str) -> None:
    import msgspec

    other = msgspec.structs.replace(keys("x"), **{field: "another"})
    assert derive(other).certificate != derive(keys("x")).certificate


def test_the_contexts_know_nothing_but_tls_1_3_and_our_certificates() -> None:
    contexts = Contexts([keys("x"), keys("y")])
    for context in (contexts.server, contexts.client):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert len(context.get_ca_certs(binary_form=True)) == 0  # a leaf is no authority
        assert context.cert_store_stats()["x509"] == 2
    assert contexts.presented == derive(keys("x")).certificate


def test_no_transport_without_keys() -> None:
    with pytest.raises(ConfigError, match="keys"):
        make_transport("tls")


def test_a_host_that_is_not_ours_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1.*control.host"):
        TlsTransport("192.0.2.1", KeyRing(keys("x")))


def test_different_keys_do_not_connect() -> None:
    with stations(1) as [ours], stations(1, keys("theirs")) as [theirs]:
        link(ours, theirs)
        sends = [
            ours.transport.send("b", 1, ours.memory[:10]),
            theirs.transport.send("a", 1, theirs.memory[:MIB]),
        ]
        pump_until(lambda: all(send.ended for send in sends), ours, theirs)
        assert all(isinstance(send.error, PeerLostError) for send in sends)
        assert not ours.arrived
        assert not theirs.arrived


def test_a_restarted_peer_on_the_same_port_is_another_one() -> None:
    with stations(2) as [a, b]:
        old = b.where._replace(unique=bytes(16)).pack()
        a.transport.connect("b", old)
        send = a.transport.send("b", 1, a.memory[:10])
        pump_until(lambda: send.ended, a, b)
        assert isinstance(send.error, PeerLostError)
        assert not b.arrived


def test_a_message_belongs_to_the_peer_whose_address_said_hello() -> None:
    with stations(3) as [a, b, c]:
        link(a, b)
        b.transport.connect("c", c.transport.address)
        send = a.transport.send("b", 1, a.memory[:MIB])
        pump_until(lambda: bool(b.arrived), a, b)
        receive = b.transport.receive("c", b.arrived.pop(), b.memory[:MIB])
        pump_until(lambda: send.ended and receive.ended, a, b)
        assert isinstance(receive.error, TransportError)
        assert "was not sent by c" in str(receive.error)
        move(a, b, 100)


@pytest.mark.parametrize("size", [1, EAGER_BYTES])
def test_a_receiver_that_takes_nothing_holds_a_window_and_no_more(size: int) -> None:
    """What is beyond it waits at the sender, and comes in order when there is room."""
    window = min(WINDOW_MESSAGES, WINDOW_BYTES // size)
    with stations(2) as [a, b]:
        link(a, b)
        count = window + 300
        for tag in range(count):
            a.transport.send("b", tag, a.memory[:size])
        pump_until(lambda: len(a.ended) == window, a)
        pump_until(lambda: len(b.arrived) == window, b)
        assert a.transport.statistics().pending == 300
        tags: list[int] = []

        def take() -> bool:
            for arrival in b.arrived:
                tags.append(arrival.tag)
                b.transport.discard("a", arrival)
            b.arrived.clear()
            return len(tags) == count

        pump_until(take, a, b)
        assert tags == list(range(count))
        pump_until(lambda: len(a.ended) == count, a)


def test_small_messages_pass_large_ones_without_a_receive() -> None:
    with stations(2) as [a, b]:
        link(a, b)
        for tag in range(100, 104):
            a.transport.send("b", tag, a.memory)
        pump_until(lambda: len(b.arrived) == 4, a, b)
        waiting, b.arrived = b.arrived, []
        for tag in range(20):
            move(a, b, 50, tag)
        for arrival in waiting:
            b.transport.discard("a", arrival)
        pump_until(lambda: a.transport.statistics().pending == 0, a, b)


@pytest.mark.parametrize("lanes", [1, 2])
def test_lanes_are_renewed_before_a_key_has_encrypted_too_much(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport.tls.outgoing, "RENEW_BYTES", 3 * MIB)
    dialled: list[int] = []
    dial = transport.tls.outgoing.OutgoingChannel.dial

    def count(channel: transport.tls.outgoing.OutgoingChannel, lane: int, deadline_s: float) -> object:
        dialled.append(lane)
        return dial(channel, lane, deadline_s)

    monkeypatch.setattr(transport.tls.outgoing.OutgoingChannel, "dial", count)
    with stations(2, lanes=lanes) as [a, b]:
        link(a, b)
        for tag in range(6):
            move(a, b, 8 * MIB + 5, tag)
            move(a, b, 100, tag)
        assert len(dialled) >= 2 * (1 + lanes) + 5
        assert a.transport.statistics().sends_failed == 0


class Idle:
    """Counts the threads that wait for a condition."""

    threads = 0

    def watch(self, condition: threading.Condition) -> None:
        wait = condition.wait

        def counted(timeout_s: float | None = None) -> bool:
            self.threads += 1  # under the condition's lock
            try:
                return wait(timeout_s)
            finally:
                self.threads -= 1

        condition.wait = counted  # type: ignore[method-assign]


def test_a_renewal_waits_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else replies that the peer wrote to the connection in between would be lost."""
    monkeypatch.setattr(transport.tls.outgoing, "RENEW_BYTES", 0)
    outgoing = transport.tls.outgoing.OutgoingChannel
    take, dial = outgoing.take_fresh, outgoing.dial
    may_take, too_early, idle = threading.Event(), [], Idle()

    def take_later(channel: Any) -> Any:
        may_take.wait(PATIENCE_S)
        return take(channel)

    def note(channel: Any, lane: int, deadline_s: float) -> Any:
        too_early.append(lane == REPLY_LANE and channel.fresh is not None)
        return dial(channel, lane, deadline_s)

    monkeypatch.setattr(outgoing, "take_fresh", take_later)
    monkeypatch.setattr(outgoing, "dial", note)
    with stations(2) as [a, b]:
        link(a, b)
        [channel] = a.transport.outgoing
        idle.watch(channel.work)
        for tag in range(2):  # each is followed by a renewal
            send = a.transport.send("b", tag, a.memory[:10])
            pump_until(partial(_ended, send), a, b)
        pump_until(lambda: idle.threads > 0, a, b)  # the lane has no more to do
        may_take.set()
        move(a, b, MIB)
        assert not any(too_early)


def test_a_lane_has_one_connection_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow receiver would else find two connections of one lane, and could read the later one first."""
    monkeypatch.setattr(transport.tls.outgoing, "RENEW_BYTES", 0)
    incoming, stream = transport.tls.incoming.IncomingChannel, transport.tls.stream.TlsStream
    read, serve, wait_for_end = incoming.read, incoming.serve_lane, stream.wait_for_end
    may_read, waits, connections = threading.Event(), threading.Event(), []

    def read_later(*given: Any) -> bool:
        may_read.wait(PATIENCE_S)
        return read(*given)

    def count(channel: Any, *given: Any) -> None:
        connections.append(channel.lane_connections + 1)
        serve(channel, *given)

    def note(connection: Any) -> None:
        waits.set()
        wait_for_end(connection)

    monkeypatch.setattr(incoming, "read", read_later)
    monkeypatch.setattr(incoming, "serve_lane", count)
    monkeypatch.setattr(stream, "wait_for_end", note)
    with stations(2) as [a, b]:
        link(a, b)
        a.transport.send("b", 0, a.memory[:10])
        pump_until(lambda: waits.is_set() or max(connections, default=0) > 1, a, b)
        may_read.set()
        for tag in range(1, 4):
            move(a, b, MIB, tag)
        assert set(connections) == {1}
        assert len(connections) > 6


def test_openssl_on_the_socket_moves_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way with kernel offload; without it OpenSSL encrypts itself."""
    monkeypatch.setattr(transport.tls.stream, "kernel_offload", lambda: True)
    with stations(2, lanes=2) as [a, b]:
        link(a, b)
        for tag, size in enumerate((1, 8192, 8193, 5 * MIB + 1)):
            move(a, b, size, tag)
            move(b, a, size, tag, "b", "a")
        b.transport.close()
        pump_until(lambda: a.transport.send("b", 1, a.memory[:1]).error is not None, a)


OLD, NEW = keys("old"), keys("new")
PHASES = {
    "old": KeySet(OLD),
    "both, old presented": KeySet(OLD, NEW, 1e12),
    "both, new presented": KeySet(OLD, NEW, 1.0),
    "new": KeySet(NEW),
}
"""What a process holds before, during and after a rotation."""
STRANGERS = [("old", "new"), ("new", "old")]


class LateThread:
    """A thread of the channel to a peer that leaves when the test says so."""

    def __init__(self, station: Any, peer: str, incoming: bool = False) -> None:
        """In the channel to `peer`, or in the station's only incoming one."""
        entered, self._may_leave = threading.Event(), threading.Event()

        def stay() -> None:
            entered.set()
            self._may_leave.wait(PATIENCE_S)

        channel = station.transport.peers[peer].outgoing
        if incoming:
            [channel] = station.transport.incoming.values()
        self._thread = threading.Thread(target=channel.adopt, args=(stay,))
        self._thread.start()
        assert entered.wait(PATIENCE_S)

    def leave(self) -> None:
        self._may_leave.set()
        self._thread.join(PATIENCE_S)


def test_a_late_fence_blocks_no_other_peer() -> None:
    """Memory of the fenced peer's operations is held until its last thread has left."""
    with stations(3) as [a, b, c]:
        link(a, b)
        link(a, c, b_name="c")
        late = LateThread(a, "b")
        held = a.transport.send("b", 1, a.memory[:MIB])
        began_s = time.monotonic()
        a.transport.disconnect("b")
        assert time.monotonic() - began_s < transport.tls.transport.FENCE_TIMEOUT_S / 4
        move(a, c, MIB, b_name="c")
        b.transport.disconnect("a")
        link(a, b)
        move(a, b, MIB)
        assert not held.ended
        late.leave()
        pump_until(lambda: held.ended, a)
        assert isinstance(held.error, PeerLostError)


def test_a_fence_that_cannot_be_proven_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """`progress` raises on the transfer thread, which breaks the rank."""
    with stations(2) as [a, b]:
        link(a, b)
        late = LateThread(a, "b")
        with monkeypatch.context() as patch:
            patch.setattr(transport.tls.transport, "FENCE_TIMEOUT_S", 0.0)
            a.transport.disconnect("b")
            with pytest.raises(TransportError, match="no fence"):
                a.transport.progress()
        late.leave()


def test_the_fence_of_a_lost_peer_covers_its_incoming_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel has ended with the outgoing one, but a thread of it may still write into a receive's memory."""
    with stations(2) as [a, b]:
        link(a, b)
        move(b, a, MIB, a_name="b", b_name="a")
        late = LateThread(a, "b", incoming=True)
        b.transport.close()
        pump_until(lambda: a.transport.lost_peers() == ["b"], a)
        with monkeypatch.context() as patch:
            patch.setattr(transport.tls.transport, "FENCE_TIMEOUT_S", 0.0)
            a.transport.disconnect("b")
            with pytest.raises(TransportError, match="no fence"):
                a.transport.progress()
        late.leave()
        pump_until(
            lambda: not a.transport.incoming and not a.transport.outgoing
        )  # the channel's own threads too
        a.transport.progress()


class TestRotation:
    @pytest.mark.parametrize("offload", [False, True], ids=["buffered", "on the socket"])
    @pytest.mark.parametrize("listens", PHASES)
    @pytest.mark.parametrize("dials", PHASES)
    def test_processes_with_a_common_generation_connect(
        self, dials: str, listens: str, offload: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever each of them presents; those without one are refused."""
        monkeypatch.setattr(transport.tls.stream, "kernel_offload", lambda: offload)
        with stations(1, PHASES[dials]) as [a], stations(1, PHASES[listens]) as [b]:
            link(a, b)
            if (dials, listens) not in STRANGERS:
                move(a, b, MIB)
                assert a.transport.statistics().sends_failed == 0
                return
            send = a.transport.send("b", 1, a.memory[:10])
            pump_until(lambda: send.ended, a, b)
            assert isinstance(send.error, PeerLostError)
            assert not b.arrived

    def test_a_retired_generation_is_refused_and_the_other_goes_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The listener knows what it presented: connections that have nothing of the old generation stay."""
        monkeypatch.setattr(transport.tls.transport, "UPKEEP_S", 0.0)
        ring = KeyRing(PHASES["both, old presented"])
        with stations(1, ring) as [b], stations(1, NEW) as [a], stations(1, OLD) as [late]:
            link(a, b)
            move(a, b, MIB)
            late.transport.connect("b", b.transport.address)
            b.transport.connect("late", late.transport.address)
            move(late, b, MIB, a_name="late")
            before = connections(a)
            ring.replace(PHASES["new"])
            pump_until(lambda: late.transport.send("b", 9, late.memory[:1]).error is not None, late, b)
            late.transport.disconnect("b")
            late.transport.connect("b", b.transport.address)
            send = late.transport.send("b", 1, late.memory[:10])
            pump_until(lambda: send.ended, late, b)
            assert isinstance(send.error, PeerLostError)
            move(a, b, MIB)
            assert connections(a) == before

    def test_keys_that_change_during_a_dial_end_no_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first connection of a dial, with the old generation, does not count."""
        ring = KeyRing(PHASES["both, old presented"])
        make = OutgoingChannel._authenticated  # noqa: SLF001 - the connection exists only within a dial
        mixed: list[int] = []

        def replace(channel: OutgoingChannel, contexts: Contexts, deadline_s: float) -> TlsStream:
            stream = make(channel, contexts, deadline_s)
            if len(stream.certificates) == 2:
                ring.replace(PHASES["new"])
                channel.follow(Contexts([NEW]))
                mixed.append(len(mixed))
            return stream

        monkeypatch.setattr(OutgoingChannel, "_authenticated", replace)
        with stations(1, ring) as [b], stations(1, NEW) as [a]:
            link(a, b)
            move(b, a, MIB, a_name="b", b_name="a")
            assert certificates(b) == {derive(NEW).certificate}
        assert mixed == [0]

    def test_an_unknown_name_is_answered_with_what_is_presented(self) -> None:
        contexts = Contexts([OLD])
        contexts.server_name = "g-unknown"
        with stations(1, PHASES["both, old presented"]) as [b]:
            stream = authenticated(b, contexts)
            assert stream.certificates == {derive(OLD).certificate}
            stream.close()

    def test_traffic_goes_on_while_keys_change(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Old, then both, then the new ones presented, then the old ones gone: on two sides, never at once."""
        monkeypatch.setattr(transport.tls.transport, "UPKEEP_S", 0.0)
        monkeypatch.setattr(transport.tls.outgoing, "RENEW_INTERVAL_S", 0.05)
        old, new = keys("old"), keys("new")
        phases = [KeySet(old, new, 1e12), KeySet(old, new, 1.0), KeySet(new)]
        rings = [KeyRing(old), KeyRing(old)]
        with stations(1, rings[0]) as [a], stations(1, rings[1]) as [b]:
            link(a, b)
            move(a, b, MIB)
            for phase in phases:
                for ring in rings:
                    ring.replace(phase)
                    for tag in range(3):
                        move(a, b, 2 * MIB, tag)
                        move(b, a, 100, tag, "b", "a")
                if phase is phases[1]:
                    pump_until(lambda: {derive(new).certificate} == certificates(a) == certificates(b), a, b)
            assert a.transport.statistics().sends_failed == b.transport.statistics().sends_failed == 0

    def test_a_peer_that_reads_its_rotated_file_later_is_not_lost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`disagg keys --rotate --grace-s 0`: one side presents a generation that the other does not know yet."""
        monkeypatch.setattr(transport.tls.transport, "UPKEEP_S", 0.0)
        monkeypatch.setattr(transport.tls.outgoing, "RENEW_INTERVAL_S", 0.05)
        old, new = keys("old"), keys("new")
        rings = [KeyRing(old), KeyRing(old)]
        with stations(1, rings[0]) as [a], stations(1, rings[1]) as [b]:
            link(a, b)
            for tag in range(2):
                move(a, b, MIB, tag)
                move(b, a, MIB, tag, "b", "a")
            before = connections(a)
            rings[0].replace(KeySet(old, new, 1.0))
            pump_until(lambda: not before & connections(a), a, b)  # renewed, with the old keys
            move(a, b, 2 * MIB)
            move(b, a, 100, 7, "b", "a")
            rings[1].replace(KeySet(old, new, 1.0))
            pump_until(lambda: {derive(new).certificate} == certificates(a) == certificates(b), a, b)
            move(a, b, 2 * MIB)

    def test_a_connection_ends_with_its_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transport.tls.transport, "UPKEEP_S", 0.0)
        rings = [KeyRing(keys("old")), KeyRing(keys("old"))]
        with stations(1, rings[0]) as [a], stations(1, rings[1]) as [b]:
            link(a, b)
            move(a, b, MIB)
            rings[1].replace(KeySet(keys("new")))
            pump_until(lambda: a.transport.send("b", 9, a.memory[:1]).error is not None, a, b)
            with pytest.raises(OSError, match=r"."):  # the old keys open nothing any more
                authenticated(b, Contexts([keys("old")])).read_into(memoryview(bytearray(1)))


def _ended(operation: Operation) -> bool:
    return operation.ended


def connections(station: Station) -> set[TlsStream]:
    """Those that it dialled."""
    transport = station.transport
    with transport.state.lock:
        return {stream for channel in transport.outgoing for stream in channel.streams}


def certificates(station: Station) -> set[bytes]:
    """All that its connections were made with."""
    transport = station.transport
    with transport.state.lock:
        channels = [*transport.outgoing, *transport.incoming.values()]
        return {one for channel in channels for stream in channel.streams for one in stream.certificates}


class TestPieces:
    def test_sources_and_sinks_move_exactly_their_piece(self) -> None:
        view = torch.arange(100, dtype=torch.uint8)
        into = torch.zeros(100, dtype=torch.uint8)
        source, sink = PieceSource(), PieceSink()
        for offset, nbytes in ((40, 20), (0, 40), (60, 40)):
            read = source.stage(view, offset, nbytes)

            def fill(target: memoryview, read: object = read) -> None:
                assert callable(read)
                target[:] = read()

            assert sink.put(into, offset, nbytes, fill) is None
        source.finish()
        sink.finish()
        assert torch.equal(view, into)

    def test_host_memory_is_not_copied(self) -> None:
        view = torch.zeros(10, dtype=torch.uint8)
        read = PieceSource().stage(view, 2, 3)
        view[2:5] = 9
        assert bytes(read()) == b"\x09\x09\x09"

    @pytest.mark.gpu
    def test_device_memory_goes_through_pinned_buffers(self) -> None:
        view = torch.randint(0, 256, (3 * PIECE_BYTES + 7,), dtype=torch.uint8, device="cuda")
        into = torch.zeros_like(view)
        torch.cuda.synchronize()  # copies run on other streams; a transport is given complete bytes
        source, sink = PieceSource(), PieceSink()
        for offset in range(0, view.numel(), PIECE_BYTES):
            nbytes = min(PIECE_BYTES, view.numel() - offset)
            read = source.stage(view, offset, nbytes)
            sink.put(into, offset, nbytes, lambda target, read=read: target.__setitem__(slice(None), read()))
        sink.finish()
        assert torch.equal(view, into)
