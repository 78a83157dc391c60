"""Receives segments into the ring and scatters them into pages. Runs on the transfer thread of a decode rank.

A ring region is reused only when nothing can write it any more: the receive has ended and the scatter's event has
completed, or the sender has said that it did not and will not send the segment, or the sender is fenced. Pages
are given back (`RankClosed`) only when no region of the request is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from decode_node.fences import FenceWords
from decode_node.incoming import Coverage, Incoming, Item, State, local
from decode_node.probe import ProbeReceiver
from disagg.core.errors import DisaggError, InvariantError, PeerLostError, ProtocolError, TransportError
from disagg.core.ports import Clock
from disagg.core.status import RankStatus
from disagg.core.timeline import Timeline
from disagg.core.types import Segment, Shard, Ticket
from disagg.kv.pages import slots_of
from disagg.kv.pool import MHATokenToKVPool
from disagg.node.device import DeviceQueue, device_name, is_done
from disagg.node.links import Link, fence
from disagg.node.warm import warm_copies
from kernels.scatter import scatter
from staging.allocator import StagingAllocator
from staging.buffer import StagingBuffer
from transport import messages as m
from transport.base import Arrival, Operation, OperationState, Transport
from transport.letters import Letters
from transport.notices import NOTICE_BYTES, Notices
from transport.peer_memory import offer
from transport.tags import unpack

log = structlog.get_logger(__name__)

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


class SegmentReceiver:
    """The transfer agent of a decode rank. Every method but the constructor runs on the transfer thread."""

    def __init__(
        self,
        *,
        rank: int,
        shard: Shard,
        pool: MHATokenToKVPool,
        page_size: int,
        ring_bytes: int,
        rows: int,
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
        self._lease_timeout_s, self._watermark_interval_s = lease_timeout_s, watermark_interval_s
        self._transport, self._send, self._to_leader = transport, send, to_leader
        self._timeline, self._clock = timeline, clock
        self._lane = lane
        self._queue = DeviceQueue(pool.buffer.device)
        self._buffer = StagingBuffer(ring_bytes, pool.buffer.device)
        self._ring = StagingAllocator(ring_bytes)
        transport.register(self._buffer.memory)
        self._fences = FenceWords(rows, pool.buffer.device) if rows else None
        self._quarantine_s = quarantine_s
        """A writer that we took for dead has noticed by then, and what it launched has ended."""
        self._writers: set[str] = set()
        """Peers that the pool was offered to, and that did not refuse."""
        self._notices = Notices(transport)
        self._probes = ProbeReceiver(
            transport,
            self._buffer,
            self._ring,
            device_name(pool.buffer.device),
            send=lambda peer, message: self._letters.send(peer, message),
            offered=lambda peer: peer in self._writers,
            freed=self._tell_writable,
            clock=clock,
        )
        self._letters = Letters(
            transport,
            address,
            {
                m.LeaseRequest: self.on_lease_request,
                m.ProbeRequest: self._probes.on_request,
                m.ProbeEnded: self._probes.on_ended,
            },
            self._undelivered,
        )
        self._links: dict[str, Link] = {}
        self._incoming: dict[int, Incoming] = {}
        self._polls = pool.buffer.is_cuda
        self._overdue: deque[tuple[float, Incoming]] = deque()
        """When to stop waiting for what a writer owes: by then it has written, or finds the fence shut."""
        self._untold: deque[Item] = deque()
        self._scattering: deque[Item] = deque()
        self._repeat_at_s = 0.0
        self._head_lease, self._head_since_s = -1, 0.0
        self._waited_s = 0.0
        """How long leases waited that wait no more."""
        self._failed = 0
        self._landed = self._landed_bytes = self._watermarks = self._repeats = self._stale = self._expired = 0

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
            warm_copies(link.to_rank(self._rank), self._shard, self._pool)
        self._links[link.prefill.name] = link
        if self._fences is not None:
            for peer in link.sources_of(self._rank):
                self._offer(peer.control_address, self._fences)

    def _offer(self, peer: str, fences: FenceWords) -> None:
        try:
            pool, words = offer(self._pool.buffer), offer(fences.words)
        except TransportError as exc:
            log.info("pool_not_offered", peer=peer, why=str(exc), how="KV comes through the ring")
            return
        self._writers.add(peer)
        self._send(peer, m.PoolOffer(self._rank, pool, words))

    # --- what the leader says

    def open(self, message: m.OpenReceive) -> None:
        """A ticket was made: segments may come from now on. Repeated: answered again, nothing else happens."""
        ticket = message.ticket
        link = self._links.get(message.prefill_group)
        if link is None:
            self._refuse(ticket, PeerLostError(f"prefill group {message.prefill_group!r} is not linked"))
            return
        if ticket.number not in self._incoming:
            try:
                incoming = self._make_incoming(message, link)
                if incoming.writers and self._fences is not None:
                    self._fences.open(ticket.row, ticket.number)
                    incoming.writable = True
                self._incoming[ticket.number] = incoming
            except Exception as exc:  # noqa: BLE001 - whatever it is ends this request and no other
                self._refuse(ticket, TransportError(f"cannot receive for {ticket.key}: {exc}"))
                return
        self._to_leader(m.RankOpened(ticket.key, ticket.number, self._rank))

    def close(self, message: m.CloseTransfer) -> None:
        """The request is over: answers when nothing can be written for it any more."""
        incoming = self._incoming.get(message.ticket)
        if incoming is None:
            self._to_leader(m.RankClosed(message.key, message.ticket, self._rank))
            return
        incoming.closing = True
        # Before anyone is asked: a writer that has not heard of the ticket yet may, after it has answered so.
        self._shut(incoming)
        senders = {item.segment.src_rank for item in incoming.held()} | incoming.unproven_writers()
        for src_rank in senders - incoming.ended:
            self._stop_source(incoming, src_rank, message.reason)
        self._maybe_closed(incoming)

    # --- what prefill ranks say

    def on_lease_request(self, peer: str, request: m.LeaseRequest) -> None:
        """Grants ring space. Repeated: the same leases are named again."""
        incoming = self._incoming.get(request.ticket)
        if incoming is not None and request.src_rank in incoming.ended:
            self._stale += 1  # overtaken by the `SenderEnded` that makes it void
            return
        if incoming is None or incoming.key != request.key or incoming.closing or incoming.failed:
            self._stale += 1
            self._send(
                peer, m.StopSending(request.key, request.ticket, "the decode side has ended this request")
            )
            return
        try:
            if incoming.peers.get(request.src_rank) != peer:
                raise ProtocolError(f"{peer} is not prefill rank {request.src_rank} of {incoming.key}")
            items = [self._lease(incoming, peer, request.src_rank, segment) for segment in request.segments]
        except (ProtocolError, ValueError) as exc:
            self._fail(incoming, ProtocolError(f"refused a lease request of {peer}: {exc}"))
            return
        starts = [(item.segment.index, item.lease.start) for item in items]
        watermark, ring_bytes = self._ring.watermark, self._ring.size_bytes
        grant = m.LeaseGrant(request.key, request.ticket, self._rank, starts, ring_bytes, watermark)
        self._letters.send(peer, grant)
        for item in items:
            if item.waits_since_s is None and not self._ring.writable(item.lease):
                item.waits_since_s = self._clock()
                self._untold.append(item)

    def on_pool_refused(self, peer: str, message: m.PoolRefused) -> None:
        """A peer cannot open the pool: tickets made from now on come through the ring.

        One that is open may be written all the same, by way of an earlier offer: it is waited for as before.
        """
        log.info("pool_refused", peer=peer, why=message.reason, how="KV comes through the ring")
        self._writers.discard(peer)

    def on_sender_ended(self, peer: str, message: m.SenderEnded) -> None:
        """A source sends nothing more: what it did not send will never be written.

        Why it ended is for the prefill group to tell the router, which then releases the request here too.
        """
        incoming = self._incoming.get(message.ticket)
        src_rank = message.src_rank
        if incoming is None or incoming.peers.get(src_rank) != peer or src_rank in incoming.lost:
            self._stale += 1
            return
        self._source_ended(incoming, message.src_rank, set(message.sent))
        self._maybe_closed(incoming)

    def on_peer_lost(self, peer: str) -> None:
        """A prefill rank is gone: fences it, then frees what only it could have written."""
        for name in [
            n for n, k in self._links.items() if peer in {r.control_address for r in k.prefill.ranks}
        ]:
            del self._links[name]
        self._writers.discard(peer)
        self._letters.forget(peer)
        fence(self._transport, peer)
        self._probes.lost(peer)
        for incoming in list(self._incoming.values()):
            for src_rank in [rank for rank, address in incoming.peers.items() if address == peer]:
                if src_rank in incoming.unproven_writers():
                    self._shut(incoming)
                    incoming.barred_until_s = self._clock() + self._quarantine_s
                    self._overdue.append((incoming.barred_until_s, incoming))
                incoming.lost.add(src_rank)
                self._source_ended(incoming, src_rank, set())
                if not incoming.landed and not incoming.closing:
                    self._fail(incoming, PeerLostError(f"lost prefill rank {peer}"))
                self._maybe_closed(incoming)

    # --- TransferAgent

    def on_arrival(self, arrival: Arrival) -> None:
        """Data is here: received into its lease, or discarded when nothing (or not now) is expected under its tag."""
        if self._letters.arrived(arrival) or self._probes.arrived(arrival):
            return
        tag = unpack(arrival.tag)
        incoming = self._incoming.get(tag.ticket)
        item = incoming.items.get((tag.writer, tag.segment)) if incoming else None
        if incoming is not None and item is None and tag.writer in incoming.writers:
            self._on_notice(incoming, incoming.peers[tag.writer], arrival)
            return
        if incoming is None or item is None or item.state is not State.LEASED:
            self._stale += 1
            self._transport.discard(item.peer if item else None, arrival)
            return
        if not self._ring.writable(item.lease) or arrival.nbytes != item.segment.nbytes:
            self._transport.discard(item.peer, arrival)
            self._fail(
                incoming, ProtocolError(f"{item.segment} came too early, or with {arrival.nbytes} bytes")
            )
            self._drop(item)
            return
        item.state, item.started_s = State.RECEIVING, self._clock()
        view = self._buffer.view(self._ring.offset(item.lease), item.segment.nbytes)
        self._transport.receive(item.peer, arrival, view, context=item)

    def on_operation(self, operation: Operation) -> None:
        """A receive ended: its bytes go to their pages, unless the request is over."""
        if self._letters.ended(operation) or self._probes.ended(operation):
            return
        noticed = self._notices.ended(operation)
        if isinstance(noticed, Incoming):
            self._noticed(operation, noticed)
            return
        item = operation.context
        if not isinstance(item, Item):
            return
        incoming = item.incoming
        if operation.state is OperationState.FAILED:
            self._fail(incoming, operation.error or TransportError("the receive failed"))
            self._drop(item)
        elif incoming.closing or incoming.failed:
            self._drop(item)
        else:
            self._record("receive", item)
            self._try_scatter(item)

    def poll(self, now_s: float) -> float:
        """Lands what has been scattered, repeats watermarks, expires leases."""
        while self._scattering and is_done(self._scattering[0].scattered):
            self._land(self._scattering.popleft())
        if self._scattering:
            return DEVICE_POLL_S
        while self._overdue and self._overdue[0][0] <= now_s:
            _, incoming = self._overdue.popleft()
            incoming.awaited.clear()
            self._maybe_closed(incoming)
        self._probes.poll(now_s)
        if now_s >= self._repeat_at_s:
            self._repeat_at_s = now_s + self._watermark_interval_s
            self._repeat_watermarks()
            self._expire(now_s)
        wanted = self._probes.lease is not None or any(i.wanted for i in self._incoming.values())
        if self._polls and wanted:
            return ARRIVAL_POLL_S
        return self._repeat_at_s - now_s if self._ring.oldest() else IDLE_S

    # --- moving one segment on

    def _make_incoming(self, message: m.OpenReceive, link: Link) -> Incoming:
        ticket = message.ticket
        slots = self._queue.upload(slots_of(message.pages, self._page_size, ticket.tokens))
        coverage = Coverage(link.to_rank(self._rank), ticket.tokens, link.decode.layout)
        peers = {rank.rank: rank.control_address for rank in link.sources_of(self._rank)}
        writers = {rank for rank, peer in peers.items() if peer in self._writers and ticket.pages}
        return Incoming(ticket, slots, coverage, peers, writers=writers)

    def _lease(self, incoming: Incoming, peer: str, src_rank: int, segment: Segment) -> Item:
        known = incoming.items.get((src_rank, segment.index))
        if known is not None:
            if known.segment != segment:
                raise ProtocolError(f"segment {segment.index} was another one before")
            return known
        if segment.src_rank != src_rank or segment.dst_rank != self._rank:
            raise ProtocolError(f"{segment} does not go from rank {src_rank} to rank {self._rank}")
        incoming.coverage.add(segment)
        lease = self._ring.assign(segment.nbytes, owner=incoming.ticket.number)
        item = Item(incoming, segment, peer, lease)
        incoming.items[(src_rank, segment.index)] = item
        return item

    def _try_scatter(self, item: Item) -> None:
        try:
            self._scatter(item)
        except Exception as exc:  # noqa: BLE001 - whatever a launch raises ends this request and no other
            self._fail(item.incoming, TransportError(f"the scatter of {item.segment} failed: {exc}"))
            self._drop(item)

    def _scatter(self, item: Item) -> None:
        item.state, item.started_s = State.SCATTERING, self._clock()
        segment = item.segment
        at = segment.tokens.shift(-item.incoming.ticket.tokens.start)
        layers, heads = local(segment, self._shard)
        with self._queue.use():
            scatter(
                self._buffer.view(self._ring.offset(item.lease), segment.nbytes),
                self._pool.buffer,
                item.incoming.slots[at.start : at.stop],
                layers,
                heads,
            )
        item.scattered = self._queue.mark()
        self._scattering.append(item)

    def _land(self, item: Item) -> None:
        incoming = item.incoming
        self._record("scatter", item)
        item.state = State.LANDED
        self._ring.free(item.lease.id)
        self._count(incoming, item.segment)
        self._tell_writable()
        self._maybe_closed(incoming)

    def _on_notice(self, incoming: Incoming, peer: str, arrival: Arrival) -> None:
        if 0 < arrival.nbytes <= NOTICE_BYTES:
            self._notices.receive(peer, arrival, incoming)
            return
        self._transport.discard(peer, arrival)
        self._fail(incoming, ProtocolError(f"a notice of {arrival.nbytes} bytes came"))

    def _noticed(self, operation: Operation, incoming: Incoming) -> None:
        """A writer has told of a segment, or cannot any more: either way it writes nothing of it from now on."""
        tag = unpack(operation.tag)
        name = (tag.writer, tag.segment)
        first = name not in incoming.written
        incoming.written.add(name)
        incoming.awaited.discard(name)
        try:
            if operation.state is OperationState.FAILED:
                raise operation.error or TransportError("a notice was not received")
            segment = self._notices.segment(operation)
            if first and not incoming.failed and not incoming.closing:
                self._written(incoming, name, segment)
        except (TransportError, ProtocolError) as exc:
            self._fail(incoming, exc)
        self._maybe_closed(incoming)

    def _written(self, incoming: Incoming, name: tuple[int, int], segment: Segment) -> None:
        if (segment.src_rank, segment.index) != name or segment.dst_rank != self._rank:
            raise ProtocolError(f"a notice of {name} speaks of {segment}")
        incoming.early.append(segment)
        while ready := [s for s in incoming.early if not incoming.coverage.is_early(s)]:
            for each in ready:
                incoming.early.remove(each)
                incoming.coverage.add(each)
                now_s = self._clock()
                self._timeline.record("land", self._lane, str(incoming.key), now_s, now_s, each.nbytes)
                self._count(incoming, each)

    def _count(self, incoming: Incoming, segment: Segment) -> None:
        """A segment is in its pages."""
        incoming.landed_bytes += segment.nbytes
        incoming.landed_from[segment.src_rank] += segment.nbytes
        self._landed += 1
        self._landed_bytes += segment.nbytes
        if incoming.landed_bytes == incoming.coverage.total_bytes:
            incoming.landed = True
            self._to_leader(m.Landed(incoming.key, incoming.ticket.number, self._rank))

    def _drop(self, item: Item) -> None:
        """Frees a lease whose region nothing writes or reads any more."""
        item.state = State.DROPPED
        self._ring.free(item.lease.id)
        self._tell_writable()
        self._maybe_closed(item.incoming)

    def _record(self, name: str, item: Item) -> None:
        key, nbytes = str(item.incoming.key), item.segment.nbytes
        self._timeline.record(name, self._lane, key, item.started_s, self._clock(), nbytes)

    def _undelivered(self, peer: str, message: m.Message, error: TransportError) -> None:
        """A grant did not reach its rank: nothing will come. A watermark is sent again."""
        incoming = self._incoming.get(message.ticket) if isinstance(message, m.LeaseGrant) else None
        if incoming is not None:
            self._fail(incoming, error)

    # --- watermarks and deadlines

    def _tell_writable(self) -> None:
        """Sends the watermark to those whose segments it newly lets in: at most one message for each segment."""
        peers: set[str] = set()
        while self._untold and (
            self._untold[0].state is not State.LEASED or self._ring.writable(self._untold[0].lease)
        ):
            item = self._untold.popleft()
            self._waited_s += self._clock() - (item.waits_since_s or 0.0)
            if item.state is State.LEASED:
                peers.add(item.peer)
        for peer in peers:
            self._watermarks += 1
            self._letters.send(peer, self._watermark())

    def _repeat_watermarks(self) -> None:
        waiting = (item for incoming in self._incoming.values() for item in incoming.held())
        for peer in {i.peer for i in waiting if i.state is State.LEASED and self._ring.writable(i.lease)}:
            self._repeats += 1
            self._letters.send(peer, self._watermark())

    def _watermark(self) -> m.Watermark:
        return m.Watermark(self._rank, self._ring.watermark, self._ring.size_bytes)

    def _expire(self, now_s: float) -> None:
        """Ends the request at the head of the ring when its sender is too slow: others wait behind it."""
        oldest = self._ring.oldest()
        if oldest is None or oldest.id != self._head_lease:
            self._head_lease, self._head_since_s = (oldest.id if oldest else -1), now_s
            return
        item = next((i for k in self._incoming.values() for i in k.held() if i.lease is oldest), None)
        late = now_s - self._head_since_s > self._lease_timeout_s
        if item is not None and item.state is State.LEASED and late and not item.incoming.failed:
            self._expired += 1
            limit = f"{self._lease_timeout_s:g} s (transfer.lease_timeout_s)"
            self._fail(item.incoming, TransportError(f"{item.segment} did not come within {limit}"))

    # --- ending

    def _fail(self, incoming: Incoming, error: DisaggError) -> None:
        """Tells the leader, once, which answers with `CloseTransfer`; meanwhile nothing more is scattered."""
        if incoming.failed or incoming.closing:
            return
        incoming.failed = True
        log.warning("transfer_failed", request=str(incoming.key), error=str(error))
        self._failed += 1
        self._refuse(incoming.ticket, error)

    def _refuse(self, ticket: Ticket, error: DisaggError) -> None:
        self._to_leader(m.RankFailed(ticket.key, ticket.number, self._rank, error.code, str(error)))

    def _stop_source(self, incoming: Incoming, src_rank: int, reason: str) -> None:
        if src_rank not in incoming.asked_to_stop:
            incoming.asked_to_stop.add(src_rank)
            peer = incoming.peers[src_rank]
            self._send(peer, m.StopSending(incoming.key, incoming.ticket.number, reason))

    def _source_ended(self, incoming: Incoming, src_rank: int, sent: set[int]) -> None:
        incoming.ended.add(src_rank)
        if src_rank in incoming.writers:
            known = {index for rank, index in (*incoming.items, *incoming.written) if rank == src_rank}
            others = {name for name in incoming.awaited if name[0] != src_rank}
            incoming.awaited = others | {(src_rank, index) for index in sent - known}
            if incoming.awaited:
                self._overdue.append((self._clock() + self._quarantine_s, incoming))
        for item in list(incoming.held(src_rank)):
            if item.state is State.LEASED and item.segment.index not in sent:
                self._drop(item)

    def _shut(self, incoming: Incoming) -> None:
        """Whatever is launched from now on writes nothing; what has begun still may."""
        if incoming.writable and self._fences is not None:
            self._fences.close(incoming.ticket.row)
            incoming.writable = False

    def _maybe_closed(self, incoming: Incoming) -> None:
        if not incoming.closing or any(incoming.held()) or incoming.unproven_writers():
            return
        if self._clock() < incoming.barred_until_s:
            return
        if self._incoming.pop(incoming.ticket.number, None) is not None:
            self._to_leader(m.RankClosed(incoming.key, incoming.ticket.number, self._rank))

    # --- looking in

    def statistics(self) -> ReceiverStatistics:
        """Counts at this moment."""
        return ReceiverStatistics(
            tickets=len(self._incoming),
            ring_in_use_bytes=self._ring.statistics().in_use_bytes,
            segments_landed=self._landed,
            bytes_landed=self._landed_bytes,
            watermarks=self._watermarks,
            watermark_repeats=self._repeats,
            stale=self._stale,
            leases_expired=self._expired,
        )

    def status(self) -> RankStatus:
        """For metrics; cheap."""
        now_s = self._clock()
        waiting_s = sum(now_s - (item.waits_since_s or 0.0) for item in self._untold)
        return RankStatus(
            self._lane,
            self._rank,
            device_name(self._pool.buffer.device),
            ring_bytes=self._ring.size_bytes,
            ring_used_bytes=min(self._ring.in_use_bytes, self._ring.size_bytes),
            ring_waits_total=self._ring.waited,
            ring_wait_s_total=self._waited_s + waiting_s,
            landed_bytes_total=self._landed_bytes,
            faults_total=self._failed,
        )

    def check(self) -> None:
        """Raises `InvariantError` unless the ring's leases are those of segments on their way and of a probe."""
        self._ring.check()
        held = {item.lease.id for incoming in self._incoming.values() for item in incoming.held()}
        held |= {self._probes.lease.id} if self._probes.lease is not None else set()
        leased = {lease.id for lease in self._ring.outstanding()}
        if held != leased:
            raise InvariantError(f"segments hold leases {sorted(held)}, the ring has {sorted(leased)}")
