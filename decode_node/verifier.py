"""Verifies segments that prefill ranks have written directly into this rank's pool, by checksums over the pool."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from decode_node.incoming import IncomingTransfer, pool_slice
from decode_node.options import ReceiverContext
from decode_node.repairs import Repairs
from decode_node.tickets import IncomingTickets
from disagg.core.errors import TransportError
from disagg.core.types import Segment
from disagg.node.device import DeviceEvent, DeviceQueue, is_done
from disagg.node.sums import Sums, Word
from kernels.copy.sum_rows import sum_rows
from transport.completion_notifications import Written


@dataclass(frozen=True, slots=True, eq=False)
class _Verified:
    """A segment whose checksum is being computed."""

    incoming: IncomingTransfer
    written: Written
    word: Word
    event: DeviceEvent


class Verifier:
    """Verifies and counts directly written segments. Owned by the transfer thread."""

    def __init__(
        self,
        context: ReceiverContext,
        queue: DeviceQueue,
        sums: Sums | None,
        tickets: IncomingTickets,
        repairs: Repairs,
    ) -> None:
        """`sums`: source of checksum words. If None, a segment counts as landed at its completion notification."""
        self._shard, self._pool, self._queue, self._sums = context.shard, context.pool, queue, sums
        self._context, self._tickets, self._repairs = context, tickets, repairs
        self.under_way: deque[_Verified] = deque()
        """Segments whose checksum computation is launched, in the order of the device queue. Each holds its checksum
        word until the computation is done."""

    def begin(self, incoming: IncomingTransfer, written: Written) -> None:
        """Launches the checksum of a segment whose completion notification has arrived."""
        if self._sums is None:
            self._landed(incoming, written.segment)
            return
        word = self._sums.take()
        try:
            with self._queue.use():
                check = self._sums.check(written.segment, incoming.ticket.number, word.memory)
                sum_rows(pool_slice(written.segment, incoming, self._shard, self._pool), check)
            event = self._queue.record_event()
        except Exception as exc:  # noqa: BLE001 - a failed launch ends this request only
            self._sums.give(word)
            error = TransportError(f"the checksum of {written.segment} could not be computed: {exc}")
            self._tickets.fail(incoming, error)
        else:
            self.under_way.append(_Verified(incoming, written, word, event))

    def poll(self) -> None:
        """Compares finished checksums with the senders'. The caller polls while `under_way` is not empty."""
        while self.under_way and is_done(self.under_way[0].event):
            one = self.under_way.popleft()
            assert self._sums is not None, "sums are launched with checksums only"
            total = one.word.value
            self._sums.give(one.word)
            self._compared(one.incoming, one.written, total == one.written.total)

    def _compared(self, incoming: IncomingTransfer, written: Written, equal: bool) -> None:
        # Pages of an ending request may already belong to another request, so their checksum proves nothing.
        if not incoming.wanted:
            return
        segment = written.segment
        if equal:
            self._landed(incoming, segment)
        elif self._repairs.request(incoming, segment, written.again, "written to the pool"):
            incoming.written.await_repair(segment)

    def _landed(self, incoming: IncomingTransfer, segment: Segment) -> None:
        now_s = self._context.clock()
        lane, key = self._context.lane, str(incoming.key)
        self._context.timeline.record("land", lane, key, now_s, now_s, segment.nbytes)
        self._tickets.count(incoming, segment)
