"""State machines of the sending side: one for each segment, one for each transfer (ticket).

The two tables in this file list every transition; `disagg.core.state_table` applies them.
"""

from __future__ import annotations

from disagg.core.state_table import StateEnum, StateMachine, StateTable, Transition
from disagg.core.types import RequestKey, Segment


class SendState(StateEnum):
    """State of a segment."""

    PLANNED = "planned"
    """The segment's compute or lease is pending."""
    STAGED = "staged"
    """The segment is leased, computed, and writable in the destination's ring. Its staging region is assigned, but an
    earlier segment may still use the region."""
    GATHERING = "gathering"
    """The gather into staging is queued on the device."""
    DRAINING = "draining"
    """The gather is queued on the device, and the transfer was stopped: the end of the gather drops the segment."""
    WRITING = "writing"
    """The kernel that writes the destination's pool is queued on the device."""
    SENDING = "sending"
    """The transport sends the staging region, or the completion notification of a direct write."""
    SENT = "sent"
    DROPPED = "dropped"
    """The transfer ended, or a fault occurred, before the segment was sent."""


class SendEvent(StateEnum):
    """Event of a segment."""

    WRITABLE = "writable"
    """The destination's ring can receive the segment now."""
    GATHER = "gather"
    """The gather is about to be launched."""
    WRITE = "write"
    """The direct write is about to be launched."""
    COPIED = "copied"
    """The gather or the direct write is done on the device."""
    SENT = "sent"
    """The transport finished the send."""
    FAILED = "failed"
    """The launch raised, or the send failed."""
    STOP = "stop"
    """The transfer stops or closes. A segment receives this event at most once."""
    RESEND = "resend"
    """The destination found the segment damaged. A segment receives this event at most once."""


class SendAction(StateEnum):
    """Action that the caller of `OutgoingSegment.advance` performs."""

    TAKE_STAGING = "take staging"
    POST_SEND = "post the send of the staging region"
    POST_NOTIFICATION = "post the completion notification"
    END = "free the staging region and count the segment as ended"


class SendTransferState(StateEnum):
    """State of a transfer. `SENT_*`: the leader has received `RankSent`."""

    SENDING = "sending"
    SENT = "sent"
    """All segments were sent and, with checksums, verified."""
    STOPPED = "stopped"
    """The decode side or a fault stopped the transfer."""
    SENT_STOPPED = "sent, stopped"
    CLOSING = "closing"
    """The leader closes the transfer: `RankClosed` follows when no segment is under way."""
    SENT_CLOSING = "sent, closing"
    """The leader closes a sent transfer: nothing is under way, so DRAINED follows at once."""
    CLOSED = "closed"
    """The leader has received `RankClosed`."""


class SendTransferEvent(StateEnum):
    """Event of a transfer."""

    ALL_SENT = "all sent"
    """The last segment was sent, and was verified where that is required."""
    STOP = "stop"
    """The decode side has cancelled the ticket, or a fault ends the request."""
    CLOSE = "close"
    """The leader sent `CloseTransfer`."""
    DRAINED = "drained"
    """The leader closes the transfer, and no segment is under way."""


class TransferAction(StateEnum):
    """Action that the caller of `OutgoingTransfer.advance` performs."""

    REPORT_SENT = "send RankSent to the leader"
    STOP_SEGMENTS = "stop each segment"
    NOTIFY_PEERS = "send SenderEnded to each peer that expects segments"
    REPORT_CLOSED = "forget the transfer and send RankClosed to the leader"


_S, _E, _A = SendState, SendEvent, SendAction
TRANSITIONS: StateTable[SendState, SendEvent, SendAction] = {
    (_S.PLANNED, _E.WRITABLE): Transition(_S.STAGED, (_A.TAKE_STAGING,)),
    (_S.PLANNED, _E.WRITE): Transition(_S.WRITING),
    (_S.PLANNED, _E.STOP): Transition(_S.DROPPED, (_A.END,)),
    (_S.STAGED, _E.GATHER): Transition(_S.GATHERING),
    (_S.STAGED, _E.STOP): Transition(_S.DROPPED, (_A.END,)),
    (_S.GATHERING, _E.COPIED): Transition(_S.SENDING, (_A.POST_SEND,)),
    (_S.GATHERING, _E.FAILED): Transition(_S.DROPPED, (_A.END,)),
    (_S.GATHERING, _E.STOP): Transition(_S.DRAINING),
    (_S.DRAINING, _E.COPIED): Transition(_S.DROPPED, (_A.END,)),
    (_S.WRITING, _E.COPIED): Transition(_S.SENDING, (_A.POST_NOTIFICATION,)),
    (_S.WRITING, _E.FAILED): Transition(_S.DROPPED, (_A.END,)),
    (_S.WRITING, _E.STOP): Transition(_S.WRITING),  # `SenderEnded` lists the segment as sent
    (_S.SENDING, _E.SENT): Transition(_S.SENT, (_A.END,)),
    (_S.SENDING, _E.FAILED): Transition(_S.DROPPED, (_A.END,)),
    (_S.SENDING, _E.STOP): Transition(_S.SENDING),
    (_S.SENT, _E.RESEND): Transition(_S.PLANNED),
    (_S.SENT, _E.STOP): Transition(_S.SENT),
    (_S.DROPPED, _E.STOP): Transition(_S.DROPPED),
}
"""Transitions of a segment."""

ENDED = frozenset({_S.SENT, _S.DROPPED})
"""States of a segment that was sent or dropped."""
ON_THE_WIRE = frozenset({_S.WRITING, _S.SENDING, _S.SENT})
"""States of a segment that the destination has received or will receive."""
HOLDS_STAGING = frozenset({_S.STAGED, _S.GATHERING, _S.DRAINING, _S.SENDING})
"""States in which a segment that is not written directly holds a staging region."""

_T, _V, _B = SendTransferState, SendTransferEvent, TransferAction
TRANSFER_TRANSITIONS: StateTable[SendTransferState, SendTransferEvent, TransferAction] = {
    (_T.SENDING, _V.ALL_SENT): Transition(_T.SENT, (_B.REPORT_SENT,)),
    (_T.SENDING, _V.STOP): Transition(_T.STOPPED, (_B.STOP_SEGMENTS, _B.NOTIFY_PEERS)),
    (_T.SENDING, _V.CLOSE): Transition(_T.CLOSING, (_B.STOP_SEGMENTS, _B.NOTIFY_PEERS)),
    (_T.SENT, _V.STOP): Transition(_T.SENT_STOPPED, (_B.STOP_SEGMENTS,)),
    (_T.SENT, _V.CLOSE): Transition(_T.SENT_CLOSING, (_B.STOP_SEGMENTS,)),
    # The stop dropped no segment: the copies of all segments had been launched.
    (_T.STOPPED, _V.ALL_SENT): Transition(_T.SENT_STOPPED, (_B.REPORT_SENT,)),
    (_T.STOPPED, _V.STOP): Transition(_T.STOPPED),
    (_T.STOPPED, _V.CLOSE): Transition(_T.CLOSING),
    (_T.SENT_STOPPED, _V.STOP): Transition(_T.SENT_STOPPED),
    (_T.SENT_STOPPED, _V.CLOSE): Transition(_T.SENT_CLOSING),
    (_T.CLOSING, _V.ALL_SENT): Transition(_T.SENT_CLOSING, (_B.REPORT_SENT,)),
    (_T.CLOSING, _V.STOP): Transition(_T.CLOSING),
    (_T.CLOSING, _V.CLOSE): Transition(_T.CLOSING),
    (_T.CLOSING, _V.DRAINED): Transition(_T.CLOSED, (_B.REPORT_CLOSED,)),
    (_T.SENT_CLOSING, _V.DRAINED): Transition(_T.CLOSED, (_B.REPORT_CLOSED,)),
}
"""Transitions of a transfer."""

UNREPORTED = frozenset({_T.SENDING, _T.STOPPED, _T.CLOSING})
"""States of a transfer for which the leader has received neither `RankSent` nor `RankClosed`."""
STOPPED = frozenset(_T) - {_T.SENDING, _T.SENT}
"""States of a transfer that launches no further copy."""
CLOSE_REQUESTED = frozenset({_T.CLOSING, _T.SENT_CLOSING})
"""States of a transfer in which the leader waits for `RankClosed`."""


class SegmentMachine(StateMachine[SendState, SendEvent, SendAction]):
    """State machine of one segment."""

    __slots__ = ("again",)

    def __init__(self, key: RequestKey, segment: Segment) -> None:
        super().__init__((key, segment), SendState.PLANNED, TRANSITIONS)
        self.again = False
        """Whether the segment is being sent a second time; `state` is then the state of the second send."""

    def advance(self, event: SendEvent) -> tuple[SendAction, ...]:
        """Applies an event and returns the actions to perform, like `StateMachine.advance`.

        Raises `InvariantError` also for a second RESEND: a segment is sent again only once.
        """
        if event is SendEvent.RESEND and self.again:
            raise self.refused(event)
        actions = super().advance(event)
        self.again |= event is SendEvent.RESEND
        return actions
