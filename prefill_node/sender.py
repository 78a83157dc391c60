"""The transfer agent of a prefill rank: sends a prompt's KV in segments while the prompt is still being computed.

OutgoingTickets   opens, reports and closes the transfer of each ticket
Chunks            cuts chunks into segments with the Cutter, and tracks which layers are computed
Leases            requests ring space of decode ranks, and receives their watermarks
PeerPools         maps pools of decode ranks for direct writes
SegmentMover      gathers and sends computed segments, or writes them directly
StagingSpace      assigns staging regions to segments
"""

from __future__ import annotations

import math

from disagg.core.errors import NotLinkedError, TransportError
from disagg.core.status import Path, RankStatus
from disagg.core.types import RequestKey, Span
from disagg.kv.page_tables import table_slots
from disagg.node.device import DeviceEvent, DeviceQueue, device_name
from disagg.node.links import Link, fence
from disagg.node.sums import Sums
from disagg.node.transfer_loop import YIELD_S
from disagg.node.warm import warm_copies
from prefill_node.boards import PeerBoards
from prefill_node.chunks import Chunks
from prefill_node.cutter import Cutter
from prefill_node.direct import quantized_dtype
from prefill_node.exposed import Exposed
from prefill_node.flows import Flows, SenderStatistics
from prefill_node.leases import Leases, PeerRing
from prefill_node.mover import CopyQueue, SegmentMover
from prefill_node.options import SenderContext, SenderOptions
from prefill_node.outgoing import OutgoingSegment, OutgoingTransfer
from prefill_node.peer_pools import PeerPools
from prefill_node.probe import Prober
from prefill_node.staging_space import StagingSpace
from prefill_node.step_part import PlannedChunk, StepPart
from prefill_node.tickets import OutgoingTickets
from transport.active_messages import ActiveMessages
from transport.base import Arrival, Operation
from transport.control import messages as m

DEVICE_POLL_S = 0.0
IDLE_S = 1.0
COMPUTE_POLL_S = 50e-6
"""Poll interval on a GPU while the KV of a planned chunk is about to be computed: the wake-up of a blocked thread
takes longer."""
COMPUTE_POLL_LIMIT_S = 0.02
"""Time after the latest plan of a chunk in which the thread polls for its KV."""


class SegmentSender:
    """The transfer agent of a prefill rank. Every method except the constructor runs on the transfer thread.

    A method that may free staging or ring space ends with `SegmentMover.pump`, which launches the copies that waited
    for this space.
    """

    def __init__(self, options: SenderOptions, context: SenderContext) -> None:
        """Allocates staging and registers the memory with the transport."""
        self._context, self._tables = context, options.tables
        self._rank, self._transport = context.rank, context.transport
        device, clock = context.pool.device, context.clock
        self.queue = DeviceQueue(device)
        """Device queue of the copies."""
        self._sums = Sums(device) if options.checksum else None
        self.links: dict[str, Link] = {}
        """Linked decode groups by name."""
        self.polls = device.type == "cuda"
        """Whether `poll` returns short intervals while KV or the end of a copy is expected."""
        self._planned_s, self._stale = -math.inf, 0
        self._active_messages = ActiveMessages(
            context.transport,
            context.control.send,
            {
                m.LeaseGrant: self._on_grant,
                m.Watermark: self._on_watermark,
                m.TransferVerified: self.on_verified,
                m.ProbeAnswer: self._on_probe_answer,
            },
            self._undelivered,
        )
        self._flows, self._exposed = Flows(), Exposed()
        self.space = StagingSpace(options.staging_bytes, device, options.quarantine_s, clock)
        """Staging memory and the holders of its regions."""
        context.transport.register(self.space.buffer.memory)
        self.cutter = Cutter(
            context.rank,
            context.shard,
            options.groups,
            options.staging_bytes,
            options.segment_bytes,
            options.wire,
        )
        """Cuts chunks into segments. `prefill_node.calibration` sets the cutter's wires on the transfer thread."""
        self.groups = self.cutter.groups
        """The finest division of this rank's layers into groups; the compute thread records an event after each."""
        self.tickets = OutgoingTickets(context, self.space, self._exposed, self._sums)
        """Open tickets."""
        send = self._active_messages.send
        self._leases = Leases(context.rank, self.tickets, send, options.lease_timeout_s, clock)
        copies = CopyQueue(self.queue, self._sums)
        self._mover = SegmentMover(context, copies, self.space, self._leases, self.tickets)
        boards = PeerBoards(self.queue) if options.words else None
        self._pools = PeerPools(context, self._sums, self.links, boards, options.writes_disabled_reason)
        self._chunks = Chunks(
            context.rank, self.cutter, self.tickets, self._leases, self._pools, self._mover, self._flows
        )
        self.early = self._chunks.early
        self.prober = Prober(
            context.transport,
            self.space.buffer,
            self.space.allocator,
            send=send,
            writable=self._pools.is_open,
            freed=self._mover.pump,
            clock=clock,
        )

    # --- set-up

    def adopt_thread(self) -> None:
        """Makes the calling thread the transfer thread, whose device work goes to this agent's queue."""
        self.queue.adopt()

    def link(self, link: Link) -> None:
        """Connects to the decode ranks that this rank sends to. Raises `ConfigError`, `TransportError`.

        A second call, after a lost decode rank has returned, keeps the measured wire and the state of other ranks'
        rings.
        """
        self.cutter.link(link)
        for peer in link.destinations_of(self._rank):
            self._transport.connect(peer.control_address, peer.transport_address)
            self._leases.rings.setdefault(peer.control_address, PeerRing())
            self._flows.link(peer.control_address, f"{link.decode.name} r{peer.rank}")
        with self.queue.use():
            routes = link.from_rank(self._rank)
            warm_copies(routes, self._context.shard, self._context.pool, self._sums, quantized_dtype(link))
            self._pools.warm(link)
        self.links[link.decode.name] = link
        self._pools.linked(link)
        for peer in link.destinations_of(self._rank):
            self._active_messages.link(peer.control_address)

    def on_linked(self, peer: str, message: m.Linked) -> bool:
        """Handles `Linked` of a peer; returns False if the peer has fenced this rank since its previous `Linked`."""
        return self._active_messages.on_linked(peer, message)

    # --- calls of the leader and the compute thread

    def has_ticket(self, key: RequestKey) -> bool:
        """Returns whether a ticket of the request is open. Any thread may call it."""
        return key in self.tickets.open

    def open(self, message: m.OpenSend) -> None:
        """Opens the ticket of an admitted request, whose KV is computed into `message.pages`.

        Early chunks are sent at once. A repeated message changes nothing.
        """
        if message.key in self.tickets.open:
            return
        ticket = message.ticket
        link = self.links.get(ticket.group)
        if link is None:
            self.tickets.refuse(
                message.key, ticket.number, NotLinkedError(f"decode group {ticket.group!r} is not linked")
            )
            return
        try:
            ticket.check_starts(link.decode.layout)
            pages = [message.pages, *message.more]
            slots = table_slots(self._tables, pages, Span(0, ticket.tokens.stop))
            uploaded = [self.queue.upload(one) for one in slots]
            classes = len(link.decode.layout.states)
            states = self._tables.state_slots(message.states or (message.row,), classes, self.queue.upload)
            outgoing = OutgoingTransfer(
                message.key,
                ticket,
                message.reservation,
                link,
                self._tables.by_class(uploaded, len(self._context.shard.parts)),
                states,
                planned_to=ticket.tokens.start,
            )
            self._pools.aim(outgoing, self.queue)
        except Exception as exc:  # noqa: BLE001 - any failure ends this request only
            self.tickets.refuse(
                message.key, ticket.number, TransportError(f"cannot send {message.key}: {exc}")
            )
        else:
            self.tickets.open[message.key] = outgoing
            self._chunks.opened(outgoing)
            self._mover.pump()

    def plan_chunk(self, chunk: PlannedChunk) -> None:
        """Cuts a chunk that is about to be computed, and requests leases for its segments.

        For an early chunk, both happen when the ticket opens.
        """
        self._planned_s = self._context.clock()
        self._chunks.plan(chunk)
        self._mover.pump()

    def drop_early(self, key: RequestKey, reservation: int) -> None:
        """Drops the early chunks of a reservation that has ended before a ticket arrived."""
        self._chunks.drop_early(key, reservation)

    def layers_ready(self, part: StepPart, layers: Span, event: DeviceEvent) -> None:
        """Sends the segments of a step part in `layers`, whose KV is written once `event` is done on the device.

        `layers` is numbered over the whole model.
        """
        self._chunks.layers_ready(part, layers, event)

    def close(self, message: m.CloseTransfer) -> None:
        """Ends the transfer of a finished request: `RankClosed` follows when the device no longer reads the request's
        pages."""
        self.tickets.close(message)
        self._mover.pump()

    # --- messages of decode ranks

    def on_pool_offer(self, peer: str, offer: m.PoolOffer) -> None:
        """Opens a decode rank's pool for the direct writes of later tickets, if this rank can map the pool."""
        if peer in self._leases.rings:
            self._pools.take(peer, offer)
        else:
            self._pools.keep(peer, offer)

    def on_stop_sending(self, peer: str, message: m.StopSending) -> None:
        """Stops a ticket that the decode side has cancelled; the peer always receives `SenderEnded`."""
        self.tickets.on_stop_sending(peer, message)
        self._mover.pump()

    def on_send_again(self, peer: str, message: m.SendAgain) -> None:
        """Resends a segment that arrived damaged. A repeated request changes nothing."""
        outgoing = self.tickets.find(message.key, message.ticket)
        item = outgoing.items.get((message.dst_rank, message.segment)) if outgoing is not None else None
        if item is None or item.peer != peer or item.damaged:
            self._stale += 1
        else:
            self._mover.on_damaged(item)

    def on_verified(self, peer: str, message: m.TransferVerified) -> None:
        """Records that the peer has verified its segments of some tickets. A second message changes nothing.

        The message arrives as an active message, over the control channel, or both.
        """
        self.tickets.on_verified(peer, message)

    def on_peer_lost(self, peer: str) -> None:
        """Fences a lost decode rank and fails the open tickets of its group.

        The transport ends sends to the rank as failed at the next `progress` call.
        """
        self._pools.forget(peer)
        self._active_messages.forget(peer)
        if self._leases.rings.pop(peer, None) is None:
            return
        self._flows.forget(peer)
        for name, link in list(self.links.items()):
            if peer in {rank.control_address for rank in link.decode.ranks}:
                del self.links[name]
        fence(self._transport, peer)
        self.prober.lost(peer)
        self.tickets.on_peer_lost(peer)
        self._mover.pump()

    def _on_grant(self, peer: str, grant: m.LeaseGrant) -> None:
        self._leases.on_grant(peer, grant)
        self._mover.pump()

    def _on_watermark(self, peer: str, message: m.Watermark) -> None:
        self._leases.on_watermark(peer, message)
        self._mover.pump()

    def _on_probe_answer(self, peer: str, message: m.ProbeAnswer) -> None:
        self.prober.on_answer(peer, message)

    def _undelivered(self, peer: str, message: m.Message, error: TransportError) -> None:
        self.prober.undelivered(message, error)
        self._leases.undelivered(message, error)
        self._mover.pump()

    # --- TransferAgent

    def begin_turn(self) -> None:
        """Lets the active messages of the turn wait until `poll`, to share messages of the transport."""
        self._active_messages.collect()

    def on_operation(self, operation: Operation) -> None:
        """Handles the end of a send: of a segment, a completion notification, an active message or a probe."""
        if isinstance(operation.context, OutgoingSegment):
            self._mover.on_send_ended(operation.context, operation)
        elif not (self._active_messages.ended(operation) or self.prober.ended(operation)):
            self._mover.on_notification_ended(operation)

    def on_arrival(self, arrival: Arrival) -> None:
        """Receives active messages. Other arrivals are discarded and counted: a prefill rank receives no data."""
        if not self._active_messages.arrived(arrival):
            self._stale += 1
            self._transport.discard(None, arrival)

    def poll(self, now_s: float) -> float:
        """Sends segments whose copy is done, and handles timeouts. Returns the seconds until the next call."""
        self._active_messages.flush()
        self._exposed.poll(now_s)
        if self._mover.copying:
            self._mover.poll(now_s)
        if now_s >= self.space.due_s:
            self.space.end_quarantines(now_s)
            self._mover.pump()
        if now_s >= self._leases.due_s:
            self._leases.expire(now_s)
            self._mover.pump()
        probe_s = self.prober.poll(now_s)
        if self._mover.copying or self._exposed:
            return YIELD_S if self.polls and self._mover.ends_soon(now_s) else DEVICE_POLL_S
        computing = self._chunks.uncomputed and now_s - self._planned_s < COMPUTE_POLL_LIMIT_S
        return min(COMPUTE_POLL_S if self.polls and computing else IDLE_S, probe_s)

    def may_block(self) -> bool:
        """Returns True: every event of a sender wakes the transport, or `poll` has returned a short interval."""
        return True

    # --- statistics

    def statistics(self) -> SenderStatistics:
        """Returns the counts at this moment."""
        return SenderStatistics(
            tickets=len(self.tickets.open),
            under_way=self.tickets.staged(),
            staging_in_use_bytes=self.space.in_use_bytes,
            quarantined_bytes=self.space.quarantined_bytes,
            segments_sent=self._mover.segments_sent,
            bytes_sent=self._mover.bytes_sent,
            segments_sent_again=self._mover.segments_sent_again,
            segments_written=self._mover.segments_written,
            segments_reported=self._mover.segments_reported,
            open_pools=len(self._pools),
            refused_pools=self._pools.refused,
            stale=self._stale + self.tickets.stale + self._leases.stale,
        )

    def status(self) -> RankStatus:
        """Returns the rank's status for metrics. Cheap enough for frequent calls."""
        space, context = self.space.allocator, self._context
        return RankStatus(
            context.lane,
            self._rank,
            device_name(context.pool.device),
            staging_bytes=space.size_bytes,
            staging_used_bytes=min(space.in_use_bytes, space.size_bytes),
            routes=self._flows.statuses(context.clock(), self._path_to),
            exposed_s_total=self._exposed.total_s,
            faults_total=self.tickets.failed,
        )

    def _path_to(self, peer: str) -> Path:
        return "peer" if self._pools.is_open(peer) else "staged"

    def check(self) -> None:
        """Raises `InvariantError` if staging regions, segment states or early chunks are inconsistent."""
        self._chunks.check()
        self.space.check(self.tickets.staged(), self.prober.leases)
        self.tickets.check()
