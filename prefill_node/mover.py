"""Moves segments that are computed: by a gather into staging and a send, or by one write into the decode rank's pool.

No deadlock: staging is taken only by segments that the destination can receive *now*, so whoever holds staging
moves on by itself; the oldest lease of a ring is always writable, and its segment waits for compute alone, which
never waits for the network.
"""

from __future__ import annotations

from collections import deque

from disagg.core.errors import PeerLostError, TransportError
from disagg.core.ports import Clock
from disagg.core.timeline import Timeline
from disagg.core.types import Shard
from disagg.kv.pool import KVPool
from disagg.node.device import DeviceQueue, is_done
from disagg.node.sums import Sums
from kernels.gather import gather
from kernels.quantize import gather_codes
from prefill_node.direct import codes_of, local_place
from prefill_node.leases import Leases
from prefill_node.outgoing import Item, State
from prefill_node.staging_space import StagingSpace
from prefill_node.tickets import Tickets
from staging.trailer import trailer
from transport.base import Operation, OperationState, Transport
from transport.notices import Notices, Written
from transport.tags import pack


class SegmentMover:
    """One prefill rank's. Owned by the transfer thread.

    A segment's staging is taken here, when it is popped from its ring or sent again, and freed by `Tickets.over`:
    when its send has ended, its copy could not be launched, or its request ended before. Before that, the region of a
    send whose peer was fenced goes to quarantine.
    """

    def __init__(
        self,
        rank: int,
        shard: Shard,
        pool: KVPool,
        queue: DeviceQueue,
        sums: Sums | None,
        space: StagingSpace,
        leases: Leases,
        tickets: Tickets,
        transport: Transport,
        timeline: Timeline,
        lane: str,
        clock: Clock,
    ) -> None:
        """`sums` is None where segments have no checksums."""
        self._rank, self._shard, self._pool, self._queue, self._sums = rank, shard, pool, queue, sums
        self._space, self._leases, self._tickets = space, leases, tickets
        self._transport, self._notices = transport, Notices(transport)
        self._timeline, self._lane, self._clock = timeline, lane, clock
        self._staged: deque[Item] = deque()
        """In the order in which they took their places in staging."""
        self.copying: deque[Item] = deque()
        """Items whose gather or write is on the device, in the queue's order."""
        self.segments_sent = self.bytes_sent = self.segments_written = self.segments_sent_again = 0

    def pump(self) -> None:
        """Moves on what waited for a ring or for staging: either may have become free."""
        for ring in self._leases.rings.values():
            while item := ring.pop_writable():
                item.state = State.STAGED
                self._space.take(item)
                self._staged.append(item)
        while self._staged:
            item = self._staged[0]
            if item.lease is not None and not self._space.writable(item):
                return
            self._staged.popleft()
            if item.state is State.STAGED:  # else its request has ended
                self.launch(item)
                self._send_copied()  # the wire waits for nothing while more is launched

    def launch(self, item: Item) -> None:
        """Queues the segment's gather, or its write to the decode rank's pool, behind its compute on the device."""
        try:
            with self._queue.use():
                self._queue.after(item.after)
                if item.write is None:
                    item.state = State.GATHERING
                    self._gather(item)
                else:
                    item.state, item.sending_s = State.SENDING, self._clock()
                    item.write()
                item.copied = self._queue.mark()
        except Exception as exc:  # noqa: BLE001 - whatever a launch raises ends this request and no other
            item.state = State.DROPPED
            error = TransportError(f"the copy of {item.segment} failed: {exc}")
            self._tickets.abort(item.outgoing, error)
            self._tickets.over(item)
        else:
            self.copying.append(item)

    def poll(self, now_s: float) -> None:
        """Sends what has been gathered, tells of what was written. Needed only while something is `copying`."""
        for item in self.copying:
            if item.started_s is None:
                if not is_done(item.after):  # the device still computes, and nothing is moved
                    break  # the queue runs in order: what is behind has not begun either
                _begin(item, now_s)
        self._send_copied()

    def damaged(self, item: Item) -> None:
        """The destination wants the segment once more: now, or when its first sending has ended here too."""
        item.damaged = True
        self._maybe_again(item)

    def notice_ended(self, operation: Operation) -> None:
        """A notice has left, and with it its segment; or it failed."""
        item = self._notices.ended(operation)
        if isinstance(item, Item):
            self.ended(item, operation)

    def ended(self, item: Item, operation: Operation) -> None:
        """A segment has left: its staging is free again. Or it failed, and its request with it."""
        if operation.state is OperationState.DONE:
            self._left(item)
        else:
            self._lost(item, operation.error or PeerLostError("the send failed"))
        self._tickets.over(item)
        if item.damaged:
            self._maybe_again(item)
        self.pump()

    def _maybe_again(self, item: Item) -> None:
        """No deadlock: the destination still holds the lease, which is writable, or waits for nothing."""
        outgoing = item.outgoing
        if item.again or item.state is not State.SENT or outgoing.closing or outgoing.finished:
            return  # the pages of a finished one may be another request's
        item.again, item.started_s = True, None
        outgoing.left += 1
        self.segments_sent_again += 1
        if item.write is None:
            item.state = State.STAGED
            self._space.take(item)
            self._staged.append(item)
            self.pump()
        else:
            self.launch(item)

    def _gather(self, item: Item) -> None:
        place = local_place(self._pool, item.outgoing.slots, item.segment, self._shard)
        codes, message = codes_of(item.outgoing.link), self._space.view(item)
        check = None
        if self._sums is not None:
            check = self._sums.check(item.segment, item.outgoing.ticket.number, trailer(message))
        out = message[: item.segment.nbytes]
        if codes is None:
            gather(*place, out, check)
        else:
            gather_codes(*place, codes, out, check)

    def _send_copied(self) -> None:
        while self.copying and is_done(self.copying[0].copied):
            self._copied(self.copying.popleft())

    def _copied(self, item: Item) -> None:
        now_s = self._clock()
        outgoing = item.outgoing
        started_s = _begin(item, now_s) if item.started_s is None else item.started_s
        name = "gather" if item.write is None else "write"
        self._timeline.record(name, self._lane, str(outgoing.key), started_s, now_s, item.segment.nbytes)
        tag = pack(outgoing.ticket.number, self._rank, item.segment.index)
        if item.write is not None:  # also when its request is ending: `SenderEnded` may have promised it
            total = item.word.value if item.word is not None else 0
            self._notices.send(item.peer, tag, Written(item.segment, total, item.again), context=item)
        elif outgoing.closing:
            item.state = State.DROPPED
            self._tickets.over(item)
        else:
            item.state, item.sending_s = State.SENDING, now_s
            self._transport.send(item.peer, tag, self._space.view(item), context=item)

    def _left(self, item: Item) -> None:
        nbytes = item.segment.nbytes
        item.state = State.SENT
        if not item.again:
            item.outgoing.nbytes += nbytes
        item.flow.nbytes += nbytes
        item.flow.segments += 1
        self.segments_sent += 1
        self.bytes_sent += nbytes
        self.segments_written += item.write is not None
        if item.lease is not None:  # what a notice tells of has been recorded as written
            key = str(item.outgoing.key)
            self._timeline.record("send", self._lane, key, item.sending_s, self._clock(), nbytes)

    def _lost(self, item: Item, error: TransportError) -> None:
        outgoing = item.outgoing
        item.state = State.DROPPED
        connected = item.peer in self._leases.rings
        if outgoing.closing and connected:  # it was told that this segment comes
            self._tickets.tell_end(outgoing, item.peer, str(error))
        self._tickets.abort(outgoing, error)
        if not connected:
            self._space.quarantine(item)


def _begin(item: Item, now_s: float) -> float:
    """The device has come to the item's copy, now."""
    item.started_s = now_s
    item.outgoing.busy.begin(now_s)
    item.flow.busy.begin(now_s)
    return now_s
