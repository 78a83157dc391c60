"""The transfer agent of a decode rank: receives the KV of prompts in segments, through the ring or by direct writes.

The agent passes each event of the transfer thread to its parts; `decode_node.build` connects them:

    IncomingTickets   opens, reports and closes the transfer of each ticket
    ReceiveRing       leases ring space to segments, and sends watermarks
    Landing           receives segments into the ring, and scatters them into pages
    PeerWrites        lets prefill ranks write into the pool: offers, fences, completion notifications
    Verifier          verifies the checksums of segments that prefill ranks wrote into the pool
    Repairs           requests damaged segments again
    ProbeReceiver     receives the messages of wire probes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from decode_node.arriving import ArrivingLayers
from decode_node.coverage import Coverage
from decode_node.incoming import IncomingSegment, IncomingTransfer, SourceRank
from decode_node.landing import Landing
from decode_node.landing_pace import LandingPace
from decode_node.messages import ReceiverMessages
from decode_node.options import ReceiverContext, ReceiverOptions
from decode_node.probe import ProbeReceiver
from decode_node.receive_state import (
    Action,
    ReceiveState,
    ReceiveTransferEvent,
    SegmentEvent,
    SourceEvent,
    SourceState,
)
from decode_node.repairs import Repairs
from decode_node.ring import ReceiveRing
from decode_node.tickets import IncomingTickets
from decode_node.verifier import Verifier
from decode_node.writes import PeerWrites
from disagg.core.errors import InvariantError, NotLinkedError, PeerLostError, TransportError
from disagg.core.status import RankStatus
from disagg.kv.page_tables import table_slots
from disagg.node.device import DeviceQueue, device_name
from disagg.node.links import Link, fence
from disagg.node.sums import Sums
from disagg.node.transfer_loop import YIELD_S
from disagg.node.warm import warm_copies
from transport.base import Arrival, Operation
from transport.control import messages as m
from transport.tags import unpack

DEVICE_POLL_S = 0.0
IDLE_S = 1.0
ARRIVAL_POLL_S = 50e-6
"""Poll interval on a GPU while a ticket waits for its KV: a wake-up by the transport takes longer."""


@dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    """Current state of a receiver, and counts since the receiver started."""

    tickets: int
    ring_in_use_bytes: int
    segments_landed: int
    bytes_landed: int
    watermarks: int
    """Watermarks sent because a region became writable."""
    watermark_repeats: int
    """Watermarks sent again on the timer."""
    stale: int
    """Dropped messages and data of tickets that are unknown or closed."""
    leases_expired: int
    checksum_mismatches: int
    """Segments that arrived damaged, resent segments included."""


@dataclass(frozen=True, slots=True)
class ReceiverParts:
    """Parts of a receiver; `decode_node.build` constructs them."""

    queue: DeviceQueue
    sums: Sums | None
    messages: ReceiverMessages
    tickets: IncomingTickets
    repairs: Repairs
    ring: ReceiveRing
    landing: Landing
    verifier: Verifier
    writes: PeerWrites
    probes: ProbeReceiver


class SegmentReceiver:
    """The transfer agent of a decode rank. Every method except the constructor runs on the transfer thread."""

    def __init__(self, options: ReceiverOptions, context: ReceiverContext, parts: ReceiverParts) -> None:
        self._options, self._context, self.parts = options, context, parts
        self.ring_bytes = options.ring_bytes
        """Size of the receive ring."""
        self._rank, self._shard, self._pool = context.rank, context.shard, context.pool
        self._transport, self._send = context.transport, context.send
        self._queue, self._sums, self._messages = parts.queue, parts.sums, parts.messages
        self._tickets, self._repairs, self._ring = parts.tickets, parts.repairs, parts.ring
        self._landing, self._verifier = parts.landing, parts.verifier
        self._writes, self._probes = parts.writes, parts.probes
        self.polls = self._pool.device.type == "cuda"
        """Whether `poll` returns short intervals while data is expected."""
        self.links: dict[str, Link] = {}
        """Linked prefill groups by name."""
        self._stale = 0

    # --- set-up

    def adopt_thread(self) -> None:
        """Makes the calling thread the transfer thread, whose device work goes to this agent's queue."""
        self._queue.adopt()

    def link(self, link: Link) -> None:
        """Connects to the prefill ranks that send to this rank. Raises `TransportError`."""
        for peer in link.sources_of(self._rank):
            self._transport.connect(peer.control_address, peer.transport_address)
        with self._queue.use():
            warm_copies(link.to_rank(self._rank), self._shard, self._pool, self._sums)
        self.links[link.prefill.name] = link
        for peer in link.sources_of(self._rank):
            self._messages.link(peer.control_address)
            self._writes.offer(peer.control_address)

    def on_linked(self, peer: str, message: m.Linked) -> bool:
        """Handles `Linked` of a peer; returns False if the peer has fenced this rank since its previous `Linked`."""
        return self._messages.on_linked(peer, message)

    # --- messages of the leader

    def open(self, message: m.OpenReceive) -> None:
        """Opens a ticket: this rank then accepts the ticket's segments. A repeated message is answered again."""
        ticket = message.ticket
        link = self.links.get(message.prefill_group)
        if link is None:
            error = NotLinkedError(f"prefill group {message.prefill_group!r} is not linked")
            self._tickets.refuse(ticket, error)
            return
        if ticket.number not in self._tickets.open:
            try:
                incoming = self._make_incoming(message, link)
                self._writes.open_fence(incoming)
            except Exception as exc:  # noqa: BLE001 - any failure ends this request only
                self._tickets.refuse(ticket, TransportError(f"cannot receive for {ticket.key}: {exc}"))
                return
            self._tickets.open[ticket.number] = incoming
            if incoming.arriving is not None:
                self._tickets.arriving[ticket.number] = incoming.arriving
        self._tickets.opened(ticket)

    def _make_incoming(self, message: m.OpenReceive, link: Link) -> IncomingTransfer:
        ticket, tables = message.ticket, self._options.tables
        ticket.check_starts(link.decode.layout)
        slots = table_slots(tables, [message.pages, *message.more], ticket.tokens)
        uploaded = [self._queue.upload(one) for one in slots]
        classes = len(link.decode.layout.states)
        states = tables.state_slots(message.states or (ticket.row,), classes, self._queue.upload)
        coverage = Coverage(link.to_rank(self._rank), ticket.tokens, link.decode.layout, ticket.starts)
        sources = {
            source.rank: SourceRank(
                source.rank, source.control_address, self._writes.may_write(ticket, source.control_address)
            )
            for source in link.sources_of(self._rank)
        }
        by_class = tables.by_class(uploaded, len(self._shard.parts))
        incoming = IncomingTransfer(ticket, by_class, states, coverage, sources)
        if message.is_head:
            incoming.arriving = ArrivingLayers(coverage.bytes_by_layer(), self._context.clock)
        return incoming

    def arriving(self, ticket: int) -> ArrivingLayers | None:
        """Returns the layers for which a step of the ticket's request waits; None for a closed ticket, whose request
        has ended. Any thread may call it."""
        return self._tickets.arriving.get(ticket)

    def predict(self, ticket: int, expected: Callable[[float, float], None]) -> None:
        """Calls `expected` with the time at which an open ticket's KV will have landed, as `LandingPace` does."""
        incoming = self._tickets.open.get(ticket)
        if incoming is not None:
            layers = incoming.coverage.bytes_by_layer()
            incoming.pace = LandingPace(layers, self._context.clock, expected)

    @property
    def step_waits(self) -> bool:
        """Whether the compute thread waits for KV, so that this thread should poll for it."""
        return any(one.waiting for one in self._tickets.arriving.values())

    def close(self, message: m.CloseTransfer) -> None:
        """Closes the transfer of an ended request; `RankClosed` follows when no rank can write the ticket's pages."""
        incoming = self._tickets.open.get(message.ticket)
        if incoming is None:
            self._tickets.closed(message.key, message.ticket)
            return
        self._tickets.advance(incoming, ReceiveTransferEvent.CLOSE)
        # Close the fence first: a writer can receive the ticket after answering "unknown ticket".
        self._writes.close_fence(incoming)
        senders = {item.segment.src_rank for item in incoming.leased()} | incoming.unproven_writers()
        for source in [incoming.sources[src_rank] for src_rank in senders]:
            if Action.SEND_STOP in source.advance(SourceEvent.STOP):
                stop = m.StopSending(incoming.key, incoming.ticket.number, message.reason)
                self._send(source.peer, stop)
        self._tickets.maybe_closed(incoming)

    # --- messages of prefill ranks

    def on_pool_refused(self, peer: str, message: m.PoolRefused) -> None:
        """Handles the refusal of a peer that cannot map the pool: later tickets use the ring for this peer."""
        self._writes.on_refused(peer, message)

    def on_sender_ended(self, peer: str, message: m.SenderEnded) -> None:
        """Handles `SenderEnded` of a source rank: cancels the segments that the rank has not sent.

        The prefill group reports the reason to the router. The router then sends `Release` to this group too.
        """
        incoming = self._tickets.open.get(message.ticket)
        source = incoming.sources.get(message.src_rank) if incoming is not None else None
        if incoming is None or source is None or source.peer != peer or source.state is SourceState.LOST:
            self._stale += 1
            return
        source.advance(SourceEvent.END)
        self._source_ended(incoming, source.rank, set(message.sent), set(message.again))
        self._tickets.maybe_closed(incoming)

    def on_peer_lost(self, peer: str) -> None:
        """Handles a lost prefill rank: fences the rank, cancels its segments that have not arrived, and fails its
        incomplete tickets."""
        for name, link in list(self.links.items()):
            if peer in {rank.control_address for rank in link.prefill.ranks}:
                del self.links[name]
        self._writes.forget(peer)
        self._messages.forget(peer)
        self._tickets.forget(peer)
        fence(self._transport, peer)
        self._probes.lost(peer)
        for incoming in list(self._tickets.open.values()):
            for source in [one for one in incoming.sources.values() if one.peer == peer]:
                self._writes.lost(incoming, source.rank)
                source.advance(SourceEvent.LOSE)
                self._source_ended(incoming, source.rank, set(), set())
                if incoming.wanted:
                    self._tickets.fail(incoming, PeerLostError(f"lost prefill rank {peer}"))
                self._tickets.maybe_closed(incoming)

    def _source_ended(
        self, incoming: IncomingTransfer, src_rank: int, sent: set[int], again: set[int]
    ) -> None:
        self._writes.ended(incoming, src_rank, sent, again)
        for item in list(incoming.leased(src_rank)):
            coming = item.segment.index in (again if item.again else sent)
            if item.state is ReceiveState.LEASED and not coming:
                self._ring.advance(item, SegmentEvent.CANCELLED)

    # --- TransferAgent

    def begin_turn(self) -> None:
        """Lets the active messages of the turn wait until `poll`, to share messages of the transport."""
        self._messages.collect()

    def on_arrival(self, arrival: Arrival) -> None:
        """Receives data into its lease, or a completion notification. Discards data that is not expected."""
        if self._messages.arrived(arrival) or self._probes.arrived(arrival):
            return
        tag = unpack(arrival.tag)
        incoming = self._tickets.open.get(tag.ticket)
        item = incoming.items.get((tag.writer, tag.segment)) if incoming else None
        if incoming is not None and item is not None and item.state is ReceiveState.LEASED:
            self._landing.arrived(incoming, item, arrival)
        elif incoming is not None and item is None and self._may_notify(incoming, tag.writer):
            self._writes.on_notification(incoming, incoming.sources[tag.writer].peer, arrival)
        else:
            self._stale += 1
            self._transport.discard(item.peer if item else None, arrival)

    def _may_notify(self, incoming: IncomingTransfer, src_rank: int) -> bool:
        # A receive from a peer that is already fenced might never end: only the fence ends receives from a lost peer.
        source = incoming.sources.get(src_rank)
        return source is not None and source.may_notify

    def on_operation(self, operation: Operation) -> None:
        """Handles the end of an operation: of a segment, a notification, an active message or a probe."""
        if isinstance(operation.context, IncomingSegment):
            self._landing.ended(operation.context, operation)
        elif not (self._messages.ended(operation) or self._probes.ended(operation)):
            self._writes.notification_ended(operation)

    def poll(self, now_s: float) -> float:
        """Completes segments whose scatter or verification is done, and runs due timers.

        Returns the seconds until the next call.
        """
        self._messages.flush()
        self._writes.look()
        if self._landing.scattering or self._verifier.under_way:
            self._landing.poll()
            self._verifier.poll()
        due_s = self._tickets.due_s
        if due_s < math.inf and (now_s >= due_s or not self._tickets.expects_data):
            self._tickets.send_verified()
        if self._landing.scattering or self._verifier.under_way:
            return YIELD_S if self.polls and self._landing.ends_soon(now_s) else DEVICE_POLL_S
        if now_s >= self._writes.due_s:
            self._writes.expire(now_s)
        self._probes.poll(now_s)
        if now_s >= self._ring.due_s:
            self._ring.maintain(now_s)
        if self.polls and self._expects_data():
            soon = self._landing.ends_soon(now_s) or self._writes.ends_soon(now_s)
            return YIELD_S if soon else ARRIVAL_POLL_S
        idle_s = self._ring.due_s - now_s if self._ring.allocator.oldest() else IDLE_S
        return min(idle_s, self._tickets.due_s - now_s)

    def may_block(self) -> bool:
        """Makes prefill ranks send a notification of each write, because completion words wake no thread. Returns
        False if a write is reported already."""
        return self._writes.may_block()

    def _expects_data(self) -> bool:
        return self._probes.lease is not None or self._tickets.expects_data

    # --- state

    def statistics(self) -> ReceiverStatistics:
        """Returns the counts at this moment."""
        return ReceiverStatistics(
            tickets=len(self._tickets.open),
            ring_in_use_bytes=self._ring.allocator.statistics().in_use_bytes,
            segments_landed=self._tickets.segments_landed,
            bytes_landed=self._tickets.bytes_landed,
            watermarks=self._ring.watermarks,
            watermark_repeats=self._ring.repeats,
            stale=self._stale + self._ring.stale + self._writes.stale,
            leases_expired=self._ring.expired,
            checksum_mismatches=self._repairs.mismatches,
        )

    def status(self) -> RankStatus:
        """Returns the rank's status for metrics. Cheap enough for frequent calls."""
        ring = self._ring.allocator
        return RankStatus(
            self._context.lane,
            self._rank,
            device_name(self._pool.device),
            ring_bytes=ring.size_bytes,
            ring_used_bytes=min(ring.in_use_bytes, ring.size_bytes),
            ring_waits_total=ring.waited,
            ring_wait_s_total=self._ring.waits_s(self._context.clock()),
            landed_bytes_total=self._tickets.bytes_landed,
            checksum_mismatches_total=self._repairs.mismatches,
            faults_total=self._tickets.failed,
        )

    def check(self) -> None:
        """Raises `InvariantError` unless each lease and each checksum word has its owner.

        A lease belongs to a segment under way or to a probe. A checksum word belongs to a launched scatter or to the
        checksum of a written segment.
        """
        self._ring.check(self._probes.lease)
        words = len(self._landing.scattering) + len(self._verifier.under_way)
        if self._sums is not None and words != self._sums.in_use:
            raise InvariantError(f"{words} launches hold checksum words, but {self._sums.in_use} are in use")
