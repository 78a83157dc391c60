"""Sends computed segments: by a gather into staging and a send, or by one write into the decode rank's pool.

No deadlock: a segment takes staging only when the destination's ring can receive the segment *now*, so no segment in
staging waits for another segment. The oldest lease of a ring is always writable. Its segment can wait for compute
only, and compute never waits for the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from disagg.core.errors import PeerLostError, TransportError
from disagg.node.device import DeviceEvent, DeviceQueue, is_done
from disagg.node.sums import Sums
from disagg.node.transfer_loop import YIELD_LIMIT_S
from kernels.copy.gather import gather
from kernels.copy.quantize import gather_quantized
from prefill_node.direct import quantized_dtype, slice_of
from prefill_node.leases import Leases
from prefill_node.options import SenderContext
from prefill_node.outgoing import OutgoingSegment
from prefill_node.send_state import SendAction, SendEvent, SendState
from prefill_node.staging_space import StagingSpace
from prefill_node.tickets import OutgoingTickets
from staging.trailer import trailer
from transport.base import Operation, OperationState
from transport.completion_notifications import CompletionNotifications, Written
from transport.tags import pack


class CopyQueue(NamedTuple):
    """The device queue on which copies run, and the source of their checksum words."""

    queue: DeviceQueue
    sums: Sums | None
    """Source of the checksum words; None if segments have no checksums."""


class SegmentMover:
    """Copies and sends the segments of one prefill rank. Owned by the transfer thread.

    A segment takes staging when the destination's ring can receive it, or when it is sent again. `OutgoingTickets`
    frees the staging when the segment ends. If the peer was fenced during the send, the region goes to quarantine
    instead.
    """

    def __init__(
        self,
        context: SenderContext,
        copies: CopyQueue,
        space: StagingSpace,
        leases: Leases,
        tickets: OutgoingTickets,
    ) -> None:
        self._rank, self._shard, self._pool = context.rank, context.shard, context.pool
        self._transport = context.transport
        self._timeline, self._lane, self._clock = context.timeline, context.lane, context.clock
        self._queue, self._sums = copies
        self._space, self._leases, self._tickets = space, leases, tickets
        self._notifications = CompletionNotifications(context.transport)
        self._staged: deque[OutgoingSegment] = deque()
        """Segments whose staging region may still be in use by an earlier segment, in the order of the regions. May
        contain dropped segments."""
        self.copying: deque[OutgoingSegment] = deque()
        """Segments whose gather or direct write is queued on the device, in the order of the device queue."""
        self.segments_sent = self.bytes_sent = self.segments_sent_again = 0
        self.segments_written = self.segments_reported = 0

    def pump(self) -> None:
        """Launches the copies for which ring space and staging have become free."""
        for ring in self._leases.rings.values():
            while item := ring.pop_writable():
                self._advance(item, SendEvent.WRITABLE)
        while self._staged:
            item = self._staged[0]
            if item.lease is not None and not self._space.writable(item):
                return
            self._staged.popleft()
            if item.state is SendState.STAGED:  # otherwise the request has ended
                self.launch(item)
                self._send_copied()  # send gathered segments before the next launch: the network must not idle

    def launch(self, item: OutgoingSegment) -> None:
        """Queues the segment's gather or direct write on the device, after the computation of the segment's KV."""
        self._advance(item, SendEvent.GATHER if item.write is None else SendEvent.WRITE)
        try:
            with self._queue.use():
                self._queue.after(item.after)
                if item.write is None:
                    self._gather(item)
                    item.copied = self._queue.record_event()
                else:
                    item.copied = self._write(item, item.write)
        except Exception as exc:  # noqa: BLE001 - a failed launch ends this request only
            actions = item.advance(SendEvent.FAILED)
            error = TransportError(f"the copy of {item.segment} failed: {exc}")
            self._tickets.abort(item.outgoing, error)
            self._perform(item, actions)
        else:
            self.copying.append(item)

    def poll(self, now_s: float) -> None:
        """Sends gathered segments, and the completion notifications of finished direct writes.

        The caller polls while `copying` is not empty.
        """
        for item in self.copying:
            if item.started_s is None:
                if not is_done(item.after):  # the device still computes the segment's KV
                    break  # the queue runs in order: later items have not begun either
                _begin(item, now_s)
        self._send_copied()

    def ends_soon(self, now_s: float) -> bool:
        """Returns whether the device has reached the oldest copy within the last `YIELD_LIMIT_S`."""
        started_s = self.copying[0].started_s if self.copying else None
        return started_s is not None and now_s - started_s < YIELD_LIMIT_S

    def on_damaged(self, item: OutgoingSegment) -> None:
        """Resends a segment that arrived damaged: now, or when its first send has ended."""
        item.damaged = True
        self._resend(item)

    def on_notification_ended(self, operation: Operation) -> None:
        """Handles the end of a completion notification, which ends the send of a directly written segment.

        If a completion word has reported the write too, the notification only wakes the decode rank, and may fail.
        """
        item = self._notifications.ended(operation)
        if not isinstance(item, OutgoingSegment):
            return
        if item.report is not None and not item.report.board.closed:
            self._sent(item)
        else:
            self.on_send_ended(item, operation)

    def on_send_ended(self, item: OutgoingSegment, operation: Operation) -> None:
        """Handles the end of a segment's send: frees the segment's staging; a failed send fails the request."""
        if operation.state is OperationState.DONE:
            self._sent(item)
        else:
            self._fail(item, operation.error or PeerLostError("the send failed"))
        self.pump()

    def _sent(self, item: OutgoingSegment) -> None:
        self._count(item)
        self._advance(item, SendEvent.SENT)
        if item.damaged:
            self._resend(item)

    def _advance(self, item: OutgoingSegment, event: SendEvent) -> None:
        self._perform(item, item.advance(event))

    def _perform(self, item: OutgoingSegment, actions: tuple[SendAction, ...]) -> None:
        for action in actions:
            match action:
                case SendAction.TAKE_STAGING:
                    self._space.take(item)
                    self._staged.append(item)
                case SendAction.POST_SEND:
                    item.sending_s = self._clock()
                    self._transport.send(item.peer, self._tag(item), self._space.view(item), context=item)
                case SendAction.POST_NOTIFICATION if item.report is not None and item.report.read_soon:
                    self.segments_reported += 1
                    self._sent(item)
                case SendAction.POST_NOTIFICATION:
                    total = item.word.value if item.word is not None else 0
                    written = Written(item.segment, total, item.again)
                    self._notifications.send(item.peer, self._tag(item), written, context=item)
                case SendAction.END:
                    self._tickets.end(item)

    def _resend(self, item: OutgoingSegment) -> None:
        """Sends the segment a second time, if its first send has ended and the transfer is open.

        No deadlock: the segment's lease is still writable, or a direct write needs no lease.
        """
        outgoing = item.outgoing
        if item.again or item.state is not SendState.SENT or outgoing.stopped or outgoing.reported:
            return  # pages of a reported or stopped transfer may belong to another request
        item.advance(SendEvent.RESEND)
        item.started_s = None
        outgoing.left += 1
        self.segments_sent_again += 1
        if item.write is None:
            self._advance(item, SendEvent.WRITABLE)
        else:
            self.launch(item)

    def _write(self, item: OutgoingSegment, write: Callable[[], None]) -> DeviceEvent:
        """Launches a direct write; returns an event, or the report by a completion word, which serves as event."""
        pool = item.outgoing.direct.get(item.peer)
        board = pool.board if pool is not None and item.word is None else None
        report = None
        if board is not None:
            report = board.post(self._tag(item), Written(item.segment, 0, item.again))
        try:
            write()
        except BaseException:
            if report is not None:
                report.cancel()
            raise
        item.report = report if board is not None and report is not None and board.store(report) else None
        return item.report or self._queue.record_event()

    def _gather(self, item: OutgoingSegment) -> None:
        outgoing, segment = item.outgoing, item.segment
        source = slice_of(self._pool.buffers, outgoing.slots_of(segment), segment, self._shard)
        quantized, message = quantized_dtype(outgoing.link), self._space.view(item)
        check = None
        if self._sums is not None:
            check = self._sums.check(segment, outgoing.ticket.number, trailer(message))
        out = message[: segment.nbytes]
        if quantized is None or outgoing.link.decode.layout.is_state(segment.layers):
            gather(*source, out, check)
        else:
            _, slots, layers, heads = source
            gather_quantized(source.tensor, slots, layers, heads, quantized, out, check)

    def _send_copied(self) -> None:
        while self.copying and is_done(self.copying[0].copied):
            item, now_s = self.copying.popleft(), self._clock()
            started_s = _begin(item, now_s) if item.started_s is None else item.started_s
            name, key = "gather" if item.write is None else "write", str(item.outgoing.key)
            self._timeline.record(name, self._lane, key, started_s, now_s, item.segment.nbytes)
            self._advance(item, SendEvent.COPIED)

    def _tag(self, item: OutgoingSegment) -> int:
        return pack(item.outgoing.ticket.number, self._rank, item.segment.index)

    def _count(self, item: OutgoingSegment) -> None:
        nbytes = item.segment.nbytes
        if not item.again:
            item.outgoing.nbytes += nbytes
        item.flow.nbytes += nbytes
        item.flow.segments += 1
        self.segments_sent += 1
        self.bytes_sent += nbytes
        self.segments_written += item.write is not None
        if item.lease is not None:  # `_send_copied` has recorded a direct write
            key = str(item.outgoing.key)
            self._timeline.record("send", self._lane, key, item.sending_s, self._clock(), nbytes)

    def _fail(self, item: OutgoingSegment, error: TransportError) -> None:
        outgoing = item.outgoing
        actions = item.advance(SendEvent.FAILED)
        connected = item.peer in self._leases.rings
        if (
            outgoing.stopped and connected
        ):  # correct the earlier `SenderEnded`, which lists this segment as sent
            self._tickets.send_end(outgoing, item.peer, str(error))
        self._tickets.abort(outgoing, error)
        if not connected:
            self._space.quarantine(item)
        self._perform(item, actions)


def _begin(item: OutgoingSegment, now_s: float) -> float:
    """Records that the device has reached the segment's copy; returns `now_s`."""
    if item.report is not None:
        item.report.board.begin(now_s)
    item.started_s = now_s
    item.outgoing.busy.begin(now_s)
    item.flow.busy.begin(now_s)
    return now_s
