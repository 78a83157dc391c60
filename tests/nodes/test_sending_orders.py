"""Random orders of events at one sender: real tickets, leases, mover and staging; the device and the wire are stubs.

`check` runs after each event. At the end every transfer is closed, and staging and every counter are empty.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.core.errors import TransportError
from disagg.core.state_table import StateMachine
from disagg.core.timeline import Timeline
from disagg.core.types import KVLayout, RequestKey, Segment, Span, Ticket
from disagg.node.device import DeviceQueue
from prefill_node.exposed import Exposed
from prefill_node.flows import Flow
from prefill_node.leases import Leases, PeerRing
from prefill_node.mover import CopyQueue, SegmentMover
from prefill_node.options import SenderContext
from prefill_node.outgoing import OutgoingSegment, OutgoingTransfer
from prefill_node.send_state import TRANSFER_TRANSITIONS, TRANSITIONS, SendState
from prefill_node.staging_space import StagingSpace
from prefill_node.tickets import OutgoingTickets
from transport.base import Operation, OperationState
from transport.control import messages as m

STAGING_BYTES = 1024
MESSAGE_BYTES = 512
STAGED, DIRECT = "decode-0", "decode-1"
NOTHING: Any = torch.empty(0)
LINK: Any = SimpleNamespace(decode=SimpleNamespace(layout=KVLayout(1, 1, 8, "float32")))
LAUNCH_FAILS = 9
KINDS = [0] * 8 + [1] * 6 + [2] * 6 + [3] * 2 + [4] * 2 + [5, 6, 7]
"""Kinds of events, as `Sender.step` numbers them, by how often each occurs."""


class Event:
    """A marker on the device."""

    done = False

    def query(self) -> bool:
        return self.done


class Mover(SegmentMover):
    """Gathers nothing: `gather` may fail as a gather does."""

    gather: Callable[[], None]

    def _gather(self, item: OutgoingSegment) -> None:
        self.gather()


class Sender:
    """The parts of a sender between its messages and the device."""

    def __init__(self) -> None:
        self.reports: list[m.Message] = []
        self.ends: Counter[tuple[RequestKey, str]] = Counter()
        self.posted: deque[Operation] = deque()
        self.events: deque[Event] = deque()
        self.launches = 0
        self.all: list[OutgoingTransfer] = []
        self.items: list[list[OutgoingSegment]] = []
        """The segments of each transfer in `all`, also of a closed one, whose own `items` are gone."""
        transport: Any = SimpleNamespace(register=lambda memory: None, send=self.post)
        control: Any = SimpleNamespace(address="prefill-0", send=self.send)
        self.context = SenderContext(
            0, NOTHING, NOTHING, transport, control, self.reports.append, "p0", Timeline(), lambda: 0.0
        )
        self.space = StagingSpace(STAGING_BYTES, torch.device("cpu"), 0.0, lambda: 0.0)
        self.tickets = OutgoingTickets(self.context, self.space, Exposed(), None)
        self.leases = Leases(0, self.tickets, lambda peer, message: None, 1.0, lambda: 0.0)
        self.leases.rings[STAGED], self.leases.rings[DIRECT] = PeerRing(), PeerRing()
        self.leases.rings[STAGED].update(0, 1 << 30)
        queue: Any = DeviceQueue(torch.device("cpu"))
        queue.record_event = self.record
        self.mover = Mover(self.context, CopyQueue(queue, None), self.space, self.leases, self.tickets)
        self.mover.gather = self.launch

    # --- the device and the wire

    def launch(self) -> None:
        self.launches += 1
        if self.launches % LAUNCH_FAILS == 0:
            raise RuntimeError("out of memory")

    def record(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def post(self, peer: str, tag: int, view: torch.Tensor, context: object) -> None:
        self.posted.append(Operation("send", peer, tag, len(view), context))

    def send(self, peer: str, message: m.Message) -> None:
        assert isinstance(message, m.SenderEnded)
        self.ends[message.key, peer] += 1

    # --- what can happen

    def open(self) -> None:
        number = len(self.all)
        ticket = Ticket(RequestKey(f"r{number}"), number, "decode", Span(0, 8))
        outgoing = OutgoingTransfer(ticket.key, ticket, 0, LINK, (NOTHING,), NOTHING, planned_to=8)
        for rank, peer in enumerate((STAGED, DIRECT)):
            write = self.launch if peer == DIRECT else None
            segments = [Segment(i, 0, rank, Span(0, 1), Span(0, 1), Span(0, 8), 256) for i in (0, 1)]
            outgoing.add(
                rank,
                [OutgoingSegment(outgoing, s, peer, Flow(), MESSAGE_BYTES, write=write) for s in segments],
            )
        self.tickets.open[ticket.key] = outgoing
        self.all.append(outgoing)
        self.items.append(list(outgoing.items.values()))

    def compute(self, item: OutgoingSegment) -> None:
        if not item.computed:
            item.computed = True
            item.outgoing.uncomputed -= 1
            item.ring_start = 0
            if item.write is None:
                self.leases.computed(item)
            elif item.state is SendState.PLANNED:
                self.mover.launch(item)

    def run_device(self) -> None:
        if self.events:
            self.events.popleft().done = True

    def end_send(self, error: TransportError | None = None) -> None:
        if self.posted:
            operation = self.posted.popleft()
            operation.state = OperationState.DONE if error is None else OperationState.FAILED
            operation.error = error
            if isinstance(operation.context, OutgoingSegment):
                self.mover.on_send_ended(operation.context, operation)
            else:
                self.mover.on_notification_ended(operation)

    def damage(self, item: OutgoingSegment) -> None:
        if not item.damaged and item.state in (SendState.SENDING, SendState.SENT):
            self.mover.on_damaged(item)

    def stop(self, outgoing: OutgoingTransfer) -> None:
        self.tickets.on_stop_sending(STAGED, m.StopSending(outgoing.key, outgoing.ticket.number, "given up"))

    def close(self, outgoing: OutgoingTransfer) -> None:
        if outgoing.key in self.tickets.open:
            self.tickets.close(m.CloseTransfer(outgoing.key, outgoing.ticket.number, "over"))

    def step(self, kind: int, which: int) -> None:
        """One event, of a kind, at one of the transfers and one of its segments."""
        transfer, number = which % len(self.all), which // len(self.all)
        outgoing, items = self.all[transfer], self.items[transfer]
        item = items[number % len(items)]
        happens: list[Callable[[], None]] = [
            lambda: self.compute(item),
            self.run_device,
            self.end_send,
            lambda: self.damage(item),
            self.open,
            lambda: self.stop(outgoing),
            lambda: self.close(outgoing),
            lambda: self.end_send(TransportError("the connection broke")),
        ]
        happens[kind]()
        self.settle()

    def settle(self) -> None:
        self.mover.poll(0.0)
        self.mover.pump()
        self.tickets.check()
        self.space.check(self.tickets.staged(), 0)


def run(events: Sequence[tuple[int, int]]) -> None:
    sender = Sender()
    sender.open()
    for kind, which in events:
        sender.step(kind, which)
    for outgoing in sender.all:
        sender.close(outgoing)
        sender.settle()
    while sender.events or sender.posted:
        sender.run_device()
        sender.end_send()
        sender.settle()
    assert not sender.tickets.open
    assert sender.space.in_use_bytes == 0
    closed = Counter(r.key for r in sender.reports if isinstance(r, m.RankClosed))
    sent = Counter(r.key for r in sender.reports if isinstance(r, m.RankSent))
    assert closed == Counter(outgoing.key for outgoing in sender.all), "each once"
    for outgoing, items in zip(sender.all, sender.items, strict=True):
        assert not outgoing.items, "a closed transfer keeps no segment, and so no mapped pool"
        states = {item.state for item in items}
        assert states <= {SendState.SENT, SendState.DROPPED}
        assert sent[outgoing.key] <= 1
        if not sent[outgoing.key]:
            assert all(sender.ends[outgoing.key, peer] for peer in (STAGED, DIRECT)), (
                "both peers are notified"
            )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 40)), max_size=80))
def test_every_transfer_ends_once_and_leaves_nothing(events: list[tuple[int, int]]) -> None:
    run(events)


def test_random_orders_reach_every_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[object, object]] = set()
    advance = StateMachine.advance

    def observed(self: Any, event: Any) -> Any:
        seen.add((self.state, event))
        return advance(self, event)

    monkeypatch.setattr(StateMachine, "advance", observed)
    for seed in range(200):
        choose = random.Random(seed)
        run([(choose.choice(KINDS), choose.randrange(40)) for _ in range(80)])
    assert seen == TRANSITIONS.keys() | TRANSFER_TRANSITIONS.keys()
