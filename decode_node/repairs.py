"""Counts the damaged segments of a decode rank and requests each once more; a second mismatch fails the request."""

from __future__ import annotations

import structlog

from decode_node.incoming import IncomingTransfer
from decode_node.options import ReceiverContext
from decode_node.tickets import IncomingTickets
from disagg.core.errors import ChecksumError
from disagg.core.types import Segment
from transport.control import messages as m

log = structlog.get_logger(__name__)


class Repairs:
    """Requests damaged segments again. Owned by the transfer thread."""

    def __init__(self, context: ReceiverContext, tickets: IncomingTickets) -> None:
        self._context, self._tickets = context, tickets
        self.mismatches = 0
        """Number of segments whose checksum did not match, resent segments included."""

    def request(self, incoming: IncomingTransfer, segment: Segment, again: bool, where: str) -> bool:
        """Handles a damaged segment. `again`: the segment was resent before. `where`: the place, for log and error.

        Returns True when the segment will be sent again. Otherwise the request has failed or is ending, and the
        caller frees the segment's lease or checksum word.
        """
        self.mismatches += 1
        source = incoming.sources[segment.src_rank]
        log.warning(
            "checksum_mismatch",
            request=str(incoming.key),
            segment=str(segment),
            source=source.peer,
            destination=self._context.rank,
            where=where,
            second_time=again,
        )
        if again:
            self._tickets.fail(incoming, self._error(segment, source.peer, where))
        # If the source has ended, its group reports the reason to the router, and the router ends the request.
        if not incoming.wanted or source.ended:
            return False
        # Use the control channel: after the loss of an active message the request would hang until its deadline.
        message = m.SendAgain(incoming.key, incoming.ticket.number, self._context.rank, segment.index)
        self._context.send(source.peer, message)
        return True

    def _error(self, segment: Segment, peer: str, where: str) -> ChecksumError:
        rank = self._context.rank
        return ChecksumError(
            f"{segment} from prefill rank {segment.src_rank} ({peer}) to decode rank {rank} was damaged "
            f"twice ({where}): the memory of one of these ranks, or the network between them, is faulty"
        )
