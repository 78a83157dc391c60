"""Requests leases in the rings of decode ranks, and releases a segment for sending when its ring has free space."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

from disagg.core.errors import ProtocolError, TransportError
from disagg.core.ports import Clock
from prefill_node.outgoing import OutgoingSegment, OutgoingTransfer
from prefill_node.send_state import SendState
from prefill_node.tickets import OutgoingTickets
from staging.allocator import is_writable
from transport.control import messages as m


class PeerRing:
    """State of a decode rank's ring as of its latest watermark, and the segments that wait for free ring space."""

    def __init__(self) -> None:
        self.watermark = 0
        self.ring_bytes = 0
        self._waiting: list[tuple[int, int, OutgoingSegment]] = []
        self._order = itertools.count()

    def update(self, watermark: int, ring_bytes: int) -> None:
        """Applies a watermark; an older one changes nothing."""
        self.watermark = max(self.watermark, watermark)
        self.ring_bytes = ring_bytes

    def add(self, item: OutgoingSegment) -> None:
        """Adds a segment that is leased and computed."""
        assert item.ring_start is not None, "only leased segments wait for the watermark"
        heapq.heappush(self._waiting, (item.ring_start, next(self._order), item))

    def pop_writable(self) -> OutgoingSegment | None:
        """Removes and returns the segment with the oldest lease, if the ring can receive the segment now; else None.

        Dropped segments are removed and not returned.
        """
        while self._waiting:
            start, _, item = self._waiting[0]
            planned = item.state is SendState.PLANNED
            if planned and not is_writable(start + item.message_bytes, self.watermark, self.ring_bytes):
                return None
            heapq.heappop(self._waiting)
            if planned:
                return item
        return None


class Leases:
    """Requests and records the leases of one prefill rank. Owned by the transfer thread.

    The decode rank frees the ring space of a lease. A lease request is an active message and may be lost: if a grant
    does not arrive within `timeout_s`, the request fails.
    """

    def __init__(
        self,
        rank: int,
        tickets: OutgoingTickets,
        send_active_message: Callable[[str, m.Message], None],
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self._rank, self._tickets, self._send_active_message = rank, tickets, send_active_message
        self._timeout_s, self._clock = timeout_s, clock
        self.rings: dict[str, PeerRing] = {}
        """Rings of the connected decode ranks, by control address."""
        self._unanswered: deque[tuple[float, list[OutgoingSegment]]] = deque()
        """Deadline and segments of each lease request."""
        self.due_s = math.inf
        """Deadline of the oldest lease request without a grant: `expire` must be called then."""
        self.stale = 0
        """Number of dropped messages: of unknown ranks, or for unknown tickets and segments."""

    def request(self, outgoing: OutgoingTransfer, peer: str, items: list[OutgoingSegment]) -> None:
        """Requests ring space for segments of a chunk that is about to be computed.

        A lease request too large for one message fails the transfer.
        """
        outgoing.messages += 1
        self._unanswered.append((self._clock() + self._timeout_s, items))
        self.due_s = self._unanswered[0][0]
        segments = [item.segment for item in items]
        try:
            self._send_active_message(
                peer, m.LeaseRequest(outgoing.key, outgoing.ticket.number, self._rank, segments)
            )
        except ProtocolError as exc:
            self._tickets.abort(outgoing, exc)

    def computed(self, item: OutgoingSegment) -> None:
        """Records that a segment's compute is queued on the device. If the segment's lease is granted, queues the
        segment for the destination's ring."""
        ring = self.rings.get(item.peer)
        if item.ring_start is not None and ring is not None:
            ring.add(item)

    def on_grant(self, peer: str, grant: m.LeaseGrant) -> None:
        """Applies granted leases. A repeated grant changes nothing."""
        ring, outgoing = self.rings.get(peer), self._tickets.find(grant.key, grant.ticket)
        if ring is None or outgoing is None:
            self.stale += 1
            return
        ring.update(grant.watermark, grant.ring_bytes)
        for index, start in grant.starts:
            item = outgoing.items.get((grant.dst_rank, index))
            if item is None or item.ring_start is not None:
                self.stale += 1
                continue
            item.ring_start = start
            if item.computed:
                self.computed(item)
        self._forget_answered()

    def on_watermark(self, peer: str, message: m.Watermark) -> None:
        """Applies the watermark of a decode rank's ring."""
        ring = self.rings.get(peer)
        if ring is None:
            self.stale += 1
        else:
            ring.update(message.watermark, message.ring_bytes)

    def undelivered(self, message: m.Message, error: TransportError) -> None:
        """Fails the transfer of a lease request that could not be delivered."""
        outgoing = self._tickets.open.get(message.key) if isinstance(message, m.LeaseRequest) else None
        if outgoing is not None and not outgoing.stopped:
            self._tickets.abort(outgoing, error)

    def expire(self, now_s: float) -> None:
        """Fails transfers whose leases were not granted in time.

        A decode rank grants at once, so the request or the grant was lost.
        """
        self._forget_answered()
        while self._unanswered and self._unanswered[0][0] <= now_s:
            items = self._unanswered.popleft()[1]
            item = next((item for item in items if item.waits_for_lease), None)
            if item is not None and not item.outgoing.stopped:
                limit = f"{self._timeout_s:g} s (transfer.lease_timeout_s)"
                error = TransportError(f"{item.peer} granted no lease for {item.segment} within {limit}")
                self._tickets.abort(item.outgoing, error)
        self.due_s = self._unanswered[0][0] if self._unanswered else math.inf

    def _forget_answered(self) -> None:
        while self._unanswered and not any(item.waits_for_lease for item in self._unanswered[0][1]):
            self._unanswered.popleft()
        self.due_s = self._unanswered[0][0] if self._unanswered else math.inf
