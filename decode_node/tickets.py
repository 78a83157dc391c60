"""The tickets that a decode rank receives for, and how the receiving for each ends: all landed, failed, closed.

landed   every byte is in its page, and all checksums fit: the leader hears `Landed`, sources `TransferVerified`
failed   before that: the leader hears `RankFailed`, once, and answers with `CloseTransfer`; meanwhile nothing
         more is scattered
closed   asked for by the leader, no ring region of it is held and no writer can write for it any more: the leader
         hears `RankClosed`, and gives the pages to others
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from decode_node.incoming import Incoming
from disagg.core.errors import DisaggError
from disagg.core.ports import Clock
from disagg.core.types import RequestKey, Segment, Ticket
from transport import messages as m

log = structlog.get_logger(__name__)


class Tickets:
    """One decode rank's. Owned by the transfer thread."""

    def __init__(
        self,
        rank: int,
        to_leader: Callable[[m.Message], None],
        verified: Callable[[str, m.Message], None] | None,
        clock: Clock,
    ) -> None:
        """`verified` sends a letter to a source; None where there are no checksums, and no source waits for it."""
        self._rank, self._to_leader, self._verified, self._clock = rank, to_leader, verified, clock
        self.open: dict[int, Incoming] = {}
        """By the ticket's number; kept until it is closed."""
        self.segments_landed = self.bytes_landed = 0
        self.failed = 0
        """Tickets that failed when they were open."""

    def opened(self, ticket: Ticket) -> None:
        """Segments may come from now on: tells the leader."""
        self._to_leader(m.RankOpened(ticket.key, ticket.number, self._rank))

    def count(self, incoming: Incoming, segment: Segment) -> None:
        """A segment is in its pages."""
        incoming.landed_bytes += segment.nbytes
        incoming.landed_from[segment.src_rank] += segment.nbytes
        self.segments_landed += 1
        self.bytes_landed += segment.nbytes
        if incoming.landed_bytes == incoming.coverage.total_bytes:
            incoming.landed = True
            self._to_leader(m.Landed(incoming.key, incoming.ticket.number, self._rank))
            self._tell_verified(incoming)

    def _tell_verified(self, incoming: Incoming) -> None:
        """The sources keep their pages until then. If the letter is lost, they do until the request's end."""
        if self._verified is None:
            return
        for src_rank, peer in incoming.peers.items():
            if src_rank not in incoming.lost:
                self._verified(peer, m.TransferVerified(incoming.key, incoming.ticket.number, self._rank))

    def fail(self, incoming: Incoming, error: DisaggError) -> None:
        """Ends the request. One that has failed, or is being closed: nothing happens."""
        if incoming.failed or incoming.closing:
            return
        incoming.failed = True
        log.warning("transfer_failed", request=str(incoming.key), error=str(error))
        self.failed += 1
        self.refuse(incoming.ticket, error)

    def refuse(self, ticket: Ticket, error: DisaggError) -> None:
        """Tells the leader why a ticket's KV does not come."""
        self._to_leader(m.RankFailed(ticket.key, ticket.number, self._rank, error.code, str(error)))

    def closed(self, key: RequestKey, number: int) -> None:
        """Nothing of the ticket is left here, or ever was: tells the leader."""
        self._to_leader(m.RankClosed(key, number, self._rank))

    def maybe_closed(self, incoming: Incoming) -> None:
        """Closes the ticket, if that was asked for and nothing can be written for it any more."""
        if not incoming.closing or any(incoming.held()) or incoming.unproven_writers():
            return
        if self._clock() < incoming.barred_until_s:
            return
        if self.open.pop(incoming.ticket.number, None) is not None:
            self.closed(incoming.key, incoming.ticket.number)
