"""Chunks on their way through the compute: cut into segments before, which move on as their layers are written."""

from __future__ import annotations

from disagg.core.errors import TransportError
from disagg.core.ports import Clock
from disagg.core.types import RequestKey, Shard, Span
from disagg.node.device import Marker
from prefill_node.cutter import Cutter
from prefill_node.direct import NO_LIMIT, OpenPool
from prefill_node.flows import Exposed, Flows
from prefill_node.leases import Leases
from prefill_node.mover import SegmentMover
from prefill_node.outgoing import Item, State
from prefill_node.peer_pools import PeerPools
from prefill_node.tickets import Tickets
from staging.trailer import message_bytes


class Chunks:
    """One prefill rank's. Owned by the transfer thread."""

    def __init__(
        self,
        rank: int,
        cutter: Cutter,
        tickets: Tickets,
        leases: Leases,
        pools: PeerPools,
        mover: SegmentMover,
        flows: Flows,
        exposed: Exposed,
        clock: Clock,
    ) -> None:
        self._rank, self._cutter, self._tickets, self._leases = rank, cutter, tickets, leases
        self._pools, self._mover, self._flows, self._exposed = pools, mover, flows, exposed
        self._clock = clock
        self._steps: dict[int, list[Item]] = {}
        """Segments whose layers are not computed, by the step that computes them."""

    def plan(self, step: int, key: RequestKey, chunk: Span) -> None:
        """Cuts positions `chunk`, which step `step` is about to compute; asks for leases and prepares writes."""
        outgoing = self._tickets.open.get(key)
        if outgoing is None or outgoing.closing:
            return
        tokens = chunk.intersect(outgoing.ticket.tokens)
        peers = outgoing.link.destinations_of(self._rank)
        unstaged = {p.rank: NO_LIMIT for p in peers if p.control_address in outgoing.direct}
        segments = self._cutter.cut(outgoing.link, tokens, unstaged, first_index=len(outgoing.items))
        outgoing.planned_to = max(outgoing.planned_to, tokens.stop)
        written: list[tuple[list[Item], OpenPool, Shard]] = []
        for peer in peers:
            name = peer.control_address
            pool = outgoing.direct.get(name)
            flow = self._flows.of(name, "staged" if pool is None else "peer")
            checked = outgoing.link.checked
            items = [
                Item(outgoing, s, name, flow, message_bytes(s.nbytes, checked))
                for s in segments
                if s.dst_rank == peer.rank
            ]
            if items:
                outgoing.add(peer.rank, items)
                self._steps.setdefault(step, []).extend(items)
                if pool is None:
                    self._leases.ask(outgoing, name, items)
                    if outgoing.closing:  # they could not be asked for
                        return
                else:
                    written.append((items, pool, peer.shard))
        for each in written:  # behind the letters, whose answers take their time
            if not outgoing.closing:
                self._prepare(*each)
        self._tickets.maybe_sent(outgoing)

    def layers_ready(self, step: int, layers: Span, marker: Marker) -> None:
        """The KV of `layers` (global) of step `step` is written once `marker` is done on the device.

        They begin with the first of a class: its layers are computed in order, and this is said again as they are.
        """
        waiting: list[Item] = []
        ready: list[Item] = []
        for item in self._steps.pop(step, []):
            (ready if layers.covers(item.segment.layers) else waiting).append(item)
        for item in ready:
            item.computed, item.after = True, marker
            item.outgoing.uncomputed -= 1
        self._exposed.computed({item.outgoing for item in ready}, marker, self._clock())
        for item in ready:
            if item.write is None:
                self._leases.computed(item)
            elif item.state is State.PLANNED:
                self._mover.launch(item)
        if waiting:
            self._steps[step] = waiting
        self._mover.pump()

    def _prepare(self, items: list[Item], pool: OpenPool, shard: Shard) -> None:
        try:
            self._pools.prepare(items, pool, shard)
        except Exception as exc:  # noqa: BLE001 - whatever it is ends this request and no other
            outgoing = items[0].outgoing
            error = TransportError(f"the write of {outgoing.key} cannot be prepared: {exc}")
            self._tickets.abort(outgoing, error)
