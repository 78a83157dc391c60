"""Prefill ranks that write straight into this rank's pool: they are offered it, fenced off, and tell what they wrote.

Nothing here can cancel a write. So a ticket's pages are given back only when each of its writers has proven that it
writes no more: all of its segments were written, or it has said which were and their notices have come, or it was
waited for so long that whatever it launched has ended; and whatever it launches later finds the fence word shut.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import structlog

from decode_node.fences import FenceWords
from decode_node.incoming import Incoming
from decode_node.tickets import Tickets
from decode_node.verifier import Verifier
from disagg.core.errors import ProtocolError, TransportError
from disagg.core.ports import Clock
from disagg.core.timeline import Timeline
from disagg.core.types import Segment, Ticket
from disagg.kv.pool import KVPool
from transport import messages as m
from transport.base import Arrival, Operation, OperationState, Transport
from transport.notices import NOTICE_BYTES, Notices, Written
from transport.peer_memory import offer
from transport.tags import Tag, unpack

log = structlog.get_logger(__name__)


class PeerWrites:
    """One decode rank's. Owned by the transfer thread."""

    def __init__(
        self,
        rank: int,
        pool: KVPool,
        rows: int,
        quarantine_s: float,
        tickets: Tickets,
        make_verifier: Callable[[Callable[[Incoming, Segment], None]], Verifier],
        transport: Transport,
        send: Callable[[str, m.Message], None],
        timeline: Timeline,
        lane: str,
        clock: Clock,
    ) -> None:
        """`rows` fence words guard the pool; 0 offers it to nobody.

        `quarantine_s`: a writer that we took for dead has noticed by then, and what it launched has ended.
        """
        self._rank, self._pool, self._quarantine_s, self._tickets = rank, pool, quarantine_s, tickets
        self._transport, self._send = transport, send
        self._timeline, self._lane, self._clock = timeline, lane, clock
        self._fences = FenceWords(rows, pool.device) if rows else None
        self._notices = Notices(transport)
        self.peers: set[str] = set()
        """That the pool was offered to, and that did not refuse."""
        self.verifier = make_verifier(self._landed)
        self._overdue: deque[tuple[float, Incoming]] = deque()
        """When to stop waiting for what a writer owes: by then it has written, or finds the fence shut."""
        self.due_s = math.inf
        """When `give_up` has something to do."""

    # --- who may write

    def offer(self, peer: str) -> None:
        """Lets a prefill rank write to the pool, for tickets made from now on."""
        if self._fences is None:
            return
        try:
            pools = tuple(offer(part.buffer) for part in self._pool.parts)
            words = offer(self._fences.words)
        except TransportError as exc:
            log.info("pool_not_offered", peer=peer, why=str(exc), how="KV comes through the ring")
            return
        self.peers.add(peer)
        self._send(peer, m.PoolOffer(self._rank, pools, words))

    def on_refused(self, peer: str, message: m.PoolRefused) -> None:
        """A peer cannot open the pool: tickets made from now on come through the ring.

        One that is open may be written all the same, by way of an earlier offer: it is waited for as before.
        """
        log.info("pool_refused", peer=peer, why=message.reason, how="KV comes through the ring")
        self.peers.discard(peer)

    def writers(self, ticket: Ticket, peers: dict[int, str]) -> set[int]:
        """Which of a new ticket's source ranks may write."""
        return {rank for rank, peer in peers.items() if peer in self.peers and ticket.pages}

    def open(self, incoming: Incoming) -> None:
        """Lets the ticket's writers in, if it has any."""
        if incoming.writers and self._fences is not None:
            self._fences.open(incoming.ticket.row, incoming.ticket.number)
            incoming.writable = True

    def shut(self, incoming: Incoming) -> None:
        """Whatever is launched from now on writes nothing; what has begun still may."""
        if incoming.writable and self._fences is not None:
            self._fences.close(incoming.ticket.row)
            incoming.writable = False

    # --- how writers end

    def lost(self, incoming: Incoming, src_rank: int) -> None:
        """A source rank is gone: if it may have written, the ticket waits until its last launch has ended."""
        if src_rank in incoming.unproven_writers():
            self.shut(incoming)
            incoming.barred_until_s = self._clock() + self._quarantine_s
            self._wait(incoming, incoming.barred_until_s)

    def ended(self, incoming: Incoming, src_rank: int, sent: set[int], again: set[int]) -> None:
        """A source rank writes nothing more but what it has `sent`, and `again` what it has sent a second time.

        Notices of what is not known yet are awaited.
        """
        if src_rank not in incoming.writers:
            return
        leased = {index for rank, index in incoming.items if rank == src_rank}
        once, twice = (
            {index for rank, index in known if rank == src_rank}
            for known in (incoming.written, incoming.rewritten)
        )
        others = {name for name in incoming.awaited if name[0] != src_rank}
        first = {(src_rank, index, False) for index in sent - leased - once}
        second = {(src_rank, index, True) for index in again - leased - twice}
        incoming.awaited = others | first | second
        if incoming.awaited:
            self._wait(incoming, self._clock() + self._quarantine_s)

    def give_up(self, now_s: float) -> None:
        """Waits no more for what is overdue."""
        while self._overdue and self._overdue[0][0] <= now_s:
            _, incoming = self._overdue.popleft()
            incoming.awaited.clear()
            self._tickets.maybe_closed(incoming)
        self.due_s = self._overdue[0][0] if self._overdue else math.inf

    def _wait(self, incoming: Incoming, until_s: float) -> None:
        self._overdue.append((until_s, incoming))
        self.due_s = self._overdue[0][0]

    # --- what they wrote

    def on_notice(self, incoming: Incoming, peer: str, arrival: Arrival) -> None:
        """A writer tells of a segment: to be read when its receive has ended."""
        if 0 < arrival.nbytes <= NOTICE_BYTES:
            self._notices.receive(peer, arrival, incoming)
            return
        self._transport.discard(peer, arrival)
        self._tickets.fail(incoming, ProtocolError(f"a notice of {arrival.nbytes} bytes came"))

    def notice_ended(self, operation: Operation) -> None:
        """A writer has told of a segment, or cannot any more: either way it writes nothing of it from now on."""
        incoming = self._notices.ended(operation)
        if not isinstance(incoming, Incoming):
            return
        tag = unpack(operation.tag)
        name = (tag.writer, tag.segment)
        error: TransportError | ProtocolError | None = None
        try:
            written = self._read(operation, tag)
            again = written.again
        except (TransportError, ProtocolError) as exc:
            error, again = exc, name in incoming.repaired
        known = incoming.rewritten if again else incoming.written
        first = name not in known
        known.add(name)
        incoming.awaited.discard((*name, again))
        try:
            if error is not None:
                raise error
            if first and incoming.wanted:
                self._written(incoming, written)
        except (TransportError, ProtocolError) as exc:
            self._tickets.fail(incoming, exc)
        self._tickets.maybe_closed(incoming)

    def _read(self, operation: Operation, tag: Tag) -> Written:
        if operation.state is OperationState.FAILED:
            raise operation.error or TransportError("a notice was not received")
        written = self._notices.read(operation)
        segment = written.segment
        if (segment.src_rank, segment.index) != (tag.writer, tag.segment) or segment.dst_rank != self._rank:
            raise ProtocolError(f"a notice of {tag} speaks of {segment}")
        return written

    def _written(self, incoming: Incoming, written: Written) -> None:
        if written.again:
            segment = written.segment
            if incoming.repaired.get((segment.src_rank, segment.index)) != segment:
                raise ProtocolError(f"{segment} was written again, and nobody asked for that")
            self.verifier.begin(incoming, written)
            return
        incoming.early.append(written)
        while ready := [one for one in incoming.early if not incoming.coverage.is_early(one.segment)]:
            for each in ready:
                incoming.early.remove(each)
                incoming.coverage.add(each.segment)
                self.verifier.begin(incoming, each)

    def _landed(self, incoming: Incoming, segment: Segment) -> None:
        now_s = self._clock()
        self._timeline.record("land", self._lane, str(incoming.key), now_s, now_s, segment.nbytes)
        self._tickets.count(incoming, segment)
