"""Sends a rank's KV, segment by segment, while the prompt is still being computed. Runs on the transfer thread.

No deadlock: staging is taken only by segments that the destination can receive *now*, so whoever holds staging
moves on by itself; the oldest lease of a ring is always writable, and its segment waits for compute alone, which
never waits for the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import torch

from disagg.core.errors import DisaggError, InvariantError, PeerLostError, TransportError
from disagg.core.ports import Clock
from disagg.core.status import Path, RankStatus
from disagg.core.timeline import Timeline
from disagg.core.types import RequestKey, Shard, Span
from disagg.kv.pages import slots_of
from disagg.kv.pool import MHATokenToKVPool
from disagg.node.device import DeviceQueue, Marker, device_name, is_done
from disagg.node.links import Link, fence, segment_limits
from disagg.node.warm import warm_copies
from kernels.gather import gather
from kernels.layout import segment_bytes
from prefill_node.direct import (
    NO_LIMIT,
    OpenPool,
    OpenPools,
    check_pool,
    check_ticket,
    local_place,
    target_slots,
    warm,
)
from prefill_node.flows import Exposed, Flows
from prefill_node.outgoing import Destination, Item, Outgoing, State
from prefill_node.probe import Prober
from staging.allocator import Lease, StagingAllocator
from staging.buffer import StagingBuffer
from staging.planner import group_count, layer_groups, plan_segments
from staging.wire import Wire
from transport import messages as m
from transport.base import Arrival, Operation, OperationState, Transport
from transport.letters import Letters
from transport.notices import Notices
from transport.tags import pack

log = structlog.get_logger(__name__)

DEVICE_POLL_S = 0.0
IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """The sender as it stands, and counts since it was made."""

    tickets: int
    """Open now; finished ones are kept until they are closed."""
    under_way: int
    """Segments that hold staging now."""
    staging_in_use_bytes: int
    """Of segments under way."""
    quarantined_bytes: int
    """Staging that a lost peer may still read for a while."""
    segments_sent: int
    bytes_sent: int
    segments_written: int
    """Of those sent, the ones that were written straight into the destination's pool."""
    open_pools: int
    """Pools of decode ranks that are written to."""
    refused_pools: int
    """Offers that this rank could not take."""
    stale: int
    """Messages for tickets or segments that are not, or no longer, known; dropped."""


class SegmentSender:
    """The transfer agent of a prefill rank. Every method but the constructor runs on the transfer thread."""

    def __init__(
        self,
        *,
        rank: int,
        shard: Shard,
        pool: MHATokenToKVPool,
        page_size: int,
        staging_bytes: int,
        segment_bytes: int,
        groups: int,
        peer_memory: bool,
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
        self._staging_bytes, self._segment_bytes = staging_bytes, segment_bytes
        self.groups: tuple[Span, ...] = layer_groups(shard.layers, groups)
        """The finest that chunks are sent in: after each, the device's progress is marked."""
        self._wire = Wire(segment_overhead_s, wire_bytes_per_s)
        self._wires: dict[str, Wire] = {}
        """Of groups whose wire is not taken to be like that."""
        self._transport, self._send, self._to_leader = transport, send, to_leader
        self._timeline, self._clock = timeline, clock
        self._quarantine_s = quarantine_s
        """A peer that we took for dead has noticed by then, and reads our memory no more."""
        self._quarantined: deque[tuple[float, Lease]] = deque()
        self._lane = lane
        self._queue = DeviceQueue(pool.buffer.device)
        self._buffer = StagingBuffer(staging_bytes, pool.buffer.device)
        self._allocator = StagingAllocator(staging_bytes)
        transport.register(self._buffer.memory)
        self._notices = Notices(transport)
        self.prober = Prober(
            transport,
            self._buffer,
            self._allocator,
            send=lambda peer, message: self._letters.send(peer, message),
            writable=lambda peer: self._pools.of(peer) is not None,
            freed=self._pump,
            clock=clock,
        )
        """For `prefill_node.calibration`, on the transfer thread."""
        self._letters = Letters(
            transport,
            address,
            {
                m.LeaseGrant: self.on_grant,
                m.Watermark: self.on_watermark,
                m.ProbeAnswer: self.prober.on_answer,
            },
            self._undelivered,
        )
        self._links: dict[str, Link] = {}
        self._limits: dict[str, dict[int, int]] = {}
        self._destinations: dict[str, Destination] = {}
        self._no_writes = "" if peer_memory else "peer memory is switched off here"
        """Why this rank never writes into another one's pool; empty while it may."""
        self._offers: dict[str, m.PoolOffer] = {}
        """Of decode ranks that are not linked yet."""
        self._pools = OpenPools(pool.buffer.device)
        self._outgoing: dict[RequestKey, Outgoing] = {}
        self._steps: dict[int, list[Item]] = {}
        self._lease_timeout_s = lease_timeout_s
        self._unanswered: deque[tuple[float, list[Item]]] = deque()
        """Segments that leases were asked for, with the time by which they must have them."""
        self._staged: deque[Item] = deque()
        self._copying: deque[Item] = deque()
        """Items whose gather or write is on the device, in the queue's order."""
        self._segments_sent = self._bytes_sent = self._segments_written = self._stale = 0
        self._refused_pools = self._failed = 0
        self._flows, self._exposed = Flows(), Exposed()

    # --- set-up

    def adopt_thread(self) -> None:
        """The calling thread is the transfer thread, and launches on this agent's queue only."""
        self._queue.adopt()

    def link(self, link: Link) -> None:
        """Connects to the decode ranks that this rank sends to. Raises `ConfigError`, `TransportError`.

        Again, after one of them was lost and is back: what is known of the wire, and of the others, stays.
        """
        if link.decode.name not in self._wires:
            self._limits[link.decode.name] = segment_limits(
                link, self._rank, self._segment_bytes, self._staging_bytes
            )
        for peer in link.destinations_of(self._rank):
            self._letters.know(peer.control_address)
            self._transport.connect(peer.control_address, peer.transport_address)
            self._destinations.setdefault(peer.control_address, Destination())
            self._flows.link(peer.control_address, f"{link.decode.name} r{peer.rank}")
        with self._queue.use():
            warm_copies(link.from_rank(self._rank), self._shard, self._pool)
            self._warm_writes(link)
        self._links[link.decode.name] = link
        for peer in link.destinations_of(self._rank):
            if (offer := self._offers.pop(peer.control_address, None)) is not None:
                self.on_pool_offer(peer.control_address, offer)

    def use_wire(self, link: Link, wire: Wire, segment_bytes: int) -> None:
        """From the next chunk on, what goes to the link's decode group is cut for this wire."""
        self._wires[link.decode.name] = wire
        self._limits[link.decode.name] = segment_limits(link, self._rank, segment_bytes, self._staging_bytes)

    def _warm_writes(self, link: Link) -> None:
        """Before the first request comes. What cannot be compiled is no reason not to start: there is the ring."""
        try:
            for peer in link.destinations_of(self._rank) if not self._no_writes else ():
                routes = tuple(r for r in link.from_rank(self._rank) if r.dst_rank == peer.rank)
                warm(routes, peer.shard, self._pool.buffer, self._shard)
        except Exception as exc:
            log.exception("writes_not_compiled", group=link.decode.name)
            self._no_writes = f"its kernel cannot be used: {exc}"

    # --- what the leader and the compute thread say

    def open(self, message: m.OpenSend) -> None:
        """A request was admitted: its KV will be written to `pages`. Repeated: nothing happens."""
        if message.key in self._outgoing:
            return
        ticket = message.ticket
        link = self._links.get(ticket.group)
        if link is None:
            self._fail(
                message.key, ticket.number, PeerLostError(f"decode group {ticket.group!r} is not linked")
            )
            return
        try:
            self._outgoing[message.key] = self._make_outgoing(message, link)
        except Exception as exc:  # noqa: BLE001 - whatever it is ends this request and no other
            self._fail(message.key, ticket.number, TransportError(f"cannot send {message.key}: {exc}"))

    def _make_outgoing(self, message: m.OpenSend, link: Link) -> Outgoing:
        ticket, span = message.ticket, Span(0, message.ticket.tokens.stop)
        slots = self._queue.upload(slots_of(message.pages, self._page_size, span))
        outgoing = Outgoing(message.key, ticket, link, slots, planned_to=ticket.tokens.start)
        if ticket.pages:
            peers = (peer.control_address for peer in link.destinations_of(self._rank))
            outgoing.direct = {peer: pool for peer in peers if (pool := self._pools.of(peer)) is not None}
        if outgoing.direct:
            check_ticket(ticket, link, list(outgoing.direct.values()))
            outgoing.target_slots = self._queue.upload(target_slots(ticket, link.decode.page_size))
        return outgoing

    def plan_chunk(self, step: int, key: RequestKey, chunk: Span) -> None:
        """Step `step` is about to compute positions `chunk`: cuts them into segments and asks for leases."""
        outgoing = self._outgoing.get(key)
        if outgoing is None or outgoing.closing:
            return
        tokens = chunk.intersect(outgoing.ticket.tokens)
        link = outgoing.link
        peers = link.destinations_of(self._rank)
        unstaged = {p.rank: NO_LIMIT for p in peers if p.control_address in outgoing.direct}
        segments = plan_segments(
            link.from_rank(self._rank),
            link.prefill.layout,
            tokens,
            self.groups_for(len(tokens), link.decode.name),
            self._limits[link.decode.name] | unstaged,
            first_index=len(outgoing.items),
        )
        outgoing.planned_to = max(outgoing.planned_to, tokens.stop)
        written: list[tuple[list[Item], OpenPool, Shard]] = []
        for peer in peers:
            name = peer.control_address
            pool = outgoing.direct.get(name)
            flow = self._flows.of(name, "staged" if pool is None else "peer")
            items = [Item(outgoing, s, name, flow) for s in segments if s.dst_rank == peer.rank]
            if items:
                outgoing.items.update({(peer.rank, item.segment.index): item for item in items})
                outgoing.left += len(items)
                outgoing.uncomputed += len(items)
                outgoing.asked.add(name)
                self._steps.setdefault(step, []).extend(items)
                if pool is None:
                    self._ask(outgoing, name, items)
                else:
                    written.append((items, pool, peer.shard))
        for each in written:
            self._prepare(*each)
        self._maybe_finished(outgoing)

    def groups_for(self, tokens: int, group: str) -> tuple[Span, ...]:
        """The groups of layers in which a chunk of so many tokens leaves for a decode group."""
        nbytes = segment_bytes(self._pool.buffer, tokens, self._shard.layers, self._shard.heads)
        wire = self._wires.get(group, self._wire)
        count = group_count(nbytes, len(self.groups), wire.overhead_s, wire.bytes_per_s)
        return layer_groups(self._shard.layers, count)

    def layers_ready(self, step: int, layers: Span, marker: Marker) -> None:
        """The KV of `layers` (global) of step `step` is written once `marker` is done on the device."""
        waiting: list[Item] = []
        ready: list[Item] = []
        for item in self._steps.pop(step, []):  # layers are computed in order
            (waiting if item.segment.layers.stop > layers.stop else ready).append(item)
        for item in ready:
            item.computed, item.after = True, marker
            item.outgoing.uncomputed -= 1
        self._exposed.computed({item.outgoing for item in ready}, marker, self._clock())
        for item in ready:
            if item.write is None:
                self._maybe_sendable(item)
            elif item.state is State.PLANNED:
                self._try_copy(item)
        if waiting:
            self._steps[step] = waiting
        self._pump()

    def close(self, message: m.CloseTransfer) -> None:
        """The request is over: sends nothing more, and answers when nothing of it is read here any more."""
        outgoing = self._outgoing.get(message.key)
        if outgoing is None:
            self._to_leader(m.RankClosed(message.key, message.ticket, self._rank))
            return
        outgoing.leader_asked = True
        self._stop(outgoing, message.reason)
        self._maybe_closed(outgoing)

    # --- what decode ranks say

    def on_pool_offer(self, peer: str, offer: m.PoolOffer) -> None:
        """A decode rank lets its pool be written to: tickets opened from now on are, if this rank can open it."""
        if peer not in self._destinations:
            self._offers[peer] = offer
            return
        try:
            self._open_pool(peer, offer)
        except Exception as exc:  # noqa: BLE001 - whatever it is, there is another way
            self._pools.forget(peer)
            self._refused_pools += 1
            log.info("pool_not_opened", peer=peer, why=str(exc), how="KV goes through staging and its ring")
            self._send(peer, m.PoolRefused(self._rank, str(exc)))

    def _open_pool(self, peer: str, offer: m.PoolOffer) -> None:
        if self._no_writes:
            raise TransportError(self._no_writes)
        opened = self._pools.open(peer, offer)
        link, shard = next(
            (link, rank.shard)
            for link in self._links.values()
            for rank in link.destinations_of(self._rank)
            if rank.control_address == peer
        )
        check_pool(opened, link.decode.layout, shard, self._pool.buffer.dtype)
        log.info("pool_opened", peer=peer, how="this rank's kernels write straight into it")

    def on_grant(self, peer: str, grant: m.LeaseGrant) -> None:
        """Leases came. A repeated grant changes nothing."""
        destination, outgoing = self._destinations.get(peer), self._outgoing.get(grant.key)
        if destination is None or outgoing is None or outgoing.ticket.number != grant.ticket:
            self._stale += 1
            return
        destination.hear(grant.watermark, grant.ring_bytes)
        for index, start in grant.starts:
            item = outgoing.items.get((grant.dst_rank, index))
            if item is None or item.ring_start is not None:
                self._stale += 1
                continue
            item.ring_start = start
            self._maybe_sendable(item)
        self._forget_answered()
        self._pump()

    def on_watermark(self, peer: str, message: m.Watermark) -> None:
        """A decode rank's ring was freed up to there."""
        destination = self._destinations.get(peer)
        if destination is None:
            self._stale += 1
            return
        destination.hear(message.watermark, message.ring_bytes)
        self._pump()

    def on_stop_sending(self, peer: str, message: m.StopSending) -> None:
        """The decode side gave the ticket up, and tells the router why; `Release` follows."""
        outgoing = self._outgoing.get(message.key)
        if outgoing is None or outgoing.ticket.number != message.ticket:
            self._stale += 1
            self._send(peer, m.SenderEnded(message.key, message.ticket, self._rank, [], "unknown here"))
            return
        if outgoing.closing or outgoing.finished:
            self._end_for(outgoing, peer, message.reason)
        outgoing.asked.add(peer)  # it waits for the answer, also when nothing was to be sent to it yet
        self._stop(outgoing, message.reason)

    def on_peer_lost(self, peer: str) -> None:
        """A decode rank is gone: fences it; its tickets fail, their sends end failed on the next turn."""
        self._offers.pop(peer, None)
        self._pools.forget(peer)
        if self._destinations.pop(peer, None) is None:
            return
        self._letters.forget(peer)
        self._flows.forget(peer)
        for name in [
            n for n, link in self._links.items() if peer in {r.control_address for r in link.decode.ranks}
        ]:
            del self._links[name]
        fence(self._transport, peer)
        self.prober.lost(peer)
        for outgoing in list(self._outgoing.values()):
            if (
                peer in {rank.control_address for rank in outgoing.link.decode.ranks}
                and not outgoing.finished
            ):
                outgoing.asked.discard(peer)
                error = PeerLostError(f"lost decode rank {peer} of group {outgoing.ticket.group!r}")
                self._stop(outgoing, str(error))
                self._fail(outgoing.key, outgoing.ticket.number, error)

    # --- TransferAgent

    def on_operation(self, operation: Operation) -> None:
        """A segment or its notice has left: its staging is free again. Or it failed, and its request with it."""
        if self._letters.ended(operation) or self.prober.ended(operation):
            return
        item = self._notices.ended(operation) or operation.context
        if not isinstance(item, Item):
            return
        outgoing = item.outgoing
        if operation.state is OperationState.DONE:
            self._left(item)
            if item.lease is not None:  # what a notice tells of has been recorded as written
                self._timeline.record(
                    "send", self._lane, str(outgoing.key), item.sending_s, self._clock(), item.segment.nbytes
                )
        else:
            item.state = State.DROPPED
            error = operation.error or PeerLostError("the send failed")
            if outgoing.closing and item.peer in self._destinations:  # it was told that this segment comes
                self._end_for(outgoing, item.peer, str(error))
            self._stop(outgoing, str(error))
            self._fail(outgoing.key, outgoing.ticket.number, error)
            if item.peer not in self._destinations and item.lease is not None:
                self._quarantine(item, item.lease)
        self._release(item)
        self._pump()

    def on_arrival(self, arrival: Arrival) -> None:
        """Takes letters. Nobody sends data to a prefill rank: consumed and counted."""
        if not self._letters.arrived(arrival):
            self._stale += 1
            self._transport.discard(None, arrival)

    def poll(self, now_s: float) -> float:
        """Sends what has been gathered, tells of what was written; asks to be called again soon meanwhile."""
        self._exposed.look(now_s)
        for item in self._copying:
            if not self._begun(item, now_s):
                break  # the queue runs in order: what is behind has not begun either
        self._send_copied()
        if self._quarantined and self._quarantined[0][0] <= now_s:
            self._allocator.free(self._quarantined.popleft()[1].id)
            self._pump()
        if self._unanswered and self._unanswered[0][0] <= now_s:
            self._forget_answered()
            self._expire(now_s)
        probe_s = self.prober.poll(now_s)
        return DEVICE_POLL_S if self._copying or self._exposed else min(IDLE_S, probe_s)

    # --- moving one segment on

    def _ask(self, outgoing: Outgoing, peer: str, items: list[Item]) -> None:
        outgoing.messages += 1
        self._unanswered.append((self._clock() + self._lease_timeout_s, items))
        segments = [item.segment for item in items]
        self._letters.send(peer, m.LeaseRequest(outgoing.key, outgoing.ticket.number, self._rank, segments))

    def _undelivered(self, peer: str, message: m.Message, error: TransportError) -> None:
        """A lease request did not reach its rank: no grant will come."""
        self.prober.undelivered(message, error)
        outgoing = self._outgoing.get(message.key) if isinstance(message, m.LeaseRequest) else None
        if outgoing is not None and not outgoing.closing:
            self._stop(outgoing, str(error))
            self._fail(outgoing.key, outgoing.ticket.number, error)

    def _forget_answered(self) -> None:
        while self._unanswered and not any(item.waits_for_lease for item in self._unanswered[0][1]):
            self._unanswered.popleft()

    def _expire(self, now_s: float) -> None:
        """Leases are granted at once: one that does not come for so long never will, for a letter is lost."""
        while self._unanswered and self._unanswered[0][0] <= now_s:
            items = self._unanswered.popleft()[1]
            item = next((item for item in items if item.waits_for_lease), None)
            if item is not None and not item.outgoing.closing:
                limit = f"{self._lease_timeout_s:g} s (transfer.lease_timeout_s)"
                error = TransportError(f"{item.peer} granted no lease for {item.segment} within {limit}")
                self._stop(item.outgoing, str(error))
                self._fail(item.outgoing.key, item.outgoing.ticket.number, error)

    def _maybe_sendable(self, item: Item) -> None:
        destination = self._destinations.get(item.peer)
        if item.computed and item.ring_start is not None and destination is not None:
            destination.add(item)

    def _pump(self) -> None:
        for destination in self._destinations.values():
            while item := destination.pop_writable():
                item.state = State.STAGED
                item.lease = self._allocator.assign(item.segment.nbytes, owner=item.outgoing.key)
                self._staged.append(item)
        while self._staged and self._may_gather(self._staged[0]):
            item = self._staged.popleft()
            if item.state is State.STAGED:
                self._try_copy(item)
                self._send_copied()  # the wire waits for nothing while more is launched

    def _send_copied(self) -> None:
        """Sends what has been gathered, tells of what was written."""
        while self._copying and is_done(self._copying[0].copied):
            self._copied(self._copying.popleft())

    def _may_gather(self, item: Item) -> bool:
        return item.lease is None or self._allocator.writable(item.lease)

    def _try_copy(self, item: Item) -> None:
        try:
            with self._queue.use():
                self._queue.after(item.after)
                if item.write is None:
                    self._gather(item)
                else:
                    self._write(item, item.write)
                item.copied = self._queue.mark()
        except Exception as exc:  # noqa: BLE001 - whatever a launch raises ends this request and no other
            item.state = State.DROPPED
            error = TransportError(f"the copy of {item.segment} failed: {exc}")
            self._stop(item.outgoing, str(error))
            self._fail(item.outgoing.key, item.outgoing.ticket.number, error)
            self._release(item)
        else:
            self._copying.append(item)

    def _gather(self, item: Item) -> None:
        item.state = State.GATHERING
        place = local_place(self._pool.buffer, item.outgoing.slots, item.segment, self._shard)
        gather(place.pool, place.slots, place.layers, place.heads, self._view(item))

    def _write(self, item: Item, write: Callable[[], None]) -> None:
        item.state, item.sending_s = State.SENDING, self._clock()
        write()

    def _prepare(self, items: Sequence[Item], pool: OpenPool, shard: Shard) -> None:
        """Before the compute is done: then a launch is all that is left to do."""
        outgoing = items[0].outgoing
        assert outgoing.target_slots is not None, "the ticket was opened for writes"
        try:
            for item in items:
                tokens = item.segment.tokens
                place = local_place(self._pool.buffer, outgoing.slots, item.segment, self._shard)
                at = tokens.shift(-outgoing.ticket.tokens.start)
                target = outgoing.target_slots[at.start : at.stop]
                item.write = pool.prepare(item.segment, outgoing.ticket, place, target, shard)
        except Exception as exc:  # noqa: BLE001 - whatever it is ends this request and no other
            error = TransportError(f"the write of {outgoing.key} cannot be prepared: {exc}")
            self._stop(outgoing, str(error))
            self._fail(outgoing.key, outgoing.ticket.number, error)

    def _begun(self, item: Item, now_s: float) -> bool:
        """Whether the device has come to the item's copy; before that it computes, and nothing is moved."""
        if item.started_s is None and is_done(item.after):
            item.started_s = now_s
            item.outgoing.busy.begin(now_s)
            item.flow.busy.begin(now_s)
        return item.started_s is not None

    def _copied(self, item: Item) -> None:
        now_s = self._clock()
        outgoing = item.outgoing
        self._begun(item, now_s)
        started_s = now_s if item.started_s is None else item.started_s
        name = "gather" if item.write is None else "write"
        self._timeline.record(name, self._lane, str(outgoing.key), started_s, now_s, item.segment.nbytes)
        tag = pack(outgoing.ticket.number, self._rank, item.segment.index)
        if item.write is not None:  # also when its request is ending: `SenderEnded` may have promised it
            self._notices.send(item.peer, tag, item.segment, context=item)
        elif outgoing.closing:
            item.state = State.DROPPED
            self._release(item)
        else:
            item.state, item.sending_s = State.SENDING, now_s
            self._transport.send(item.peer, tag, self._view(item), context=item)

    def _left(self, item: Item) -> None:
        item.state = State.SENT
        item.outgoing.nbytes += item.segment.nbytes
        self._segments_sent += 1
        self._bytes_sent += item.segment.nbytes
        self._segments_written += item.write is not None
        item.flow.nbytes += item.segment.nbytes
        item.flow.segments += 1

    def _release(self, item: Item) -> None:
        """Frees the item's staging: its send has ended, or it will not be sent."""
        if item.lease is not None:
            self._allocator.free(item.lease.id)
            item.lease = None
        outgoing = item.outgoing
        if item.started_s is not None:
            now_s = self._clock()
            outgoing.busy.end(now_s)
            item.flow.busy.end(now_s)
        outgoing.left -= 1
        self._maybe_finished(outgoing)
        self._maybe_closed(outgoing)

    def _quarantine(self, item: Item, lease: Lease) -> None:
        """Keeps the region for a while: a peer that only was silent may still read it, and believe the bytes."""
        self._quarantined.append((self._clock() + self._quarantine_s, lease))
        item.lease = None

    def _view(self, item: Item) -> torch.Tensor:
        assert item.lease is not None, "a segment that is gathered or sent holds staging"
        return self._buffer.view(self._allocator.offset(item.lease), item.segment.nbytes)

    # --- ending

    def _maybe_finished(self, outgoing: Outgoing) -> None:
        if (
            outgoing.finished or not outgoing.whole
        ):  # also at its end: the answer may be quicker than the last send
            return
        outgoing.finished = True
        now_s = self._clock()
        self._exposed.finished(outgoing, now_s)
        self._to_leader(
            m.RankSent(
                outgoing.key,
                outgoing.ticket.number,
                self._rank,
                outgoing.nbytes,
                outgoing.sent,
                outgoing.messages,
                outgoing.busy.total_s(now_s),
            )
        )

    def _stop(self, outgoing: Outgoing, reason: str) -> None:
        """Drops what was not gathered yet and tells every asked peer what it may still expect. Once."""
        if outgoing.closing:
            return
        outgoing.closing = True
        for item in outgoing.items.values():
            if item.state in (State.PLANNED, State.STAGED):
                item.state = State.DROPPED
                self._release(item)
        if not outgoing.finished:
            for peer in outgoing.asked:
                self._end_for(outgoing, peer, reason)
        self._pump()

    def _end_for(self, outgoing: Outgoing, peer: str, reason: str) -> None:
        outgoing.messages += 1
        sent = outgoing.sent_to(peer)
        self._send(peer, m.SenderEnded(outgoing.key, outgoing.ticket.number, self._rank, sent, reason))

    def _maybe_closed(self, outgoing: Outgoing) -> None:
        if (
            outgoing.leader_asked
            and outgoing.left == 0
            and self._outgoing.pop(outgoing.key, None) is not None
        ):
            self._to_leader(m.RankClosed(outgoing.key, outgoing.ticket.number, self._rank))

    def _fail(self, key: RequestKey, ticket: int, error: DisaggError) -> None:
        log.warning("transfer_failed", request=str(key), error=str(error))
        self._failed += 1
        self._to_leader(m.RankFailed(key, ticket, self._rank, error.code, str(error)))

    # --- looking in

    def statistics(self) -> SenderStatistics:
        """Counts at this moment."""
        items = [item for o in self._outgoing.values() for item in o.items.values()]
        quarantined = sum(lease.nbytes for _, lease in self._quarantined)
        return SenderStatistics(
            tickets=len(self._outgoing),
            under_way=sum(item.lease is not None for item in items),
            staging_in_use_bytes=self._allocator.statistics().in_use_bytes - quarantined,
            quarantined_bytes=quarantined,
            segments_sent=self._segments_sent,
            bytes_sent=self._bytes_sent,
            segments_written=self._segments_written,
            open_pools=len(self._pools),
            refused_pools=self._refused_pools,
            stale=self._stale,
        )

    def status(self) -> RankStatus:
        """For metrics; cheap."""
        return RankStatus(
            self._lane,
            self._rank,
            device_name(self._pool.buffer.device),
            staging_bytes=self._staging_bytes,
            staging_used_bytes=min(self._allocator.in_use_bytes, self._staging_bytes),
            routes=self._flows.statuses(self._clock(), self._path_to),
            exposed_s_total=self._exposed.total_s,
            faults_total=self._failed,
        )

    def _path_to(self, peer: str) -> Path:
        return "staged" if self._pools.of(peer) is None else "peer"

    def check(self) -> None:
        """Raises `InvariantError` unless staging is held by exactly the segments under way and a probe."""
        self._allocator.check()
        held = sum(item.lease is not None for o in self._outgoing.values() for item in o.items.values())
        leases, quarantined = self._allocator.statistics().leases, len(self._quarantined)
        if held + quarantined + self.prober.leases != leases:
            raise InvariantError(
                f"{held} segments and {self.prober.leases} probes hold staging, {quarantined} regions wait; "
                f"leases: {leases}"
            )
        for outgoing in self._outgoing.values():
            left = sum(i.state not in (State.SENT, State.DROPPED) for i in outgoing.items.values())
            if left != outgoing.left:
                raise InvariantError(
                    f"{outgoing.key}: {left} segments are under way, counted {outgoing.left}"
                )
