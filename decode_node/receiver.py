"""The transfer agent of a decode rank: takes segments in, through its ring or written by their sender.

What it is told passes to its parts:

    Tickets      what is open, and how it ends
    Ring         leases for segments, and word to those who wait for room
    Landing      received into the ring, scattered into pages
    PeerWrites   written into the pool by prefill ranks: offers, fences, notices
    Verifier     summed up where it was written
    Repairs      what arrived damaged
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from decode_node.incoming import Coverage, Incoming, Item, State
from decode_node.landing import Landing
from decode_node.probe import ProbeReceiver
from decode_node.repairs import Repairs
from decode_node.ring import Ring
from decode_node.tickets import Tickets
from decode_node.verifier import Verifier
from decode_node.writes import PeerWrites
from disagg.core.errors import InvariantError, PeerLostError, TransportError
from disagg.core.ports import Clock
from disagg.core.status import RankStatus
from disagg.core.timeline import Timeline
from disagg.core.types import Shard
from disagg.kv.pages import slots_of
from disagg.kv.pool import KVPool
from disagg.node.device import DeviceQueue, device_name
from disagg.node.links import Link, fence
from disagg.node.sums import Sums
from disagg.node.warm import warm_copies
from transport import messages as m
from transport.base import Arrival, Operation, Transport
from transport.letters import Letters
from transport.tags import unpack

DEVICE_POLL_S = 0.0
IDLE_S = 1.0
ARRIVAL_POLL_S = 50e-6
"""On a GPU, while a ticket waits for its KV: to be woken by what arrives takes longer."""


@dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    """The receiver as it stands, and counts since it was made."""

    tickets: int
    ring_in_use_bytes: int
    segments_landed: int
    bytes_landed: int
    watermarks: int
    """Watermarks sent because a region became writable."""
    watermark_repeats: int
    """Watermarks sent again on the timer."""
    stale: int
    """Messages and data of tickets that are not, or no longer, known; dropped."""
    leases_expired: int
    checksum_mismatches: int
    """Segments that arrived damaged, second sendings included."""


class SegmentReceiver:
    """The transfer agent of a decode rank. Every method but the constructor runs on the transfer thread."""

    def __init__(
        self,
        *,
        rank: int,
        shard: Shard,
        pool: KVPool,
        page_size: int,
        ring_bytes: int,
        rows: int,
        checksum: bool,
        quarantine_s: float,
        lease_timeout_s: float,
        watermark_interval_s: float,
        transport: Transport,
        address: str,
        lane: str,
        send: Callable[[str, m.Message], None],
        to_leader: Callable[[m.Message], None],
        timeline: Timeline,
        clock: Clock,
    ) -> None:
        """`rows` fence words guard the pool against its writers; 0 offers it to nobody."""
        self._rank, self._shard, self._pool, self._page_size = rank, shard, pool, page_size
        self._transport, self._send, self._lane, self._clock = transport, send, lane, clock
        device = pool.device
        self._queue = DeviceQueue(device)
        self._polls = device.type == "cuda"
        self._links: dict[str, Link] = {}
        self._stale = 0
        sums = self._sums = Sums(device) if checksum else None
        tickets = self._tickets = Tickets(rank, to_leader, self._send_letter if checksum else None, clock)
        repairs = self._repairs = Repairs(rank, tickets, self._send_letter)
        ring = self._ring = Ring(
            rank,
            ring_bytes,
            device,
            tickets,
            checked=checksum,
            send=send,
            send_letter=self._send_letter,
            lease_timeout_s=lease_timeout_s,
            watermark_interval_s=watermark_interval_s,
            clock=clock,
        )
        transport.register(ring.buffer.memory)
        self._landing = Landing(
            shard, pool, self._queue, sums, ring, tickets, repairs, transport, timeline, lane, clock
        )
        verifier = partial(Verifier, shard, pool, self._queue, sums, tickets, repairs)
        writes = self._writes = PeerWrites(
            rank, pool, rows, quarantine_s, tickets, verifier, transport, send, timeline, lane, clock
        )
        self._verifier = writes.verifier
        self._probes = ProbeReceiver(
            transport,
            ring.buffer,
            ring.allocator,
            device_name(device),
            send=self._send_letter,
            offered=lambda peer: peer in writes.peers,
            freed=ring.tell_writable,
            clock=clock,
        )
        self._letters = Letters(
            transport,
            address,
            {
                m.LeaseRequest: self._ring.on_lease_request,
                m.ProbeRequest: self._probes.on_request,
                m.ProbeEnded: self._probes.on_ended,
            },
            self._undelivered,
        )

    # --- set-up

    def adopt_thread(self) -> None:
        """The calling thread is the transfer thread, and launches on this agent's queue only."""
        self._queue.adopt()

    def link(self, link: Link) -> None:
        """Connects to the prefill ranks that send to this rank. Raises `TransportError`."""
        for peer in link.sources_of(self._rank):
            self._letters.know(peer.control_address)
            self._transport.connect(peer.control_address, peer.transport_address)
        with self._queue.use():
            warm_copies(link.to_rank(self._rank), self._shard, self._pool, self._sums)
        self._links[link.prefill.name] = link
        for peer in link.sources_of(self._rank):
            self._writes.offer(peer.control_address)

    # --- what the leader says

    def open(self, message: m.OpenReceive) -> None:
        """A ticket was made: segments may come from now on. Repeated: answered again, nothing else happens."""
        ticket = message.ticket
        link = self._links.get(message.prefill_group)
        if link is None:
            error = PeerLostError(f"prefill group {message.prefill_group!r} is not linked")
            self._tickets.refuse(ticket, error)
            return
        if ticket.number not in self._tickets.open:
            try:
                incoming = self._make_incoming(message, link)
                self._writes.open(incoming)
            except Exception as exc:  # noqa: BLE001 - whatever it is ends this request and no other
                self._tickets.refuse(ticket, TransportError(f"cannot receive for {ticket.key}: {exc}"))
                return
            self._tickets.open[ticket.number] = incoming
        self._tickets.opened(ticket)

    def _make_incoming(self, message: m.OpenReceive, link: Link) -> Incoming:
        ticket = message.ticket
        slots = self._queue.upload(slots_of(message.pages, self._page_size, ticket.tokens))
        coverage = Coverage(link.to_rank(self._rank), ticket.tokens, link.decode.layout)
        peers = {rank.rank: rank.control_address for rank in link.sources_of(self._rank)}
        return Incoming(ticket, slots, coverage, peers, writers=self._writes.writers(ticket, peers))

    def close(self, message: m.CloseTransfer) -> None:
        """The request is over: answers when nothing can be written for it any more."""
        incoming = self._tickets.open.get(message.ticket)
        if incoming is None:
            self._tickets.closed(message.key, message.ticket)
            return
        incoming.closing = True
        # Before anyone is asked: a writer that has not heard of the ticket yet may, after it has answered so.
        self._writes.shut(incoming)
        senders = {item.segment.src_rank for item in incoming.held()} | incoming.unproven_writers()
        for src_rank in senders - incoming.ended - incoming.asked_to_stop:
            incoming.asked_to_stop.add(src_rank)
            stop = m.StopSending(incoming.key, incoming.ticket.number, message.reason)
            self._send(incoming.peers[src_rank], stop)
        self._tickets.maybe_closed(incoming)

    # --- what prefill ranks say

    def on_pool_refused(self, peer: str, message: m.PoolRefused) -> None:
        """A peer cannot open the pool: tickets made from now on come through the ring."""
        self._writes.on_refused(peer, message)

    def on_sender_ended(self, peer: str, message: m.SenderEnded) -> None:
        """A source sends nothing more: what it did not send will never be written.

        Why it ended is for the prefill group to tell the router, which then releases the request here too.
        """
        incoming = self._tickets.open.get(message.ticket)
        src_rank = message.src_rank
        if incoming is None or incoming.peers.get(src_rank) != peer or src_rank in incoming.lost:
            self._stale += 1
            return
        self._source_ended(incoming, src_rank, set(message.sent), set(message.again))
        self._tickets.maybe_closed(incoming)

    def on_peer_lost(self, peer: str) -> None:
        """A prefill rank is gone: fences it, then frees what only it could have written."""
        for name, link in list(self._links.items()):
            if peer in {rank.control_address for rank in link.prefill.ranks}:
                del self._links[name]
        self._writes.peers.discard(peer)
        self._letters.forget(peer)
        fence(self._transport, peer)
        self._probes.lost(peer)
        for incoming in list(self._tickets.open.values()):
            for src_rank in [rank for rank, address in incoming.peers.items() if address == peer]:
                self._writes.lost(incoming, src_rank)
                incoming.lost.add(src_rank)
                self._source_ended(incoming, src_rank, set(), set())
                if not incoming.landed and not incoming.closing:
                    self._tickets.fail(incoming, PeerLostError(f"lost prefill rank {peer}"))
                self._tickets.maybe_closed(incoming)

    def _source_ended(self, incoming: Incoming, src_rank: int, sent: set[int], again: set[int]) -> None:
        incoming.ended.add(src_rank)
        self._writes.ended(incoming, src_rank, sent, again)
        for item in list(incoming.held(src_rank)):
            coming = item.segment.index in (again if item.again else sent)
            if item.state is State.LEASED and not coming:
                self._ring.drop(item)

    # --- TransferAgent

    def on_arrival(self, arrival: Arrival) -> None:
        """Data is here: received into its lease, or discarded when nothing (or not now) is expected under its tag."""
        if self._letters.arrived(arrival) or self._probes.arrived(arrival):
            return
        tag = unpack(arrival.tag)
        incoming = self._tickets.open.get(tag.ticket)
        item = incoming.items.get((tag.writer, tag.segment)) if incoming else None
        if incoming is not None and item is not None and item.state is State.LEASED:
            self._landing.arrived(incoming, item, arrival)
        elif incoming is not None and item is None and tag.writer in incoming.writers:
            self._writes.on_notice(incoming, incoming.peers[tag.writer], arrival)
        else:
            self._stale += 1
            self._transport.discard(item.peer if item else None, arrival)

    def on_operation(self, operation: Operation) -> None:
        """A receive of a segment or a notice, a letter or a probe's message has ended."""
        if isinstance(operation.context, Item):
            self._landing.ended(operation.context, operation)
        elif not (self._letters.ended(operation) or self._probes.ended(operation)):
            self._writes.notice_ended(operation)

    def poll(self, now_s: float) -> float:
        """Lands what has been scattered; does what is due; returns in how many seconds to be called again."""
        if self._landing.scattering or self._verifier.under_way:
            self._landing.poll()
            self._verifier.poll()
            if self._landing.scattering or self._verifier.under_way:
                return DEVICE_POLL_S
        if now_s >= self._writes.due_s:
            self._writes.give_up(now_s)
        self._probes.poll(now_s)
        if now_s >= self._ring.due_s:
            self._ring.look(now_s)
        if self._polls and self._expects_data():
            return ARRIVAL_POLL_S
        return self._ring.due_s - now_s if self._ring.allocator.oldest() else IDLE_S

    def _expects_data(self) -> bool:
        return self._probes.lease is not None or any(i.wanted for i in self._tickets.open.values())

    # --- letters

    def _send_letter(self, peer: str, message: m.Message) -> None:
        self._letters.send(peer, message)

    def _undelivered(self, peer: str, message: m.Message, error: TransportError) -> None:
        """A grant or a `SendAgain` did not reach its rank: no segment will come. A watermark is sent again."""
        if isinstance(message, m.LeaseGrant | m.SendAgain):
            incoming = self._tickets.open.get(message.ticket)
            if incoming is not None:
                self._tickets.fail(incoming, error)

    # --- looking in

    def statistics(self) -> ReceiverStatistics:
        """Counts at this moment."""
        return ReceiverStatistics(
            tickets=len(self._tickets.open),
            ring_in_use_bytes=self._ring.allocator.statistics().in_use_bytes,
            segments_landed=self._tickets.segments_landed,
            bytes_landed=self._tickets.bytes_landed,
            watermarks=self._ring.watermarks,
            watermark_repeats=self._ring.repeats,
            stale=self._stale + self._ring.stale,
            leases_expired=self._ring.expired,
            checksum_mismatches=self._repairs.mismatches,
        )

    def status(self) -> RankStatus:
        """For metrics; cheap."""
        ring = self._ring.allocator
        return RankStatus(
            self._lane,
            self._rank,
            device_name(self._pool.device),
            ring_bytes=ring.size_bytes,
            ring_used_bytes=min(ring.in_use_bytes, ring.size_bytes),
            ring_waits_total=ring.waited,
            ring_wait_s_total=self._ring.waits_s(self._clock()),
            landed_bytes_total=self._tickets.bytes_landed,
            checksum_mismatches_total=self._repairs.mismatches,
            faults_total=self._tickets.failed,
        )

    def check(self) -> None:
        """Raises `InvariantError` unless the ring's leases are those of segments on their way and of a probe.

        The same for words: each belongs to a scatter or a sum on the device.
        """
        self._ring.check(self._probes.lease)
        words = len(self._landing.scattering) + len(self._verifier.under_way)
        if self._sums is not None and words != self._sums.in_use:
            raise InvariantError(f"{words} launches have words for checksums, {self._sums.in_use} are in use")
