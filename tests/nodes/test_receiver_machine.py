"""A receiver under random events: leases, transfers and reports stay consistent, and every ticket can be closed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_node.build import build_receiver
from decode_node.incoming import IncomingSegment, IncomingTransfer
from decode_node.options import ReceiverContext, ReceiverOptions
from decode_node.receive_state import ReceiveState, ReceiveTransferState
from disagg.core.errors import ProtocolError, TransportError
from disagg.core.timeline import Timeline
from disagg.core.types import GroupInfo, KVLayout, RankInfo, RequestKey, Segment, Shard, Span, Ticket
from disagg.kv.page_tables import PageTables
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.transfer_pools import TransferPools
from disagg.node.links import make_link
from staging.shards import make_shards
from transport.base import Arrival, Operation, OperationState
from transport.control import messages as m
from transport.tags import pack

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32")
TOKENS, PAGE_SIZE, SOURCES = 2, 2, 2
SEGMENT_BYTES = 2 * 2 * 4 * 4
"""One token, two layers, one head."""
RING_BYTES = 768
"""Three segments, fewer than a prompt has: leases wait."""
SELDOM = st.sampled_from(range(12)).map(lambda n: n == 7)
PEERS = {rank: f"prefill-{rank}" for rank in range(SOURCES)}


def group(role: str, shards: list[Shard], ring_bytes: int = 0) -> GroupInfo:
    ranks = tuple(RankInfo(shard.rank, shard, f"{role}-{shard.rank}", b"", ring_bytes) for shard in shards)
    return GroupInfo(role, role, 1, "", LAYOUT, PAGE_SIZE, "fake", ranks)


class FakeTransport:
    """Receives end when the test says so; sends succeed."""

    def __init__(self) -> None:
        self.receives: list[Operation] = []
        self.discarded = 0

    def register(self, memory: torch.Tensor) -> None: ...

    def connect(self, peer: str, address: bytes) -> None: ...

    def disconnect(self, peer: str) -> None:
        for operation in self.receives:
            if operation.peer == peer:
                operation.state, operation.error = OperationState.FAILED, TransportError("fenced")

    def send(self, peer: str, tag: int, view: torch.Tensor, context: object = None) -> Operation:
        return Operation("send", peer, tag, view.numel(), context)

    def receive(self, peer: str, arrival: Arrival, into: torch.Tensor, context: object = None) -> Operation:
        operation = Operation("receive", peer, arrival.tag, arrival.nbytes, context)
        self.receives.append(operation)
        return operation

    def discard(self, peer: str | None, arrival: Arrival) -> None:
        self.discarded += 1


class ReceiverMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.transport, self.now_s = FakeTransport(), 0.0
        self.reports: list[Any] = []
        (shard,) = make_shards(LAYOUT.layers, LAYOUT.kv_heads, 1)
        pool = MHATokenToKVPool(LAYOUT.layers, 32, LAYOUT.kv_heads, 4, torch.float32, torch.device("cpu"))
        transport: Any = self.transport
        self.receiver = build_receiver(
            ReceiverOptions(PageTables((PAGE_SIZE,)), RING_BYTES, 0, False, 1.0, 5.0, 0.1),
            ReceiverContext(
                0,
                shard,
                TransferPools.of(pool, None),
                transport,
                "decode-0",
                "decode r0",
                lambda peer, message: None,
                self.reports.append,
                Timeline(),
                lambda: self.now_s,
            ),
        )
        prefill = group("prefill", make_shards(LAYOUT.layers, LAYOUT.kv_heads, SOURCES))
        self.receiver.link(make_link(prefill, group("decode", [shard], RING_BYTES)))
        self.next_ticket, self.leased, self.lost = 0, Counter[tuple[int, int]](), set[str]()

    # --- choices

    def transfers(self) -> list[IncomingTransfer]:
        return list(self.receiver.parts.tickets.open.values())

    def items(self, state: ReceiveState) -> list[IncomingSegment]:
        return [item for one in self.transfers() for item in one.items.values() if item.state is state]

    # --- rules

    @precondition(lambda self: not self.lost and len(self.transfers()) < 3)
    @rule()
    def open(self) -> None:
        number, self.next_ticket = self.next_ticket, self.next_ticket + 1
        ticket = Ticket(RequestKey(f"r{number}"), number, "decode", Span(0, TOKENS), 0, ())
        self.receiver.open(m.OpenReceive(ticket, [1, 2, 3], "prefill"))

    @precondition(lambda self: self.transfers())
    @rule(data=st.data(), count=st.integers(1, 3), repeat=st.booleans())
    def request_leases(self, data: st.DataObject, count: int, repeat: bool) -> None:
        incoming = data.draw(st.sampled_from(self.transfers()))
        src_rank = data.draw(st.sampled_from(range(SOURCES)))
        done = self.leased[incoming.ticket.number, src_rank]
        start = max(0, done - 1) if repeat else done
        self.request(incoming, src_rank, range(start, min(TOKENS, start + count)))
        known = [index for rank, index in incoming.items if rank == src_rank]
        self.leased[incoming.ticket.number, src_rank] = max(known, default=-1) + 1

    def request(self, incoming: IncomingTransfer, src_rank: int, indices: range) -> None:
        segments = [
            Segment(i, src_rank, 0, Span(0, 2), Span(src_rank, src_rank + 1), Span(i, i + 1), SEGMENT_BYTES)
            for i in indices
        ]
        request = m.LeaseRequest(incoming.key, incoming.ticket.number, src_rank, segments)
        self.receiver.parts.ring.on_lease_request(PEERS[src_rank], request)

    @precondition(lambda self: self.items(ReceiveState.LEASED))
    @rule(data=st.data(), damaged=SELDOM)
    def arrive(self, data: st.DataObject, damaged: bool) -> None:
        self.arrive_one(data.draw(st.sampled_from(self.items(ReceiveState.LEASED))), damaged)

    @rule()
    def deliver(self) -> None:
        """Every writable segment arrives, and all receives succeed."""
        for item in self.items(ReceiveState.LEASED):
            if self.receiver.parts.ring.allocator.writable(item.lease):
                self.arrive_one(item)
        self.end_receives()
        self.receiver.poll(self.now_s)

    @precondition(lambda self: self.transport.receives)
    @rule(data=st.data(), fails=SELDOM)
    def end_receive(self, data: st.DataObject, fails: bool) -> None:
        operation = data.draw(st.sampled_from(self.transport.receives))
        self.transport.receives.remove(operation)
        if operation.state is OperationState.PENDING:
            operation.state = OperationState.FAILED if fails else OperationState.DONE
        self.receiver.on_operation(operation)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 3.0]))
    def poll(self, seconds: float) -> None:
        self.now_s += seconds
        self.receiver.poll(self.now_s)

    @precondition(lambda self: self.transfers())
    @rule(data=st.data(), now=SELDOM)
    def grant_fails(self, data: st.DataObject, now: bool) -> None:
        if not now:
            return
        incoming = data.draw(st.sampled_from(self.transfers()))
        grant = m.LeaseGrant(incoming.key, incoming.ticket.number, 0, [], RING_BYTES, 0)
        self.receiver.parts.tickets.grant_failed(PEERS[0], grant, TransportError("gone"))

    @precondition(lambda self: self.transfers())
    @rule(data=st.data(), now=SELDOM)
    def close(self, data: st.DataObject, now: bool) -> None:
        if now:
            self.close_one(data.draw(st.sampled_from(self.transfers())))

    @precondition(lambda self: self.transfers())
    @rule(data=st.data(), now=SELDOM)
    def sender_ends(self, data: st.DataObject, now: bool) -> None:
        if not now:
            return
        incoming = data.draw(st.sampled_from(self.transfers()))
        src_rank = data.draw(st.sampled_from(range(SOURCES)))
        under_way = [
            index
            for (rank, index), item in incoming.items.items()
            if rank == src_rank and item.state is not ReceiveState.LEASED
        ]
        self.end_sender(incoming, src_rank, under_way)

    @precondition(lambda self: len(self.lost) < SOURCES and self.next_ticket > 1)
    @rule(data=st.data(), now=SELDOM)
    def lose_peer(self, data: st.DataObject, now: bool) -> None:
        if now:
            peer = data.draw(st.sampled_from(sorted(set(PEERS.values()) - self.lost)))
            self.lost.add(peer)
            self.receiver.on_peer_lost(peer)

    def arrive_one(self, item: IncomingSegment, damaged: bool = False) -> None:
        segment = item.segment
        tag = pack(item.incoming.ticket.number, segment.src_rank, segment.index)
        self.receiver.on_arrival(Arrival(tag, segment.nbytes - damaged, None))

    def end_receives(self) -> None:
        while self.transport.receives:
            operation = self.transport.receives.pop()
            if operation.state is OperationState.PENDING:
                operation.state = OperationState.DONE
            self.receiver.on_operation(operation)

    def close_one(self, incoming: IncomingTransfer) -> None:
        self.receiver.close(m.CloseTransfer(incoming.key, incoming.ticket.number, "the test ends it"))

    def end_sender(self, incoming: IncomingTransfer, src_rank: int, sent: list[int]) -> None:
        message = m.SenderEnded(incoming.key, incoming.ticket.number, src_rank, sent, "the test ends it")
        self.receiver.on_sender_ended(PEERS[src_rank], message)

    # --- what always holds

    @invariant()
    def sound(self) -> None:
        self.receiver.check()
        for incoming in self.transfers():
            landed = [i for i in incoming.items.values() if i.state is ReceiveState.LANDED]
            assert incoming.landed_bytes == len(landed) * SEGMENT_BYTES
            assert incoming.state is not ReceiveTransferState.CLOSED
            if incoming.state is ReceiveTransferState.LANDED:
                assert incoming.landed_bytes == incoming.coverage.total_bytes

    @invariant()
    def reported_once(self) -> None:
        open_tickets = set(self.receiver.parts.tickets.open)
        counts = Counter((type(report), report.ticket) for report in self.reports)
        for number in range(self.next_ticket):
            assert counts[m.RankFailed, number] <= 1
            assert counts[m.Landed, number] <= 1
            assert counts[m.RankClosed, number] == (number not in open_tickets)

    def teardown(self) -> None:
        """Whatever happened: once all sources have ended and all receives are over, nothing is left."""
        for incoming in self.transfers():
            self.close_one(incoming)
            for src_rank in range(SOURCES):
                self.end_sender(incoming, src_rank, [])
        self.end_receives()
        self.receiver.poll(self.now_s)
        assert not self.transfers()
        assert not self.receiver.statistics().ring_in_use_bytes
        self.receiver.check()


TestReceiver = ReceiverMachine.TestCase
TestReceiver.settings = settings(max_examples=80, stateful_step_count=80, deadline=None)


def test_a_lease_request_behind_a_lost_one_fails_the_transfer() -> None:
    """As a failed transfer, which is recovered, and not as a violation of the protocol."""
    machine = ReceiverMachine()
    machine.open()
    [incoming] = machine.transfers()
    machine.request(incoming, 0, range(1, 2))
    [report] = [one for one in machine.reports if isinstance(one, m.RankFailed)]
    assert report.code == TransportError.code
    assert "lease request of prefill-0" in report.message
    machine.teardown()


def test_an_overlapping_lease_request_violates_the_protocol() -> None:
    machine = ReceiverMachine()
    machine.open()
    [incoming] = machine.transfers()
    machine.request(incoming, 0, range(1))
    segment = Segment(7, 0, 0, Span(0, 2), Span(0, 1), Span(0, 1), SEGMENT_BYTES)
    request = m.LeaseRequest(incoming.key, incoming.ticket.number, 0, [segment])
    machine.receiver.parts.ring.on_lease_request(PEERS[0], request)
    [report] = [one for one in machine.reports if isinstance(one, m.RankFailed)]
    assert report.code == ProtocolError.code
    machine.teardown()
