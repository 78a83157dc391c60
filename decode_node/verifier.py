"""Segments that prefill ranks have written into this rank's pool: summed up where they lie, compared, and counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from decode_node.incoming import Incoming, local
from decode_node.repairs import Repairs
from decode_node.tickets import Tickets
from disagg.core.errors import TransportError
from disagg.core.types import Segment, Shard
from disagg.kv.pool import KVPool
from disagg.node.device import DeviceQueue, Marker, is_done
from disagg.node.sums import Sums, Word
from kernels.rows import Place
from kernels.sum_rows import sum_rows
from transport.notices import Written


@dataclass(frozen=True, slots=True, eq=False)
class _Verified:
    """A segment whose sum is being computed."""

    incoming: Incoming
    written: Written
    word: Word
    marker: Marker


class Verifier:
    """One decode rank's. Owned by the transfer thread."""

    def __init__(
        self,
        shard: Shard,
        pool: KVPool,
        queue: DeviceQueue,
        sums: Sums | None,
        tickets: Tickets,
        repairs: Repairs,
        landed: Callable[[Incoming, Segment], None],
    ) -> None:
        """Without `sums` a segment has landed when its notice has come; `landed` hears of each."""
        self._shard, self._pool, self._queue, self._sums = shard, pool, queue, sums
        self._tickets, self._repairs, self._landed = tickets, repairs, landed
        self.under_way: deque[_Verified] = deque()
        """Sums that are on the device, in the queue's order; each holds its word until it is done."""

    def begin(self, incoming: Incoming, written: Written) -> None:
        """A notice has come: the segment's bytes are in their pages, or what became of them."""
        if self._sums is None:
            self._landed(incoming, written.segment)
            return
        word = self._sums.take()
        try:
            with self._queue.use():
                check = self._sums.check(written.segment, incoming.ticket.number, word.memory)
                sum_rows(self._place(incoming, written.segment), check)
            marker = self._queue.mark()
        except Exception as exc:  # noqa: BLE001 - whatever a launch raises ends this request and no other
            self._sums.give(word)
            error = TransportError(f"the checksum of {written.segment} could not be computed: {exc}")
            self._tickets.fail(incoming, error)
        else:
            self.under_way.append(_Verified(incoming, written, word, marker))

    def poll(self) -> None:
        """Counts what was found to be right. Needed only while something is `under_way`."""
        while self.under_way and is_done(self.under_way[0].marker):
            one = self.under_way.popleft()
            assert self._sums is not None, "nothing is summed up without"
            total = one.word.value
            self._sums.give(one.word)
            self._compared(one.incoming, one.written, total == one.written.total)

    def _compared(self, incoming: Incoming, written: Written, equal: bool) -> None:
        # The pages of a request that is ending may be another one's by now: then the sum says nothing.
        if not incoming.wanted:
            return
        segment = written.segment
        if equal:
            self._landed(incoming, segment)
        elif self._repairs.ask(incoming, segment, written.again, "written to the pool"):
            incoming.repaired[segment.src_rank, segment.index] = segment

    def _place(self, incoming: Incoming, segment: Segment) -> Place:
        at = segment.tokens.shift(-incoming.ticket.tokens.start)
        pool = self._pool.parts[self._shard.part_of(segment.layers)].buffer
        return Place(pool, incoming.slots[at.start : at.stop], *local(segment, self._shard))
