"""Memory handles: opened by the owning process, refused with a reason elsewhere; and completion notifications."""

from __future__ import annotations

import gc

import msgspec
import pytest
import torch

from disagg.core.errors import ProtocolError, TransportError
from disagg.core.types import Segment, Span
from transport.base import Operation, OperationState
from transport.completion_notifications import CompletionNotifications, Written
from transport.handles import MemoryHandle
from transport.inproc import InprocFabric, InprocTransport
from transport.peer_memory import offer, open_memory
from transport.slots import SLOT_BYTES
from transport.tags import pack

CPU = torch.device("cpu")
SEGMENT = Segment(5, 1, 2, Span(0, 1 << 20), Span(3, 1 << 16), Span(7, 1 << 40), 1 << 62)
WRITTEN = Written(SEGMENT, (1 << 63) - 1, again=True)


def test_the_owning_process_gets_the_memory() -> None:
    memory = torch.arange(24, dtype=torch.int64).view(2, 3, 4)
    handle = msgspec.msgpack.decode(msgspec.msgpack.encode(offer(memory)), type=MemoryHandle)
    opened = open_memory(handle, CPU)
    opened[1, 2, 3] = -5
    assert memory[1, 2, 3] == -5


@pytest.mark.parametrize(
    ("change", "message"),
    [({"host": "elsewhere"}, "another host"), ({"process": 1}, "cannot be opened from another process")],
)
def test_the_error_of_a_refused_handle_has_the_reason(change: dict[str, object], message: str) -> None:
    memory = torch.zeros(4)
    with pytest.raises(TransportError, match=message):
        open_memory(msgspec.structs.replace(offer(memory), **change), CPU)


def test_freed_memory_is_not_opened() -> None:
    memory = torch.zeros(1000)
    handle = offer(memory)
    del memory
    gc.collect()
    with pytest.raises(TransportError, match="no such memory"):
        open_memory(handle, CPU)


def pair() -> tuple[InprocTransport, InprocTransport]:
    fabric = InprocFabric()
    a, b = InprocTransport(fabric, "a"), InprocTransport(fabric, "b")
    a.connect("b", b.address)
    b.connect("a", a.address)
    return a, b


def received(
    transport: InprocTransport, notifications: CompletionNotifications, context: object
) -> Operation:
    """Returns the operation of the only completion notification."""
    [arrival] = transport.arrivals()
    notifications.receive("a", arrival, context)
    while not (ended := transport.progress()):
        pass
    return ended[0]


def test_a_notification_contains_its_segment_and_slots_are_reused() -> None:
    a, b = pair()
    sender, receiver = CompletionNotifications(a), CompletionNotifications(b)
    for turn in range(200):  # more than there are slots at first
        sender.send("b", pack(7, 1, turn), WRITTEN, context=f"sent {turn}")
        operation = received(b, receiver, f"came {turn}")
        assert receiver.ended(operation) == f"came {turn}"
        assert receiver.read(operation) == WRITTEN
        [sent] = a.progress()
        assert sent.state is OperationState.DONE
        assert sender.ended(sent) == f"sent {turn}"
    registered = [transport.statistics().registered_bytes for transport in (a, b)]
    assert registered == [64 * SLOT_BYTES] * 2, "one at a time needs no more than the first slots"
    a.close()
    b.close()


def test_a_malformed_notification_is_a_protocol_error() -> None:
    a, b = pair()
    memory = torch.full((16,), 0xC1, dtype=torch.uint8)
    a.register(memory)
    a.send("b", pack(7, 1, 0), memory)
    notifications = CompletionNotifications(b)
    operation = received(b, notifications, "came")
    with pytest.raises(ProtocolError, match="a completion notification of 16 bytes cannot be decoded"):
        notifications.read(operation)
    a.close()
    b.close()
