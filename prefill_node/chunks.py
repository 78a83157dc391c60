"""Tracks planned prompt chunks: cuts them into segments, and starts the copies of each computed layer group."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.core.errors import TransportError
from disagg.core.types import RankInfo, RequestKey, Segment, Span
from disagg.node.device import DeviceEvent
from prefill_node.cutter import Cutter
from prefill_node.direct import NO_LIMIT
from prefill_node.early import EarlyChunks, ReadyLayers
from prefill_node.flows import Flows
from prefill_node.leases import Leases
from prefill_node.mover import SegmentMover
from prefill_node.outgoing import OutgoingSegment, OutgoingTransfer
from prefill_node.peer_pools import PeerPools
from prefill_node.send_state import SendState
from prefill_node.step_part import PlannedChunk, StepPart
from prefill_node.tickets import OutgoingTickets
from staging.planner import cut_tails
from staging.trailer import message_bytes

CHECKED_TAIL_BYTES = 64 << 20
"""Size of a prompt's last segment, for direct writes with checksums. A decode rank verifies each segment after
its write. No later write hides the verification of the last segment, so a small one ends the transfer sooner."""


class Chunks:
    """Planned chunks of one prefill rank. Owned by the transfer thread."""

    def __init__(
        self,
        rank: int,
        cutter: Cutter,
        tickets: OutgoingTickets,
        leases: Leases,
        pools: PeerPools,
        mover: SegmentMover,
        flows: Flows,
    ) -> None:
        self._rank, self._cutter, self._tickets, self._leases = rank, cutter, tickets, leases
        self._pools, self._mover, self._flows = pools, mover, flows
        self._uncomputed: dict[StepPart, list[OutgoingSegment]] = {}
        """Segments whose layers are not computed yet, by part of a step."""
        self.early = EarlyChunks()
        """Chunks whose tickets have not arrived."""

    @property
    def uncomputed(self) -> bool:
        """True while layers of a planned segment are not computed."""
        return bool(self._uncomputed)

    def plan(self, chunk: PlannedChunk) -> None:
        """Cuts a chunk into segments, and requests leases or prepares direct writes for the segments.

        An early chunk is stored until its ticket arrives. A chunk of an earlier page reservation, or of a refused
        ticket, is ignored.
        """
        outgoing = self._tickets.open.get(chunk.key)
        if outgoing is None and chunk.early:
            self.early.add(chunk)
        elif outgoing is not None and outgoing.reservation == chunk.reservation:
            self._plan(outgoing, chunk)

    def opened(self, outgoing: OutgoingTransfer) -> None:
        """Cuts the early chunks of a newly opened ticket and sends their computed layers."""
        for chunk, ready in self.early.take(outgoing.key, outgoing.reservation):
            self._plan(outgoing, chunk)
            for one in ready:
                self._move(chunk.part, one)

    def drop_early(self, key: RequestKey, reservation: int) -> None:
        """Drops the early chunks of a reservation that ended before a ticket arrived."""
        self.early.take(key, reservation)

    def check(self) -> None:
        """Raises `InvariantError` if the chunks without a ticket are inconsistent."""
        self.early.check()

    def _plan(self, outgoing: OutgoingTransfer, chunk: PlannedChunk) -> None:
        if outgoing.stopped:
            return
        tokens = chunk.positions.intersect(Span(outgoing.ticket.tokens.start, outgoing.end))
        segments = self._cut(outgoing, tokens, chunk.awaited)
        outgoing.planned_to = max(outgoing.planned_to, tokens.stop)
        written: list[tuple[list[OutgoingSegment], RankInfo]] = []
        for peer in outgoing.link.destinations_of(self._rank):
            items = self._items(outgoing, peer, segments)
            if not items:
                continue
            outgoing.add(peer.rank, items)
            self._uncomputed.setdefault(chunk.part, []).extend(items)
            if peer.control_address in outgoing.direct:
                written.append((items, peer))
            else:
                self._leases.request(outgoing, peer.control_address, items)
                if outgoing.stopped:  # the request could not be sent
                    return
        for items, peer in written:
            if not outgoing.stopped:
                self._prepare(items, peer)
        self._tickets.report_if_sent(outgoing)

    def layers_ready(self, part: StepPart, layers: Span, event: DeviceEvent) -> None:
        """Starts the copies of a step part's segments in `layers`, whose KV is written when `event` is done.

        `layers` is numbered over the whole model and begins at the first layer of a layer class. Each later call for
        the class covers more layers.
        """
        ready = ReadyLayers(layers, event)
        self.early.layers_ready(part, ready)
        self._move(part, ready)

    def _move(self, part: StepPart, computed: ReadyLayers) -> None:
        layers, event = computed
        items = self._uncomputed.get(part, ())
        ready = [item for item in items if layers.covers(item.segment.layers)]
        if not ready:
            return
        if len(ready) == len(items):
            del self._uncomputed[part]
        else:
            self._uncomputed[part] = [item for item in items if not layers.covers(item.segment.layers)]
        for item in ready:
            item.computed, item.after = True, event
            item.outgoing.uncomputed -= 1
        self._tickets.computed({item.outgoing for item in ready}, event)
        for item in ready:
            if item.write is None:
                self._leases.computed(item)
            elif item.state is SendState.PLANNED:
                self._mover.launch(item)
        self._mover.pump()

    def _cut(self, outgoing: OutgoingTransfer, tokens: Span, awaited: bool) -> Sequence[Segment]:
        link, stop = outgoing.link, outgoing.ticket.tokens.stop
        peers = link.destinations_of(self._rank)
        unstaged = {peer.rank: NO_LIMIT for peer in peers if peer.control_address in outgoing.direct}
        if tokens.start >= stop:
            return self._cutter.cut_state(link, tokens, unstaged, first_index=len(outgoing.items))
        starts, first_index = outgoing.ticket.starts, len(outgoing.items)
        segments = self._cutter.cut(
            link, tokens, unstaged, first_index=first_index, starts=starts, awaited=awaited
        )
        if link.checked and unstaged and tokens.stop == stop:
            return cut_tails(segments, unstaged, CHECKED_TAIL_BYTES)
        return segments

    def _items(
        self, outgoing: OutgoingTransfer, peer: RankInfo, segments: Sequence[Segment]
    ) -> list[OutgoingSegment]:
        name, checked = peer.control_address, outgoing.link.checked
        flow = self._flows.of(name, "peer" if name in outgoing.direct else "staged")
        return [
            OutgoingSegment(outgoing, segment, name, flow, message_bytes(segment.nbytes, checked))
            for segment in segments
            if segment.dst_rank == peer.rank
        ]

    def _prepare(self, items: Sequence[OutgoingSegment], peer: RankInfo) -> None:
        outgoing = items[0].outgoing
        try:
            self._pools.prepare(items, outgoing.direct[peer.control_address], peer.shard)
        except Exception as exc:  # noqa: BLE001 - any failure ends this request only
            error = TransportError(f"the write of {outgoing.key} cannot be prepared: {exc}")
            self._tickets.abort(outgoing, error)
