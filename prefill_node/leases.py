"""What a prefill rank asks of the decode ranks' rings, what they grant, and which segments they can take now."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

from disagg.core.errors import ProtocolError, TransportError
from disagg.core.ports import Clock
from prefill_node.outgoing import Item, Outgoing, State
from prefill_node.tickets import Tickets
from staging.allocator import is_writable
from transport import messages as m


class Ring:
    """A decode rank's ring as this rank last heard of it, and what waits for it."""

    def __init__(self) -> None:
        self.watermark = 0
        self.ring_bytes = 0
        self._waiting: list[tuple[int, int, Item]] = []
        self._order = itertools.count()

    def hear(self, watermark: int, ring_bytes: int) -> None:
        """Takes in a watermark; an older one changes nothing."""
        self.watermark = max(self.watermark, watermark)
        self.ring_bytes = ring_bytes

    def add(self, item: Item) -> None:
        """A segment is leased and computed."""
        assert item.ring_start is not None, "only leased segments wait for the watermark"
        heapq.heappush(self._waiting, (item.ring_start, next(self._order), item))

    def pop_writable(self) -> Item | None:
        """The segment with the oldest lease, if the ring can take it now and its request still wants it."""
        while self._waiting:
            start, _, item = self._waiting[0]
            if item.state is State.PLANNED and not is_writable(
                start + item.message_bytes, self.watermark, self.ring_bytes
            ):
                return None
            heapq.heappop(self._waiting)
            if item.state is State.PLANNED:
                return item
        return None


class Leases:
    """One prefill rank's. Owned by the transfer thread.

    The ring space behind a lease is the decode rank's, which frees it. A request for leases is a letter, which may be
    lost: what is not granted in time ends its request.
    """

    def __init__(
        self,
        rank: int,
        tickets: Tickets,
        send_letter: Callable[[str, m.Message], None],
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self._rank, self._tickets, self._send_letter = rank, tickets, send_letter
        self._timeout_s, self._clock = timeout_s, clock
        self.rings: dict[str, Ring] = {}
        """Of the decode ranks that this rank is connected with, by their control address."""
        self._unanswered: deque[tuple[float, list[Item]]] = deque()
        """Segments that leases were asked for, with the time by which they must have them."""
        self.due_s = math.inf
        """When `expire` has something to do, at the earliest."""
        self.stale = 0
        """Messages of ranks, or for tickets and segments, that are not, or no longer, known; dropped."""

    def ask(self, outgoing: Outgoing, peer: str, items: list[Item]) -> None:
        """Asks a decode rank for ring space, for segments of a chunk that is about to be computed.

        What is more than a letter holds ends the ticket.
        """
        outgoing.messages += 1
        self._unanswered.append((self._clock() + self._timeout_s, items))
        self.due_s = self._unanswered[0][0]
        segments = [item.segment for item in items]
        try:
            self._send_letter(
                peer, m.LeaseRequest(outgoing.key, outgoing.ticket.number, self._rank, segments)
            )
        except ProtocolError as exc:
            self._tickets.abort(outgoing, exc)

    def computed(self, item: Item) -> None:
        """The segment's KV is queued on the device: once it has its lease too, it waits for the watermark."""
        ring = self.rings.get(item.peer)
        if item.ring_start is not None and ring is not None:
            ring.add(item)

    def on_grant(self, peer: str, grant: m.LeaseGrant) -> None:
        """Leases came. A repeated grant changes nothing."""
        ring, outgoing = self.rings.get(peer), self._tickets.find(grant.key, grant.ticket)
        if ring is None or outgoing is None:
            self.stale += 1
            return
        ring.hear(grant.watermark, grant.ring_bytes)
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
        """A decode rank's ring was freed up to there."""
        ring = self.rings.get(peer)
        if ring is None:
            self.stale += 1
        else:
            ring.hear(message.watermark, message.ring_bytes)

    def undelivered(self, message: m.Message, error: TransportError) -> None:
        """A letter did not reach its rank. Had it asked for leases, no grant will come."""
        outgoing = self._tickets.open.get(message.key) if isinstance(message, m.LeaseRequest) else None
        if outgoing is not None and not outgoing.closing:
            self._tickets.abort(outgoing, error)

    def expire(self, now_s: float) -> None:
        """Leases are granted at once: one that does not come for so long never will, for a letter is lost."""
        self._forget_answered()
        while self._unanswered and self._unanswered[0][0] <= now_s:
            items = self._unanswered.popleft()[1]
            item = next((item for item in items if item.waits_for_lease), None)
            if item is not None and not item.outgoing.closing:
                limit = f"{self._timeout_s:g} s (transfer.lease_timeout_s)"
                error = TransportError(f"{item.peer} granted no lease for {item.segment} within {limit}")
                self._tickets.abort(item.outgoing, error)
        self.due_s = self._unanswered[0][0] if self._unanswered else math.inf

    def _forget_answered(self) -> None:
        while self._unanswered and not any(item.waits_for_lease for item in self._unanswered[0][1]):
            self._unanswered.popleft()
        self.due_s = self._unanswered[0][0] if self._unanswered else math.inf
