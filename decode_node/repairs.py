"""Damaged segments of a decode rank: counted, asked for once more; a second mismatch fails the request."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from decode_node.incoming import Incoming
from decode_node.tickets import Tickets
from disagg.core.errors import ChecksumError
from disagg.core.types import Segment
from transport import messages as m

log = structlog.get_logger(__name__)


class Repairs:
    """One decode rank's. Owned by the transfer thread."""

    def __init__(self, rank: int, tickets: Tickets, send_letter: Callable[[str, m.Message], None]) -> None:
        self._rank, self._tickets, self._send_letter = rank, tickets, send_letter
        self.mismatches = 0
        """Segments whose checksum did not fit what had arrived, second sendings included."""

    def ask(self, incoming: Incoming, segment: Segment, again: bool, where: str) -> bool:
        """A segment is damaged; `again`: a second time. True when it comes once more.

        Else the request has failed or is ending, and what the segment holds is the caller's to free.
        """
        self.mismatches += 1
        peer = incoming.peers[segment.src_rank]
        log.warning(
            "checksum_mismatch",
            request=str(incoming.key),
            segment=str(segment),
            source=peer,
            destination=self._rank,
            where=where,
            second_time=again,
        )
        if again:
            self._tickets.fail(incoming, self._error(segment, peer, where))
        # Why a source has ended is for its own group to report, which ends the request.
        if not incoming.wanted or segment.src_rank in incoming.ended:
            return False
        self._send_letter(peer, m.SendAgain(incoming.key, incoming.ticket.number, self._rank, segment.index))
        return True

    def _error(self, segment: Segment, peer: str, where: str) -> ChecksumError:
        return ChecksumError(
            f"{segment} from prefill rank {segment.src_rank} ({peer}) to decode rank {self._rank} was damaged "
            f"twice ({where}): memory of one of these ranks, or the wire between them, is faulty"
        )
