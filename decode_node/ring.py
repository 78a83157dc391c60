"""A decode rank's ring: grants leases for announced segments, and sends watermarks when space becomes free.

A region is reused only when neither a receive nor a kernel can access it. Usually the receive has ended and the
scatter is done. A region without a receive is freed when its sender has reported that no send follows, or is fenced.
A probe takes and frees its own region (`decode_node.probe`).
"""

from __future__ import annotations

from collections import deque

import torch

from decode_node.incoming import IncomingSegment, IncomingTransfer
from decode_node.messages import ReceiverMessages
from decode_node.options import ReceiverContext, ReceiverOptions
from decode_node.receive_state import Action, ReceiveState, SegmentEvent
from decode_node.tickets import IncomingTickets
from disagg.core.errors import InvariantError, ProtocolError, TransportError
from disagg.core.types import Segment
from staging.allocator import Lease, StagingAllocator
from staging.buffer import StagingBuffer
from staging.trailer import message_bytes
from transport.control import messages as m


class ReceiveRing:
    """The receive ring of a decode rank: its device memory and its leases. Owned by the transfer thread."""

    def __init__(
        self,
        options: ReceiverOptions,
        context: ReceiverContext,
        tickets: IncomingTickets,
        messages: ReceiverMessages,
    ) -> None:
        self._options, self._context, self._tickets = options, context, tickets
        self._rank, self._clock, self._messages = context.rank, context.clock, messages
        self.buffer = StagingBuffer(options.ring_bytes, context.pool.device)
        self.allocator = StagingAllocator(options.ring_bytes)
        self._waiting: deque[IncomingSegment] = deque()
        """Segments whose lease was not writable at the grant; a segment leaves when the watermark is sent to its
        sender."""
        self._ended_waits_s = 0.0
        self._head_lease, self._head_since_s = -1, 0.0
        self.due_s = 0.0
        """Time at which `maintain` must be called."""
        self.watermarks = self.repeats = self.expired = self.stale = 0

    # --- leases

    def on_lease_request(self, peer: str, request: m.LeaseRequest) -> None:
        """Grants ring space. A repeated request gets the same leases."""
        incoming = self._tickets.open.get(request.ticket)
        source = incoming.sources.get(request.src_rank) if incoming is not None else None
        if source is not None and source.ended:
            self.stale += 1  # `SenderEnded` came over the control channel and overtook this active message
            return
        if incoming is None or incoming.key != request.key or incoming.over:
            self.stale += 1
            reason = "the decode side has ended this request"
            self._context.send(peer, m.StopSending(request.key, request.ticket, reason))
            return
        try:
            if source is None or source.peer != peer:
                raise ProtocolError(f"{peer} is not prefill rank {request.src_rank} of {incoming.key}")
            items = [self._lease(incoming, peer, request.src_rank, segment) for segment in request.segments]
        except TransportError as exc:
            self._tickets.fail(incoming, exc)
            return
        except (ProtocolError, ValueError) as exc:
            self._tickets.fail(incoming, ProtocolError(f"invalid lease request of {peer}: {exc}"))
            return
        starts = [(item.segment.index, item.lease.start) for item in items]
        ring = self.allocator
        grant = m.LeaseGrant(request.key, request.ticket, self._rank, starts, ring.size_bytes, ring.watermark)
        self._messages.send(peer, grant)
        for item in items:
            if item.waits_since_s is None and not ring.writable(item.lease):
                item.waits_since_s = self._clock()
                self._waiting.append(item)

    def _lease(
        self, incoming: IncomingTransfer, peer: str, src_rank: int, segment: Segment
    ) -> IncomingSegment:
        known = incoming.items.get((src_rank, segment.index))
        if known is not None:
            if known.segment != segment:
                raise ProtocolError(
                    f"segment {segment.index} is not {known.segment} of an earlier lease request"
                )
            return known
        if segment.src_rank != src_rank or segment.dst_rank != self._rank:
            raise ProtocolError(f"{segment} does not go from rank {src_rank} to rank {self._rank}")
        if incoming.coverage.is_early(
            segment
        ):  # a broken connection can lose a message and deliver the next one
            raise TransportError(f"a lease request of {peer} for a segment before {segment} was lost")
        incoming.coverage.add(segment)
        nbytes = message_bytes(segment.nbytes, self._options.checksum)
        lease = self.allocator.assign(nbytes, owner=incoming.ticket.number)
        item = IncomingSegment(incoming, segment, peer, lease)
        incoming.items[(src_rank, segment.index)] = item
        return item

    def view(self, item: IncomingSegment) -> torch.Tensor:
        """Returns the segment's region, uint8 `[lease.nbytes]`: the segment and, if checked, its checksum."""
        return self.buffer.view(self.allocator.offset(item.lease), item.lease.nbytes)

    def advance(self, item: IncomingSegment, event: SegmentEvent) -> None:
        """Applies the event to the segment, and performs the actions that follow."""
        for action in item.advance(event):
            match action:
                case Action.COUNT_LANDED:
                    self._tickets.count(item.incoming, item.segment)
                case Action.FREE_LEASE:
                    self._free(item)
                    self._tickets.maybe_closed(item.incoming)
                case Action.AWAIT_AGAIN:
                    self._await_again(item)

    def _await_again(self, item: IncomingSegment) -> None:
        """Keeps the lease for the resent segment and restarts the deadline. The lease stays writable until freed."""
        item.again = True
        if item.lease.id == self._head_lease:
            self._head_since_s = self._clock()

    def _free(self, item: IncomingSegment) -> None:
        """Frees the lease: no receive writes the region, and no kernel reads it."""
        self.allocator.free(item.lease.id)
        if self._waiting:
            self.send_watermarks()

    # --- watermarks and deadlines

    def send_watermarks(self) -> None:
        """Sends the watermark to the senders of newly writable leases, one message to each."""
        peers: set[str] = set()
        while self._waiting and (
            self._waiting[0].state is not ReceiveState.LEASED
            or self.allocator.writable(self._waiting[0].lease)
        ):
            item = self._waiting.popleft()
            self._ended_waits_s += self._clock() - (item.waits_since_s or 0.0)
            if item.state is ReceiveState.LEASED:
                peers.add(item.peer)
        for peer in peers:
            self.watermarks += 1
            self._messages.send(peer, self._watermark())

    def maintain(self, now_s: float) -> None:
        """Repeats watermarks, which may have been lost; fails a request that blocks the ring for too long."""
        self.due_s = now_s + self._options.watermark_interval_s
        leased = (item for incoming in self._tickets.open.values() for item in incoming.leased())
        for peer in {
            i.peer for i in leased if i.state is ReceiveState.LEASED and self.allocator.writable(i.lease)
        }:
            self.repeats += 1
            self._messages.send(peer, self._watermark())
        self._expire(now_s)

    def _watermark(self) -> m.Watermark:
        return m.Watermark(self._rank, self.allocator.watermark, self.allocator.size_bytes)

    def _expire(self, now_s: float) -> None:
        """Fails the request of the oldest lease if its segment is late, because later leases wait for the oldest."""
        oldest = self.allocator.oldest()
        if oldest is None or oldest.id != self._head_lease:
            self._head_lease, self._head_since_s = (oldest.id if oldest else -1), now_s
            return
        item = next((i for t in self._tickets.open.values() for i in t.leased() if i.lease is oldest), None)
        late = now_s - self._head_since_s > self._options.lease_timeout_s
        if item is not None and item.state is ReceiveState.LEASED and late and item.incoming.wanted:
            self.expired += 1
            limit = f"{self._options.lease_timeout_s:g} s (transfer.lease_timeout_s)"
            self._tickets.fail(item.incoming, TransportError(f"{item.segment} did not arrive within {limit}"))

    # --- state

    def waits_s(self, now_s: float) -> float:
        """Returns the total seconds that leases have waited to become writable, including leases that wait now."""
        return self._ended_waits_s + sum(now_s - (item.waits_since_s or 0.0) for item in self._waiting)

    def check(self, probe: Lease | None) -> None:
        """Raises `InvariantError` unless exactly the segments under way and a running probe hold leases."""
        self.allocator.check()
        held = {item.lease.id for incoming in self._tickets.open.values() for item in incoming.leased()}
        held |= {probe.id} if probe is not None else set()
        leased = {lease.id for lease in self.allocator.outstanding()}
        if held != leased:
            raise InvariantError(
                f"segments hold leases {sorted(held)}, the ring has granted {sorted(leased)}"
            )
