"""Segments that come through the ring: received into their leases, scattered into pages, counted."""

from __future__ import annotations

from collections import deque

from decode_node.incoming import Incoming, Item, State, local
from decode_node.repairs import Repairs
from decode_node.ring import Ring
from decode_node.tickets import Tickets
from disagg.core.errors import ProtocolError, TransportError
from disagg.core.ports import Clock
from disagg.core.timeline import Timeline
from disagg.core.types import Shard
from disagg.kv.pool import KVPool
from disagg.node.device import DeviceQueue, is_done
from disagg.node.sums import Sums
from kernels.scatter import scatter
from staging.trailer import trailer
from transport.base import Arrival, Operation, OperationState, Transport


class Landing:
    """One decode rank's. Owned by the transfer thread."""

    def __init__(
        self,
        shard: Shard,
        pool: KVPool,
        queue: DeviceQueue,
        sums: Sums | None,
        ring: Ring,
        tickets: Tickets,
        repairs: Repairs,
        transport: Transport,
        timeline: Timeline,
        lane: str,
        clock: Clock,
    ) -> None:
        """`sums` is None where segments have no checksums."""
        self._shard, self._pool, self._queue, self._sums = shard, pool, queue, sums
        self._ring, self._tickets, self._repairs, self._transport = ring, tickets, repairs, transport
        self._timeline, self._lane, self._clock = timeline, lane, clock
        self.scattering: deque[Item] = deque()
        """Items whose scatter is on the device, in the queue's order; each holds its lease and its word until that is
        done.
        """

    def arrived(self, incoming: Incoming, item: Item, arrival: Arrival) -> None:
        """A segment that is waited for is here: receives it, if it is what was announced."""
        if not self._ring.allocator.writable(item.lease) or arrival.nbytes != item.lease.nbytes:
            self._transport.discard(item.peer, arrival)
            self._tickets.fail(
                incoming, ProtocolError(f"{item.segment} came too early, or with {arrival.nbytes} bytes")
            )
            self._ring.drop(item)
            return
        item.state, item.started_s = State.RECEIVING, self._clock()
        self._transport.receive(item.peer, arrival, self._ring.view(item), context=item)

    def ended(self, item: Item, operation: Operation) -> None:
        """A receive ended: its bytes go to their pages, unless the request is over."""
        incoming = item.incoming
        if operation.state is OperationState.FAILED:
            self._tickets.fail(incoming, operation.error or TransportError("the receive failed"))
            self._ring.drop(item)
        elif incoming.closing or incoming.failed:
            self._ring.drop(item)
        else:
            self._record("receive", item)
            self._scatter(item)

    def poll(self) -> None:
        """Lands what has been scattered. Needed only while something is `scattering`."""
        while self.scattering and is_done(self.scattering[0].scattered):
            item = self.scattering.popleft()
            self._record("scatter", item)
            if self._fits(item):
                item.state = State.LANDED
                self._tickets.count(item.incoming, item.segment)
                self._ring.free(item)
                self._tickets.maybe_closed(item.incoming)
            elif self._repairs.ask(item.incoming, item.segment, item.again, "in the ring"):
                self._ring.wait_again(item)
            else:
                self._ring.drop(item)

    def _fits(self, item: Item) -> bool:
        """Whether the checksum fits what was scattered; true where there is none."""
        word, item.word = item.word, None
        if word is None or self._sums is None:
            return True
        difference = word.value
        self._sums.give(word)
        return difference == 0

    def _scatter(self, item: Item) -> None:
        item.state, item.started_s = State.SCATTERING, self._clock()
        incoming, segment = item.incoming, item.segment
        try:
            at = segment.tokens.shift(-incoming.ticket.tokens.start)
            slots = incoming.slots[at.start : at.stop]
            pool = self._pool.parts[self._shard.part_of(segment.layers)].buffer
            message, check = self._ring.view(item), None
            if self._sums is not None:
                item.word = self._sums.take()
                number = incoming.ticket.number
                check = self._sums.check(segment, number, item.word.memory, less=trailer(message))
            with self._queue.use():
                scatter(message[: segment.nbytes], pool, slots, *local(segment, self._shard), check)
            item.scattered = self._queue.mark()
        except Exception as exc:  # noqa: BLE001 - whatever a launch raises ends this request and no other
            self._fits(item)  # gives the word back
            self._tickets.fail(incoming, TransportError(f"the scatter of {segment} failed: {exc}"))
            self._ring.drop(item)
        else:
            self.scattering.append(item)

    def _record(self, name: str, item: Item) -> None:
        key, nbytes = str(item.incoming.key), item.segment.nbytes
        self._timeline.record(name, self._lane, key, item.started_s, self._clock(), nbytes)
