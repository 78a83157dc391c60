"""Active messages: messages of transfer threads over the data plane."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from conditions import PATIENCE_S

from disagg.core.errors import ProtocolError
from disagg.core.types import RequestKey, Segment, Span
from transport.active_messages import MAX_HELD_BYTES, MOST_IN_FRAME, ActiveMessages
from transport.base import Arrival, Operation, Transport
from transport.control import messages as m
from transport.inproc import InprocFabric, InprocTransport
from transport.slots import SLOT_BYTES
from transport.tags import TICKET_NUMBERS, active_message_tag, inbox_of, is_active_message, pack, unpack
from transport.ucx.transport import UcxTransport

SEGMENT = Segment(0, 1, 2, Span(0, 2), Span(0, 1), Span(0, 9), 4096)


class Box:
    """One rank: its received messages, and the messages that could not be sent."""

    def __init__(self, fabric: InprocFabric, name: str, transport: Transport | None = None) -> None:
        self.name = name
        self.transport: Transport = transport or InprocTransport(fabric, name)
        self.came: list[tuple[str, m.Message]] = []
        self.lost: list[tuple[str, m.Message, str]] = []
        self.announced: list[tuple[str, m.Message]] = []
        self.active_messages = ActiveMessages(
            self.transport,
            lambda peer, message: self.announced.append((peer, message)),
            dict.fromkeys((m.Watermark, m.LeaseRequest), self._came),
            lambda peer, message, error: self.lost.append((peer, message, str(error))),
        )

    fails_at: m.Message | None = None

    def _came(self, peer: str, message: m.Message) -> None:
        if message == self.fails_at:
            raise RuntimeError("refused")
        self.came.append((peer, message))

    def turn(self) -> list[Arrival]:
        """Drives the transport once; returns arrivals that are no active messages."""
        for operation in self.transport.progress():
            assert self.active_messages.ended(operation) or operation.kind == "discard"
        return [a for a in self.transport.arrivals() if not self.active_messages.arrived(a)]


def link(a: Box, b: Box) -> None:
    for one, other in ((a, b), (b, a)):
        one.transport.connect(other.name, other.transport.address)
        one.active_messages.link(other.name)
        announce(one, other)


def announce(source: Box, destination: Box) -> bool:
    """Delivers the latest announcement of `source`."""
    peer, message = source.announced[-1]
    assert peer == destination.name
    assert isinstance(message, m.Linked)
    return destination.active_messages.on_linked(source.name, message)


def tag_of(box: Box) -> int:
    """The tag of active messages to the latest inbox of `box`."""
    message = box.announced[-1][1]
    assert isinstance(message, m.Linked)
    return active_message_tag(message.inbox)


@pytest.fixture
def boxes() -> tuple[InprocFabric, Box, Box]:
    fabric = InprocFabric()
    a, b = Box(fabric, "a"), Box(fabric, "b")
    link(a, b)
    return fabric, a, b


def settle(*boxes: Box) -> None:
    for _ in range(4):
        for box in boxes:
            assert not box.turn()


def test_messages_arrive_whole_in_order_and_their_memory_is_reused(
    boxes: tuple[InprocFabric, Box, Box],
) -> None:
    _, a, b = boxes
    sent: list[m.Message] = []
    for turn in range(150):
        size = [0, 1, 40][turn % 3]  # the last one is larger than a slot
        sent.append(m.LeaseRequest(RequestKey(f"r{turn}"), turn, 1, [SEGMENT] * size))
        a.active_messages.send("b", sent[-1])
        if turn % 7 == 0:
            settle(a, b)
    settle(a, b)
    assert b.came == [("a", message) for message in sent]
    assert len(m.encode(sent[2])) > SLOT_BYTES
    registered = [box.transport.statistics().registered_bytes for box in (a, b)]
    assert registered == [64 * SLOT_BYTES] * 2, "memory of larger messages is freed"
    assert not a.lost
    a.transport.check()


def test_undelivered_messages_are_reported(boxes: tuple[InprocFabric, Box, Box]) -> None:
    fabric, a, b = boxes
    fabric.faults.fail_send(1)
    messages = [m.Watermark(0, position, 1 << 20) for position in range(3)]
    for message in messages:
        a.active_messages.send("b", message)
    settle(a, b)
    assert [message for _, message in b.came] == [messages[0], messages[2]]
    assert [(peer, message) for peer, message, _ in a.lost] == [("b", messages[1])]
    b.transport.close()
    a.active_messages.send("b", messages[0])
    settle(a)
    assert len(a.lost) == 2
    assert "is gone" in a.lost[1][2] or "is lost" in a.lost[1][2]


class Fetching(InprocTransport):
    """Ends the receive of a large message one poll later, as UCX does for a rendezvous."""

    late: tuple[Operation, ...] = ()

    def progress(self) -> list[Operation]:
        ended, late = super().progress(), self.late
        self.late = tuple(o for o in ended if o.kind == "receive" and o.nbytes > SLOT_BYTES)
        return [*(o for o in ended if o not in self.late), *late]


@pytest.mark.parametrize("backend", ["inproc", "ucx"])
def test_later_messages_do_not_overtake_a_large_one(backend: str) -> None:
    """A chunk's lease request may have tens of KiB; an earlier arrival of the next chunk's would leave a gap."""
    fabric = InprocFabric()
    a, b = (
        Box(fabric, name, Fetching(fabric, name) if backend == "inproc" else UcxTransport()) for name in "ab"
    )
    try:
        link(a, b)
        sent: list[m.Message] = [
            m.LeaseRequest(RequestKey("r"), i, 1, [SEGMENT] * size)
            for i, size in enumerate((1, 400, 1, 200, 1))
        ]
        for message in sent:
            a.active_messages.send("b", message)
        until_s = time.monotonic() + PATIENCE_S
        while len(b.came) < len(sent) and time.monotonic() < until_s:
            settle(a, b)
        assert b.came == [("a", message) for message in sent]
        settle(a, b)
        assert [box.transport.statistics().pending for box in (a, b)] == [0, 0]
    finally:
        for box in (a, b):
            box.transport.close()


def spoil_kind(a: Box, b: Box) -> None:
    a.active_messages.send("b", m.StopSending(RequestKey("r"), 1, "enough"))


def spoil_bytes(a: Box, b: Box) -> None:
    memory = torch.full((9,), 0xC1, dtype=torch.uint8)
    a.transport.register(memory)
    a.transport.send("b", tag_of(b), memory)


def spoil_length(a: Box, b: Box) -> None:
    """Our transports never send this message, but other users of UCX can."""
    memory = torch.ones(9, dtype=torch.uint8)
    a.transport.register(memory)
    operation = a.transport.send("b", tag_of(b), memory)
    [message] = a.transport.wire  # type: ignore[attr-defined]
    message.data = message.data[:0]
    assert not operation.ended


@pytest.mark.parametrize("spoil", [spoil_kind, spoil_bytes, spoil_length])
def test_invalid_active_messages_are_counted_and_dropped(
    boxes: tuple[InprocFabric, Box, Box], spoil: Callable[[Box, Box], None]
) -> None:
    _, a, b = boxes
    spoil(a, b)
    for arrival in b.transport.arrivals():
        assert b.active_messages.arrived(arrival)
    settle(b)
    assert (b.active_messages.dropped, b.came) == (1, [])
    a.transport.progress()
    good = m.Watermark(0, 1, 1 << 20)
    a.active_messages.send("b", good)
    settle(a, b)
    assert b.came == [("a", good)]


def test_active_messages_of_a_forgotten_peer_are_dropped(boxes: tuple[InprocFabric, Box, Box]) -> None:
    _, a, b = boxes
    b.active_messages.forget("a")
    a.active_messages.send("b", m.Watermark(0, 1, 1 << 20))
    for arrival in b.transport.arrivals():
        assert b.active_messages.arrived(arrival)
    for operation in b.transport.progress():
        assert operation.kind == "discard"
    assert (b.active_messages.dropped, b.came) == (1, [])
    assert not a.turn(), "its sender's memory is free again"
    assert a.transport.statistics().pending == 0


def test_data_is_not_an_active_message(boxes: tuple[InprocFabric, Box, Box]) -> None:
    _, a, b = boxes
    memory = torch.ones(9, dtype=torch.uint8)
    a.transport.register(memory)
    a.transport.send("b", pack(TICKET_NUMBERS - 1, 4095, (1 << 20) - 1), memory)
    [arrival] = b.transport.arrivals()
    assert not b.active_messages.arrived(arrival)


def test_messages_wait_for_the_peer_s_link(boxes: tuple[InprocFabric, Box, Box]) -> None:
    """Until its `Linked` they are held, in order; an earlier `Linked` than the own link is kept."""
    fabric, a, b = boxes
    c = Box(fabric, "c")
    a.transport.connect("c", c.transport.address)
    a.active_messages.link("c")
    sent = [m.Watermark(0, position, 1 << 20) for position in range(4)]
    for message in sent[:2]:
        a.active_messages.send("c", message)
    settle(a, c)
    assert (c.came, c.active_messages.dropped) == ([], 0)
    c.transport.connect("a", a.transport.address)
    c.active_messages.link("a")
    assert announce(c, a)
    a.active_messages.send("c", sent[2])
    settle(a, c)
    assert announce(a, c)
    c.active_messages.send("a", sent[3])
    settle(a, c)
    assert (c.came, a.came) == ([("a", message) for message in sent[:3]], [("c", sent[3])])
    assert not b.came


def test_held_messages_are_bounded(boxes: tuple[InprocFabric, Box, Box]) -> None:
    fabric, a, _ = boxes
    c = Box(fabric, "c")
    a.transport.connect("c", c.transport.address)
    a.active_messages.link("c")
    large = m.LeaseRequest(RequestKey("r"), 1, 1, [SEGMENT] * 4000)
    fits = MAX_HELD_BYTES // len(m.encode(large))
    for _ in range(fits + 3):
        a.active_messages.send("c", large)
    assert a.active_messages.dropped == 3
    c.transport.connect("a", a.transport.address)
    c.active_messages.link("a")
    announce(c, a)
    settle(a, c)
    assert len(c.came) == fits


def test_no_message_from_before_a_fence_is_handled(boxes: tuple[InprocFabric, Box, Box]) -> None:
    """Neither one on the wire, nor one whose receive has ended, nor a held one."""
    fabric, a, b = boxes
    old, new = (m.Watermark(0, position, 1 << 20) for position in range(2))
    fabric.faults.hold(1)
    a.active_messages.send("b", old)
    for arrival in b.transport.arrivals():
        assert b.active_messages.arrived(arrival)
    a.active_messages.send("b", old)
    assert fabric.held
    for arrival in b.transport.arrivals():
        assert b.active_messages.arrived(arrival)
    received = b.transport.progress()  # has ended, and is handled after the fence
    b.transport.disconnect("a")
    b.active_messages.forget("a")
    for operation in received:
        assert b.active_messages.ended(operation)
    b.transport.connect("a", a.transport.address)
    b.active_messages.link("a")
    fabric.release()
    settle(a, b)
    assert (b.came, b.active_messages.dropped) == ([], 1)
    assert not announce(b, a), "the peer has fenced this rank"
    a.active_messages.send("b", new)
    settle(a, b)
    assert b.came == [("a", new)]
    registered = [box.transport.statistics().registered_bytes for box in (a, b)]
    assert registered == [64 * SLOT_BYTES] * 2


def test_a_message_without_a_link_fails(boxes: tuple[InprocFabric, Box, Box]) -> None:
    _, a, _ = boxes
    a.transport.disconnect("b")
    a.active_messages.forget("b")
    a.active_messages.send("b", m.Watermark(0, 1, 1 << 20))
    settle(a)
    [(peer, _, error)] = a.lost
    assert peer == "b"
    assert "is not connected" in error


def test_active_message_tags_are_no_ticket_s() -> None:
    tag = active_message_tag(0xDEADBEEF)
    assert is_active_message(tag)
    assert unpack(tag).ticket == TICKET_NUMBERS
    assert not is_active_message(pack(TICKET_NUMBERS - 1, 0, 0))
    assert inbox_of(tag) == 0xDEADBEEF
    with pytest.raises(ValueError, match="inbox"):
        active_message_tag(1 << 32)


def watermark(number: int) -> m.Watermark:
    return m.Watermark(0, number, 1 << 30)


def collected(box: Box, peer: str, numbers: range) -> int:
    """Sends watermarks in one turn; returns the number of transport messages."""
    before = box.transport.statistics().pending
    box.active_messages.collect()
    for number in numbers:
        box.active_messages.send(peer, watermark(number))
    box.active_messages.flush()
    return box.transport.statistics().pending - before


def test_messages_of_one_turn_share_a_frame(boxes: tuple[InprocFabric, Box, Box]) -> None:
    _, a, b = boxes
    a.active_messages.collect()
    a.active_messages.send("b", watermark(0))
    assert a.transport.statistics().pending == 0
    assert collected(a, "b", range(1, 3)) == 1
    a.active_messages.send("b", watermark(3))  # after the turn
    settle(a, b)
    assert b.came == [("a", watermark(number)) for number in range(4)]
    assert collected(a, "b", range(MOST_IN_FRAME + 1)) == 2
    settle(a, b)
    assert b.came[4:] == [("a", watermark(number)) for number in range(MOST_IN_FRAME + 1)]


def test_a_large_message_does_not_overtake_a_frame(boxes: tuple[InprocFabric, Box, Box]) -> None:
    _, a, b = boxes
    large = m.LeaseRequest(RequestKey("r"), 7, 1, [SEGMENT] * 200)
    a.active_messages.collect()
    a.active_messages.send("b", watermark(1))
    a.active_messages.send("b", large)
    a.active_messages.send("b", watermark(2))
    a.active_messages.flush()
    settle(a, b)
    assert [message for _, message in b.came] == [watermark(1), large, watermark(2)]


def test_a_frame_that_is_lost_loses_each_of_its_messages(boxes: tuple[InprocFabric, Box, Box]) -> None:
    fabric, a, b = boxes
    fabric.faults.fail_send(0, lambda source, destination, tag: True)
    collected(a, "b", range(2))
    settle(a, b)
    assert [message for _, message, _ in a.lost] == [watermark(0), watermark(1)]
    assert b.came == []


def test_a_fence_drops_what_waits_for_a_frame(boxes: tuple[InprocFabric, Box, Box]) -> None:
    _, a, _ = boxes
    a.active_messages.collect()
    a.active_messages.send("b", watermark(1))
    a.active_messages.forget("b")
    a.active_messages.flush()
    assert a.transport.statistics().pending == 0


def test_a_message_without_a_link_does_not_wait_for_a_link_of_its_turn(
    boxes: tuple[InprocFabric, Box, Box],
) -> None:
    """Its send fails. A new inbox of the peer does not receive it."""
    _, a, b = boxes
    a.active_messages.collect()
    for one, other in ((a, b), (b, a)):
        one.transport.disconnect(other.name)
        one.active_messages.forget(other.name)
    a.active_messages.send("b", watermark(1))
    link(a, b)
    a.active_messages.send("b", watermark(2))
    a.active_messages.flush()
    settle(a, b)
    assert [message for _, message, _ in a.lost] == [watermark(1)]
    assert b.came == [("a", watermark(2))]


def test_a_handler_that_raises_keeps_no_other_message_of_its_frame(
    boxes: tuple[InprocFabric, Box, Box],
) -> None:
    _, a, b = boxes
    b.fails_at = watermark(0)
    collected(a, "b", range(3))
    with pytest.raises(RuntimeError, match="refused"):
        settle(a, b)
    assert b.came == [("a", watermark(1)), ("a", watermark(2))]


def test_a_handler_that_raises_keeps_no_message_that_has_arrived_meanwhile(
    boxes: tuple[InprocFabric, Box, Box],
) -> None:
    """The receive of the first message ends last."""
    _, a, b = boxes
    b.fails_at = watermark(0)
    for number in range(3):
        a.active_messages.send("b", watermark(number))
    for arrival in b.transport.arrivals():
        assert b.active_messages.arrived(arrival)
    first, *others = b.transport.progress()
    for operation in others:
        assert b.active_messages.ended(operation)
    assert b.came == []
    with pytest.raises(RuntimeError, match="refused"):
        b.active_messages.ended(first)
    assert b.came == [("a", watermark(1)), ("a", watermark(2))]


def test_bytes_that_are_no_frame_are_dropped() -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        m.decode_frame(m.join([m.encode(watermark(1)), b"\xc1"]))
