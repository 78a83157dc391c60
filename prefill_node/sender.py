"""The transfer agent of a prefill rank: sends its KV, segment by segment, while the prompt is still being computed.

What it is told passes to its parts:

    Tickets        what is open, and how it ends
    Chunks         what is being computed, cut into segments by the Cutter
    Leases         what decode ranks' rings grant, and can take now
    PeerPools      which decode ranks are written to instead
    SegmentMover   gather and send, or write, of what is computed
    StagingSpace   who holds staging
"""

from __future__ import annotations

from collections.abc import Callable

from disagg.core.errors import PeerLostError, TransportError
from disagg.core.ports import Clock
from disagg.core.status import Path, RankStatus
from disagg.core.timeline import Timeline
from disagg.core.types import RequestKey, Shard, Span
from disagg.kv.pages import slots_of
from disagg.kv.pool import KVPool
from disagg.node.device import DeviceQueue, Marker, device_name
from disagg.node.links import Link, fence
from disagg.node.sums import Sums
from disagg.node.warm import warm_copies
from prefill_node.chunks import Chunks
from prefill_node.cutter import Cutter
from prefill_node.direct import codes_of
from prefill_node.flows import Exposed, Flows, SenderStatistics
from prefill_node.leases import Leases, Ring
from prefill_node.mover import SegmentMover
from prefill_node.outgoing import Item, Outgoing
from prefill_node.peer_pools import PeerPools
from prefill_node.probe import Prober
from prefill_node.staging_space import StagingSpace
from prefill_node.tickets import Tickets
from staging.wire import Wire
from transport import messages as m
from transport.base import Arrival, Operation, Transport
from transport.letters import Letters

DEVICE_POLL_S = 0.0
IDLE_S = 1.0


class SegmentSender:
    """The transfer agent of a prefill rank. Every method but the constructor runs on the transfer thread."""

    def __init__(
        self,
        *,
        rank: int,
        shard: Shard,
        pool: KVPool,
        page_size: int,
        staging_bytes: int,
        segment_bytes: int,
        groups: int,
        peer_memory: bool,
        checksum: bool,
        segment_overhead_s: float,
        wire_bytes_per_s: float,
        quarantine_s: float,
        lease_timeout_s: float,
        transport: Transport,
        address: str,
        lane: str,
        send: Callable[[str, m.Message], None],
        to_leader: Callable[[m.Message], None],
        timeline: Timeline,
        clock: Clock,
    ) -> None:
        self._rank, self._shard, self._pool, self._page_size = rank, shard, pool, page_size
        self._transport, self._lane, self._clock = transport, lane, clock
        device = pool.device
        self._queue = DeviceQueue(device)
        self._sums = Sums(device) if checksum else None
        self._links: dict[str, Link] = {}
        self._stale = 0
        flows, exposed = Flows(), Exposed()
        self._flows, self._exposed = flows, exposed
        wire = Wire(segment_overhead_s, wire_bytes_per_s)
        self.cutter = Cutter(rank, shard, groups, staging_bytes, segment_bytes, wire)
        """For `prefill_node.calibration`, on the transfer thread; like `prober`."""
        self.groups = self.cutter.groups
        """The finest that chunks are sent in: after each, the device's progress is marked."""
        space = self._space = StagingSpace(staging_bytes, device, quarantine_s, clock)
        transport.register(space.buffer.memory)
        tickets = self._tickets = Tickets(
            rank,
            space,
            exposed,
            self._sums,
            send=send,
            to_leader=to_leader,
            freed=lambda: self._mover.pump(),
            clock=clock,
        )
        leases = self._leases = Leases(rank, tickets, self._send_letter, lease_timeout_s, clock)
        mover = self._mover = SegmentMover(
            rank,
            shard,
            pool,
            self._queue,
            self._sums,
            space,
            leases,
            tickets,
            transport,
            timeline,
            lane,
            clock,
        )
        why_not = "" if peer_memory else "peer memory is switched off here"
        pools = self._pools = PeerPools(rank, shard, pool, self._sums, self._links, send, why_not)
        self._chunks = Chunks(rank, self.cutter, tickets, leases, pools, mover, flows, exposed, clock)
        self.prober = Prober(
            transport,
            space.buffer,
            space.allocator,
            send=self._send_letter,
            writable=lambda peer: pools.of(peer) is not None,
            freed=mover.pump,
            clock=clock,
        )
        self._letters = Letters(
            transport,
            address,
            {
                m.LeaseGrant: self._on_grant,
                m.Watermark: self._on_watermark,
                m.SendAgain: self._on_send_again,
                m.TransferVerified: tickets.on_verified,
                m.ProbeAnswer: self.prober.on_answer,
            },
            self._undelivered,
        )

    # --- set-up

    def adopt_thread(self) -> None:
        """The calling thread is the transfer thread, and launches on this agent's queue only."""
        self._queue.adopt()

    def link(self, link: Link) -> None:
        """Connects to the decode ranks that this rank sends to. Raises `ConfigError`, `TransportError`.

        Again, after one of them was lost and is back: what is known of the wire, and of the others, stays.
        """
        self.cutter.link(link)
        for peer in link.destinations_of(self._rank):
            self._letters.know(peer.control_address)
            self._transport.connect(peer.control_address, peer.transport_address)
            self._leases.rings.setdefault(peer.control_address, Ring())
            self._flows.link(peer.control_address, f"{link.decode.name} r{peer.rank}")
        with self._queue.use():
            warm_copies(link.from_rank(self._rank), self._shard, self._pool, self._sums, codes_of(link))
            self._pools.warm(link)
        self._links[link.decode.name] = link
        self._pools.linked(link)

    # --- what the leader and the compute thread say

    def open(self, message: m.OpenSend) -> None:
        """A request was admitted: its KV will be written to `pages`. Repeated: nothing happens."""
        if message.key in self._tickets.open:
            return
        ticket = message.ticket
        link = self._links.get(ticket.group)
        if link is None:
            self._tickets.refuse(
                message.key, ticket.number, PeerLostError(f"decode group {ticket.group!r} is not linked")
            )
            return
        try:
            slots = slots_of(message.pages, self._page_size, Span(0, ticket.tokens.stop))
            uploaded = self._queue.upload(slots)
            outgoing = Outgoing(message.key, ticket, link, uploaded, planned_to=ticket.tokens.start)
            self._pools.aim(outgoing, self._queue)
        except Exception as exc:  # noqa: BLE001 - whatever it is ends this request and no other
            self._tickets.refuse(
                message.key, ticket.number, TransportError(f"cannot send {message.key}: {exc}")
            )
        else:
            self._tickets.open[message.key] = outgoing

    def plan_chunk(self, step: int, key: RequestKey, chunk: Span) -> None:
        """Step `step` is about to compute positions `chunk`: cuts them into segments and asks for leases."""
        self._chunks.plan(step, key, chunk)

    def layers_ready(self, step: int, layers: Span, marker: Marker) -> None:
        """The KV of `layers` (global) of step `step` is written once `marker` is done on the device."""
        self._chunks.layers_ready(step, layers, marker)

    def close(self, message: m.CloseTransfer) -> None:
        """The request is over: sends nothing more, and answers when nothing of it is read here any more."""
        self._tickets.close(message)

    # --- what decode ranks say

    def on_pool_offer(self, peer: str, offer: m.PoolOffer) -> None:
        """A decode rank lets its pool be written to: tickets opened from now on are, if this rank can open it."""
        if peer in self._leases.rings:
            self._pools.take(peer, offer)
        else:
            self._pools.keep(peer, offer)

    def on_stop_sending(self, peer: str, message: m.StopSending) -> None:
        """The decode side gave the ticket up, and tells the router why; `Release` follows."""
        self._tickets.on_stop_sending(peer, message)

    def on_peer_lost(self, peer: str) -> None:
        """A decode rank is gone: fences it; its tickets fail, their sends end failed on the next turn."""
        self._pools.forget(peer)
        if self._leases.rings.pop(peer, None) is None:
            return
        self._letters.forget(peer)
        self._flows.forget(peer)
        for name, link in list(self._links.items()):
            if peer in {rank.control_address for rank in link.decode.ranks}:
                del self._links[name]
        fence(self._transport, peer)
        self.prober.lost(peer)
        self._tickets.on_peer_lost(peer)

    def _on_grant(self, peer: str, grant: m.LeaseGrant) -> None:
        self._leases.on_grant(peer, grant)
        self._mover.pump()

    def _on_watermark(self, peer: str, message: m.Watermark) -> None:
        self._leases.on_watermark(peer, message)
        self._mover.pump()

    def _on_send_again(self, peer: str, message: m.SendAgain) -> None:
        outgoing = self._tickets.find(message.key, message.ticket)
        item = outgoing.items.get((message.dst_rank, message.segment)) if outgoing is not None else None
        if item is None or item.peer != peer or item.damaged:
            self._stale += 1
        else:
            self._mover.damaged(item)

    # --- TransferAgent

    def on_operation(self, operation: Operation) -> None:
        """A segment or its notice, a letter or a probe's message has left, or failed."""
        if isinstance(operation.context, Item):
            self._mover.ended(operation.context, operation)
        elif not (self._letters.ended(operation) or self.prober.ended(operation)):
            self._mover.notice_ended(operation)

    def on_arrival(self, arrival: Arrival) -> None:
        """Takes letters. Nobody sends data to a prefill rank: consumed and counted."""
        if not self._letters.arrived(arrival):
            self._stale += 1
            self._transport.discard(None, arrival)

    def poll(self, now_s: float) -> float:
        """Moves on what the device has done, or what is due; asks to be called again soon meanwhile."""
        self._exposed.look(now_s)
        if self._mover.copying:
            self._mover.poll(now_s)
        if now_s >= self._space.due_s:
            self._space.end_quarantines(now_s)
            self._mover.pump()
        if now_s >= self._leases.due_s:
            self._leases.expire(now_s)
        probe_s = self.prober.poll(now_s)
        return DEVICE_POLL_S if self._mover.copying or self._exposed else min(IDLE_S, probe_s)

    # --- inside

    def _send_letter(self, peer: str, message: m.Message) -> None:
        self._letters.send(peer, message)

    def _undelivered(self, peer: str, message: m.Message, error: TransportError) -> None:
        self.prober.undelivered(message, error)
        self._leases.undelivered(message, error)

    # --- looking in

    def statistics(self) -> SenderStatistics:
        """Counts at this moment."""
        return SenderStatistics(
            tickets=len(self._tickets.open),
            under_way=self._tickets.staged(),
            staging_in_use_bytes=self._space.in_use_bytes,
            quarantined_bytes=self._space.quarantined_bytes,
            segments_sent=self._mover.segments_sent,
            bytes_sent=self._mover.bytes_sent,
            segments_sent_again=self._mover.segments_sent_again,
            segments_written=self._mover.segments_written,
            open_pools=len(self._pools),
            refused_pools=self._pools.refused,
            stale=self._stale + self._tickets.stale + self._leases.stale,
        )

    def status(self) -> RankStatus:
        """For metrics; cheap."""
        space = self._space.allocator
        return RankStatus(
            self._lane,
            self._rank,
            device_name(self._pool.device),
            staging_bytes=space.size_bytes,
            staging_used_bytes=min(space.in_use_bytes, space.size_bytes),
            routes=self._flows.statuses(self._clock(), self._path_to),
            exposed_s_total=self._exposed.total_s,
            faults_total=self._tickets.failed,
        )

    def _path_to(self, peer: str) -> Path:
        return "staged" if self._pools.of(peer) is None else "peer"

    def check(self) -> None:
        """Raises `InvariantError` unless staging is held by exactly the segments under way and a probe."""
        self._space.check(self._tickets.staged(), self.prober.leases)
        self._tickets.check()
