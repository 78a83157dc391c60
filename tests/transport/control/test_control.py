"""The control channel's contract, on ZMQ (with keys and without) and in process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from conditions import PATIENCE_S, until

from disagg.core.errors import ProtocolError
from disagg.core.types import RequestKey
from transport.control import reliable
from transport.control.base import ControlChannel
from transport.control.inproc import InprocControl, InprocHub
from transport.control.messages import MAX_MESSAGE_BYTES, FirstTokens, Message, Plan, Release, Released
from transport.control.reliable import Envelope, ReliableOptions
from transport.control.thread import ThreadedControl, TurnPace
from transport.control.zmq import ZmqControl
from transport.keys.curve import make_keys

OPTIONS = ReliableOptions(peer_timeout_s=1.0, heartbeat_s=0.1)


@dataclass
class Station:
    """A channel and its received messages."""

    channel: ControlChannel
    received: queue.Queue[tuple[str, Message]] = field(default_factory=queue.Queue)
    lost: queue.Queue[str] = field(default_factory=queue.Queue)

    @property
    def address(self) -> str:
        return self.channel.address

    def start(self, handler: Callable[[str, Message], None] | None = None) -> Station:
        self.channel.start(
            handler or (lambda peer, message: self.received.put((peer, message))), self.lost.put
        )
        return self

    def next(self) -> tuple[str, Message]:
        return self.received.get(timeout=PATIENCE_S)


class FailingTurns(ThreadedControl):
    """A channel whose thread fails in each turn while `fails` is set."""

    fails = False
    failures = 0

    def _upkeep(self, now_s: float) -> None:
        if self.fails:
            self.failures += 1
            raise RuntimeError("on purpose")
        super()._upkeep(now_s)


class FailingZmq(FailingTurns, ZmqControl):
    """ZMQ, with turns that can fail."""


class FailingInproc(FailingTurns, InprocControl):
    """The channel in process, with turns that can fail."""


class Net:
    """Makes channels of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.hub = InprocHub()
        self.keys = make_keys()
        self.stations: list[Station] = []

    def station(self, address: str | None = None) -> Station:
        channel: ControlChannel
        if self.kind == "zmq":
            port = int(address.rsplit(":", 1)[1]) if address else 0
            channel = ZmqControl("127.0.0.1", port, keys=self.keys, options=OPTIONS)
        else:
            channel = InprocControl(self.hub, address or f"s{len(self.stations)}", OPTIONS)
        self.stations.append(Station(channel))
        return self.stations[-1]

    def failing(self) -> FailingTurns:
        """Returns a channel whose turns can fail; the net closes it."""
        channel: FailingTurns
        if self.kind == "zmq":
            channel = FailingZmq("127.0.0.1", 0, keys=self.keys, options=OPTIONS)
        else:
            channel = FailingInproc(self.hub, f"s{len(self.stations)}", OPTIONS)
        self.stations.append(Station(channel))
        return channel


@pytest.fixture(params=["zmq", "inproc"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    net = Net(request.param)
    yield net
    for station in net.stations:
        station.channel.check()
        station.channel.close()


def token(number: int) -> FirstTokens:
    return FirstTokens(RequestKey("r", 1), 5, [number])


def test_there_and_back(net: Net) -> None:
    a, b = net.station().start(), net.station().start()
    a.channel.send(b.address, token(1))
    assert b.next() == (a.address, token(1))
    b.channel.send(a.address, Released(RequestKey("r", 1)))
    assert a.next() == (b.address, Released(RequestKey("r", 1)))
    until(lambda: a.channel.statistics().unacknowledged == b.channel.statistics().unacknowledged == 0)
    statistics = a.channel.statistics()
    assert (statistics.sent, statistics.delivered, statistics.peers, statistics.peers_lost) == (1, 1, 1, 0)


def test_messages_of_a_corked_channel_wake_its_thread_once() -> None:
    class Counted(InprocControl):
        wakes = 0

        def _wake(self) -> None:
            self.wakes += 1
            super()._wake()

    hub = InprocHub()
    a, b = Station(Counted(hub, "a", OPTIONS)), Station(InprocControl(hub, "b", OPTIONS)).start()
    assert isinstance(a.channel, Counted)
    try:
        a.channel.cork()
        for number in range(3):
            a.channel.send("b", token(number))
        assert a.channel.wakes == 0
        a.channel.uncork()
        assert a.channel.wakes == 1
        a.channel.send("b", token(3))
        assert a.channel.wakes == 2
        a.start()
        assert [b.next()[1] for _ in range(4)] == [token(number) for number in range(4)]
        a.channel.uncork()
    finally:
        a.channel.close()
        b.channel.close()


def test_many_messages_from_many_threads_keep_their_order(net: Net) -> None:
    a, b = net.station().start(), net.station().start()
    count, senders = 300, 3

    def send(ticket: int) -> None:
        for number in range(count):
            a.channel.send(b.address, FirstTokens(RequestKey("r"), ticket, [number]))

    threads = [threading.Thread(target=send, args=(ticket,)) for ticket in range(senders)]
    for thread in threads:
        thread.start()
    received = [b.next()[1] for _ in range(count * senders)]
    for thread in threads:
        thread.join()
    for ticket in range(senders):
        numbers = [m.tokens[0] for m in received if isinstance(m, FirstTokens) and m.ticket == ticket]
        assert numbers == list(range(count))
    assert b.received.empty()


def test_a_message_to_a_connected_peer_does_not_wait_for_the_channels_thread() -> None:
    net, entered, leave = Net("zmq"), threading.Event(), threading.Event()

    def block(peer: str, message: Message) -> None:
        entered.set()
        leave.wait(PATIENCE_S)

    a, b = net.station().start(block), net.station().start()
    try:
        a.channel.send(b.address, token(1))
        assert b.next()[1] == token(1)
        b.channel.send(a.address, token(2))
        assert entered.wait(PATIENCE_S)
        for number in (3, 4):
            a.channel.send(b.address, token(number))
        assert [b.next()[1] for _ in range(2)] == [token(3), token(4)]
        assert not leave.is_set()
        a.channel.forget(b.address)  # work of the channel's thread; later messages wait behind it
        a.channel.send(b.address, token(5))
        assert a.channel.statistics().sent == 3
        leave.set()
        assert b.next()[1] == token(5)
    finally:
        leave.set()
        for station in net.stations:
            station.channel.check()
            station.channel.close()


def test_messages_gather_while_a_paced_thread_pauses() -> None:
    class Held(TurnPace):
        holds = False
        paused, over = threading.Event(), threading.Event()

        def pause_s(self, now_s: float) -> float:
            if self.holds:
                self.paused.set()
                self.over.wait(PATIENCE_S)
            return 0.0

    net, pace = Net("zmq"), Held()
    a = Station(ZmqControl("127.0.0.1", 0, keys=net.keys, options=OPTIONS, pace=pace)).start()
    b = net.station().start()
    try:
        a.channel.send(b.address, token(1))
        assert b.next()[1] == token(1)
        pace.holds = True
        assert pace.paused.wait(PATIENCE_S)
        for number in (2, 3):
            a.channel.send(b.address, token(number))
        assert a.channel.statistics().sent == 1
        pace.holds = False
        pace.over.set()
        assert [b.next()[1] for _ in range(2)] == [token(2), token(3)]
    finally:
        pace.over.set()
        for station in (a, b):
            station.channel.close()


def test_a_large_message(net: Net) -> None:
    a, b = net.station().start(), net.station().start()
    plan = Plan(1, bytes(range(256)) * (8 << 12))
    a.channel.send(b.address, plan)
    assert b.next() == (a.address, plan)


def test_a_message_that_is_too_large_is_refused_at_once(net: Net) -> None:
    a, b = net.station().start(), net.station().start()
    with pytest.raises(ProtocolError, match="Plan"):
        a.channel.send(b.address, Plan(1, bytes(MAX_MESSAGE_BYTES)))
    a.channel.send(b.address, token(1))
    assert b.next() == (a.address, token(1))


def test_a_channel_talks_to_itself(net: Net) -> None:
    a = net.station().start()
    a.channel.send(a.address, token(1))
    assert a.next() == (a.address, token(1))
    until(lambda: a.channel.statistics().unacknowledged == 0)


def test_handlers_may_answer_and_may_fail(net: Net) -> None:
    a, b = net.station(), net.station()
    failures = 0

    def answer(peer: str, message: Message) -> None:
        nonlocal failures
        assert isinstance(message, FirstTokens)
        b.channel.send(peer, token(message.tokens[0] + 1))
        if message.tokens == [1]:
            failures += 1
            raise RuntimeError("on purpose")

    a.start()
    b.start(answer)
    a.channel.send(b.address, token(1))
    a.channel.send(b.address, token(5))
    assert [a.next()[1], a.next()[1]] == [token(2), token(6)]
    assert failures == 1
    assert b.channel.statistics().handler_errors == 1


def test_messages_wait_for_a_peer_that_comes_later(net: Net) -> None:
    a, b = net.station().start(), net.station()
    a.channel.send(b.address, token(1))
    until(lambda: a.channel.statistics().unacknowledged == 1)
    b.start()
    assert b.next() == (a.address, token(1))


def test_a_peer_that_is_not_there_is_lost(net: Net) -> None:
    a, b = net.station().start(), net.station()
    address = b.address
    b.channel.close()
    net.stations.remove(b)
    a.channel.send(address, token(1))
    assert a.lost.get(timeout=PATIENCE_S) == address
    assert "silent for 1 s" in a.channel.statistics().last_lost


def test_a_watched_peer_that_dies_is_lost_and_no_other_peer(net: Net) -> None:
    a, b, c = (net.station().start() for _ in range(3))
    for other in (b, c):
        a.channel.watch(other.address)
        a.channel.send(other.address, token(1))
        other.next()
    b.channel.close()
    assert a.lost.get(timeout=PATIENCE_S) == b.address
    a.channel.send(c.address, token(2))
    assert c.next() == (a.address, token(2))
    assert a.lost.empty()


def test_a_watched_peer_that_was_never_there_is_lost(net: Net) -> None:
    a, b = net.station().start(), net.station()
    address = b.address
    b.channel.close()
    net.stations.remove(b)
    a.channel.watch(address)
    assert a.lost.get(timeout=PATIENCE_S) == address
    until(lambda: a.channel.statistics().peers == 0)


def test_a_watched_peer_that_lives_is_not_lost(net: Net) -> None:
    a, b = net.station().start(), net.station().start()
    a.channel.watch(b.address)
    started_s = time.monotonic()
    until(lambda: time.monotonic() - started_s > 1.5 * OPTIONS.peer_timeout_s)
    assert a.lost.empty()
    assert a.channel.statistics().peers == 1


def test_a_restart_under_the_same_address_is_a_loss_and_then_goes_on(net: Net) -> None:
    a, b = net.station().start(), net.station().start()
    a.channel.send(b.address, token(1))
    b.next()
    until(lambda: a.channel.statistics().unacknowledged == 0)
    b.channel.close()
    again = net.station(b.address).start()
    again.channel.send(a.address, token(7))
    assert a.next() == (b.address, token(7))
    assert a.lost.get(timeout=PATIENCE_S) == b.address
    a.channel.send(b.address, token(8))
    assert again.next() == (a.address, token(8))


def test_forget_is_silent_here_and_a_loss_there(net: Net) -> None:
    a, b = net.station().start(), net.station().start()
    a.channel.send(b.address, token(1))
    b.next()
    until(lambda: a.channel.statistics().unacknowledged == 0)
    a.channel.forget(b.address)
    until(lambda: a.channel.statistics().peers == 0)
    b.channel.send(a.address, token(2))
    assert b.lost.get(timeout=PATIENCE_S) == a.address
    b.channel.send(a.address, token(3))
    assert a.next() == (b.address, token(3))
    assert a.lost.empty()


def test_close_with_a_linger_time_waits_for_acknowledgements(net: Net) -> None:
    a, b = net.station().start(), net.station().start()
    for number in range(50):
        a.channel.send(b.address, token(number))
    a.channel.close(linger_s=20)
    assert a.channel.statistics().unacknowledged == 0
    assert [b.next()[1] for _ in range(50)] == [token(number) for number in range(50)]
    a.channel.send(b.address, token(99))  # nothing happens
    a.channel.close()


def test_close_with_a_linger_time_acknowledges_the_last_message(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the peer would report the loss of a process that has only ended."""
    monkeypatch.setattr(
        reliable, "FIRST_RESEND_S", 60.0
    )  # so that only closing sends an acknowledgement in time
    a, b = net.station().start(), net.station().start()
    a.channel.send(b.address, token(1))
    b.next()
    b.channel.close(linger_s=20)
    until(lambda: a.channel.statistics().unacknowledged == 0)
    assert a.channel.statistics().retransmitted == 0
    assert a.lost.empty()


def test_no_callback_after_close(net: Net) -> None:
    a, b = net.station().start(), net.station().start()
    a.channel.send(b.address, token(1))
    b.next()
    b.channel.close()
    a.channel.send(b.address, token(2))
    assert a.lost.get(timeout=PATIENCE_S) == b.address
    assert b.received.empty()


def test_close_without_start(net: Net) -> None:
    channel = net.station().channel
    channel.close()
    channel.close()
    channel.send("tcp://127.0.0.1:9", token(1))  # nothing happens


# --- faults of the hub: the shared streams mend them


@pytest.fixture
def hub_net() -> Iterator[Net]:
    net = Net("inproc")
    yield net
    for station in net.stations:
        station.channel.close()


@pytest.mark.parametrize("fault", ["drop", "duplicate", "delay"])
def test_a_fault_at_an_exact_message_is_mended(hub_net: Net, fault: str) -> None:
    a, b = hub_net.station().start(), hub_net.station().start()
    getattr(hub_net.hub, fault)(FirstTokens, nth=1)
    messages: list[Message] = [token(1), Release(RequestKey("r"), "x"), token(2), token(3), token(4)]
    for message in messages:
        a.channel.send(b.address, message)
    assert [b.next()[1] for _ in messages] == messages
    hub_net.hub.release()
    statistics = a.channel.statistics, b.channel.statistics
    if fault != "duplicate":
        assert statistics[0]().retransmitted >= 1
    if fault != "drop":
        until(lambda: statistics[1]().duplicates >= 1)
    assert b.received.empty()


def test_a_cut_peer_is_lost_and_can_come_back(hub_net: Net) -> None:
    a, b = hub_net.station().start(), hub_net.station().start()
    a.channel.watch(b.address)
    a.channel.send(b.address, token(1))
    b.next()
    hub_net.hub.cut(b.address)
    assert a.lost.get(timeout=PATIENCE_S) == b.address
    hub_net.hub.mend(b.address)
    a.channel.send(b.address, token(2))
    assert b.next() == (a.address, token(2))


def test_an_observer_sees_each_message_once(hub_net: Net) -> None:
    seen: list[tuple[str, str, Message]] = []
    hub_net.hub.observe(lambda *what: seen.append(what))
    hub_net.hub.drop(FirstTokens)
    a, b = hub_net.station().start(), hub_net.station().start()
    a.channel.send(b.address, token(1))
    b.next()
    assert seen == [(a.address, b.address, token(1))]


def test_a_bad_frame_is_counted_and_dropped(hub_net: Net) -> None:
    a, b = hub_net.station().start(), hub_net.station()
    assert isinstance(b.channel, InprocControl)
    for frame in (b"", b"\xc1", b"\x93\x01\x02\x03", b"x" * 1000):
        b.channel.accept(frame)
    b.start()
    a.channel.send(b.address, token(1))
    assert b.next() == (a.address, token(1))
    assert b.channel.statistics().bad_frames == 4


def test_a_bug_in_the_channel_does_not_end_its_thread(hub_net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = hub_net.station(), hub_net.station().start()
    assert isinstance(a.channel, InprocControl)
    carry, accept = hub_net.hub.carry, a.channel.accept
    broken, arrived = threading.Event(), threading.Event()

    def break_once(destination: str, envelope: Envelope) -> None:
        if envelope.source == a.address and not broken.is_set():
            broken.set()
            raise RuntimeError("on purpose")
        carry(destination, envelope)

    def note(frame: bytes) -> None:
        accept(frame)
        arrived.set()

    monkeypatch.setattr(hub_net.hub, "carry", break_once)
    monkeypatch.setattr(a.channel, "accept", note)
    b.channel.send(a.address, token(9))
    until(arrived.is_set)
    a.channel.send(b.address, token(1))
    a.start()
    assert b.next() == (a.address, token(1))
    assert a.next() == (b.address, token(9)), "acknowledged, and then never delivered"
    assert a.channel.statistics().handler_errors == 1


def test_a_turn_that_fails_again_and_again(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """With work, calls and frames that it left: the thread pauses between turns, and `close` ends it."""
    channel, b = net.failing(), net.station().start()
    channel.start(lambda peer, message: None, lambda peer: None)
    pauses = queue.Queue[float]()
    go_on = threading.Event()

    def pause(seconds: float) -> None:
        pauses.put(seconds)
        go_on.wait(0.001)

    monkeypatch.setattr("transport.control.thread.time.sleep", pause)
    channel.fails = True
    channel.call_soon(lambda: None)
    channel.send(b.address, token(1))
    b.channel.send(channel.address, token(2))
    for _ in range(5):
        assert pauses.get(timeout=PATIENCE_S) > 0
    go_on.set()
    channel.close()
    assert channel.failures <= pauses.qsize() + 6, "a turn without a pause behind it"
