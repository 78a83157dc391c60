"""Events of a transfer at one rank of an engine that uses the data path."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from disagg.core.types import RequestKey
from transport.control import messages as m


class TransferEventKind(enum.Enum):
    """Kind of a `TransferEvent`."""

    OPENED = "opened"
    """Consumer: the rank accepts the ticket's KV; the producer may open its side now."""
    LANDED = "landed"
    """Consumer: all KV of the ticket is in the rank's pages, with valid checksums."""
    SENT = "sent"
    """Producer: all KV of the ticket was sent and, with checksums, verified."""
    STOPPED = "stopped"
    """Producer: the consumer needs no more KV of the ticket."""
    FAILED = "failed"
    """The transfer failed. The engine closes it, and keeps its pages until CLOSED."""
    CLOSED = "closed"
    """The data path no longer accesses pages of the ticket. The last event."""


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One event; producers and consumers pass it to the engine on the transfer thread."""

    kind: TransferEventKind
    key: RequestKey
    ticket: int
    """Number of the ticket."""
    reason: str = ""
    """Cause of FAILED."""


_KINDS: dict[type[m.Message], TransferEventKind] = {
    m.RankOpened: TransferEventKind.OPENED,
    m.Landed: TransferEventKind.LANDED,
    m.RankSent: TransferEventKind.SENT,
    m.RankStopped: TransferEventKind.STOPPED,
    m.RankFailed: TransferEventKind.FAILED,
    m.RankClosed: TransferEventKind.CLOSED,
}


def event_of(report: m.Message) -> TransferEvent:
    """Returns the event of a report that a sender or receiver makes to its leader."""
    match report:
        case m.RankFailed():
            return TransferEvent(
                TransferEventKind.FAILED, report.key, report.ticket, f"{report.code}: {report.message}"
            )
        case m.RankOpened() | m.Landed() | m.RankSent() | m.RankStopped() | m.RankClosed():
            return TransferEvent(_KINDS[type(report)], report.key, report.ticket)
    raise AssertionError(f"{type(report).__name__} is no report about a transfer")
