"""Receives segments into their ring leases, scatters them into pages, and verifies and counts them."""

from __future__ import annotations

import math
from collections import deque

from decode_node.incoming import IncomingSegment, IncomingTransfer, pool_slice
from decode_node.options import ReceiverContext
from decode_node.receive_state import SegmentEvent
from decode_node.repairs import Repairs
from decode_node.ring import ReceiveRing
from decode_node.tickets import IncomingTickets
from disagg.core.errors import ProtocolError, TransportError
from disagg.node.device import DeviceQueue, is_done
from disagg.node.sums import Sums
from disagg.node.transfer_loop import YIELD_LIMIT_S
from kernels.copy.scatter import scatter
from staging.trailer import trailer
from transport.base import Arrival, Operation, OperationState


class Landing:
    """Receives and scatters the segments of one decode rank. Owned by the transfer thread."""

    def __init__(
        self,
        context: ReceiverContext,
        queue: DeviceQueue,
        sums: Sums | None,
        ring: ReceiveRing,
        tickets: IncomingTickets,
        repairs: Repairs,
    ) -> None:
        """`sums`: source of the checksum words; None where segments have no checksums."""
        self._shard, self._pool, self._queue, self._sums = context.shard, context.pool, queue, sums
        self._ring, self._tickets, self._repairs = ring, tickets, repairs
        self._context, self._transport, self._clock = context, context.transport, context.clock
        self.scattering: deque[IncomingSegment] = deque()
        """Segments whose scatter is launched, in the order of the device queue. Each segment holds its lease and its
        checksum word until the scatter is done."""
        self._receiving = 0
        """Number of receives under way."""
        self._begun_s = -math.inf
        """Time of the latest receive or scatter."""

    def arrived(self, incoming: IncomingTransfer, item: IncomingSegment, arrival: Arrival) -> None:
        """Receives an expected segment, if its message has the announced size and its lease is writable."""
        if not self._ring.allocator.writable(item.lease) or arrival.nbytes != item.lease.nbytes:
            self._transport.discard(item.peer, arrival)
            error = f"{item.segment} arrived before its ring space was free, or with {arrival.nbytes} bytes"
            self._tickets.fail(incoming, ProtocolError(f"{error} instead of {item.lease.nbytes}"))
            self._ring.advance(item, SegmentEvent.REJECTED)
            return
        self._ring.advance(item, SegmentEvent.ARRIVED)
        item.started_s = self._begun_s = self._clock()
        self._receiving += 1
        self._transport.receive(item.peer, arrival, self._ring.view(item), context=item)

    def ended(self, item: IncomingSegment, operation: Operation) -> None:
        """Scatters a received segment to its pages, unless the receive failed or the request is over."""
        self._receiving -= 1
        if operation.state is OperationState.FAILED:
            self._tickets.fail(item.incoming, operation.error or TransportError("the receive failed"))
            self._ring.advance(item, SegmentEvent.RECEIVE_FAILED)
        elif item.incoming.over:
            self._ring.advance(item, SegmentEvent.RECEIVED_VOID)
        else:
            self._record("receive", item)
            self._ring.advance(item, SegmentEvent.RECEIVED)
            self._scatter(item)

    def ends_soon(self, now_s: float) -> bool:
        """Returns whether a receive or scatter is under way that has begun within the last `YIELD_LIMIT_S`."""
        return bool(self._receiving or self.scattering) and now_s - self._begun_s < YIELD_LIMIT_S

    def poll(self) -> None:
        """Verifies and counts segments whose scatter is done. The caller polls while `scattering` is not empty."""
        while self.scattering and is_done(self.scattering[0].scattered):
            item = self.scattering.popleft()
            self._record("scatter", item)
            if self._matches(item):
                event = SegmentEvent.VERIFIED
            elif self._repairs.request(item.incoming, item.segment, item.again, "in the ring"):
                event = SegmentEvent.DAMAGED
            else:
                event = SegmentEvent.ABANDONED
            self._ring.advance(item, event)

    def _matches(self, item: IncomingSegment) -> bool:
        """Frees the segment's checksum word; returns True if the checksum matches or segments have no checksums."""
        word, item.word = item.word, None
        if word is None or self._sums is None:
            return True
        difference = word.value
        self._sums.give(word)
        return difference == 0

    def _scatter(self, item: IncomingSegment) -> None:
        item.started_s = self._begun_s = self._clock()
        incoming, segment = item.incoming, item.segment
        try:
            rows = pool_slice(segment, incoming, self._shard, self._pool)
            message, check = self._ring.view(item), None
            if self._sums is not None:
                item.word = self._sums.take()
                number = incoming.ticket.number
                check = self._sums.check(segment, number, item.word.memory, less=trailer(message))
            with self._queue.use():
                scatter(message[: segment.nbytes], *rows, check)
            item.scattered = self._queue.record_event()
        except Exception as exc:  # noqa: BLE001 - a failed launch ends this request only
            self._matches(item)  # frees the word
            self._tickets.fail(incoming, TransportError(f"the scatter of {segment} failed: {exc}"))
            self._ring.advance(item, SegmentEvent.LAUNCH_FAILED)
        else:
            self.scattering.append(item)

    def _record(self, name: str, item: IncomingSegment) -> None:
        key, nbytes = str(item.incoming.key), item.segment.nbytes
        self._context.timeline.record(name, self._context.lane, key, item.started_s, self._clock(), nbytes)
