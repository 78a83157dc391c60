"""State machines of the sending side: one for each segment, one for each transfer (ticket).

The two tables in this file list every transition. `advance` takes an event, moves to the next state and returns the
action that its caller performs; this file does no I/O. An event without a transition raises `InvariantError`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from disagg.core.errors import InvariantError
from disagg.core.types import RequestKey, Segment


class SendState(enum.Enum):
    """State of a segment."""

    PLANNED = "planned"
    """The compute or the lease is pending."""
    STAGED = "staged"
    """Leased, computed, and writable in the destination's ring; its staging region is assigned, maybe still busy."""
    GATHERING = "gathering"
    """The gather into staging is queued on the device."""
    DRAINING = "draining"
    """As GATHERING, but the transfer was stopped: the segment is dropped when the gather is done."""
    WRITING = "writing"
    """The kernel that writes the destination's pool is queued on the device."""
    SENDING = "sending"
    """The transport sends the staging region, or the completion notification of a direct write."""
    SENT = "sent"
    DROPPED = "dropped"
    """The transfer ended, or a fault occurred, before the segment was sent."""


class SendEvent(enum.Enum):
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
    """The transfer ends; occurs once."""
    RESEND = "resend"
    """The destination found the segment damaged; occurs once."""


class SendAction(enum.Enum):
    """What the caller of `OutgoingSegment.advance` performs."""

    NONE = "none"
    TAKE_STAGING = "take staging"
    POST_SEND = "post the send of the staging region"
    POST_NOTIFICATION = "post the completion notification"
    END = "free the staging region and count the segment as ended"


class SendTransferState(enum.Enum):
    """State of a transfer. `SENT_*`: the leader has received `RankSent`."""

    SENDING = "sending"
    SENT = "sent"
    """Everything was sent and, with checksums, verified."""
    STOPPED = "stopped"
    """The decode side or a fault stopped it."""
    SENT_STOPPED = "sent, stopped"
    CLOSING = "closing"
    """The leader closes it: `RankClosed` follows when no segment is under way."""
    SENT_CLOSING = "sent, closing"
    """Nothing is under way: DRAINED follows at once."""
    CLOSED = "closed"
    """The leader has received `RankClosed`."""


class SendTransferEvent(enum.Enum):
    """Event of a transfer."""

    ALL_SENT = "all sent"
    """The last segment was sent, and was verified where that is required."""
    STOP = "stop"
    """The decode side gave the ticket up, or a fault ends the request."""
    CLOSE = "close"
    """The leader sent `CloseTransfer`."""
    DRAINED = "drained"
    """The leader closes the transfer, and no segment is under way."""


class TransferAction(enum.Enum):
    """What the caller of `OutgoingTransfer.advance` performs."""

    NONE = "none"
    REPORT_SENT = "send RankSent to the leader"
    STOP_SEGMENTS = "stop each segment"
    STOP_AND_NOTIFY = "stop each segment, then send SenderEnded to each peer that expects segments"
    REPORT_CLOSED = "forget the transfer and send RankClosed to the leader"


_S, _E, _A = SendState, SendEvent, SendAction
TRANSITIONS: Mapping[tuple[SendState, SendEvent], tuple[SendState, SendAction]] = {
    (_S.PLANNED, _E.WRITABLE): (_S.STAGED, _A.TAKE_STAGING),
    (_S.PLANNED, _E.WRITE): (_S.WRITING, _A.NONE),
    (_S.PLANNED, _E.STOP): (_S.DROPPED, _A.END),
    (_S.STAGED, _E.GATHER): (_S.GATHERING, _A.NONE),
    (_S.STAGED, _E.STOP): (_S.DROPPED, _A.END),
    (_S.GATHERING, _E.COPIED): (_S.SENDING, _A.POST_SEND),
    (_S.GATHERING, _E.FAILED): (_S.DROPPED, _A.END),
    (_S.GATHERING, _E.STOP): (_S.DRAINING, _A.NONE),
    (_S.DRAINING, _E.COPIED): (_S.DROPPED, _A.END),
    (_S.WRITING, _E.COPIED): (_S.SENDING, _A.POST_NOTIFICATION),
    (_S.WRITING, _E.FAILED): (_S.DROPPED, _A.END),
    (_S.WRITING, _E.STOP): (_S.WRITING, _A.NONE),  # `SenderEnded` lists the segment as sent
    (_S.SENDING, _E.SENT): (_S.SENT, _A.END),
    (_S.SENDING, _E.FAILED): (_S.DROPPED, _A.END),
    (_S.SENDING, _E.STOP): (_S.SENDING, _A.NONE),
    (_S.SENT, _E.RESEND): (_S.PLANNED, _A.NONE),
    (_S.SENT, _E.STOP): (_S.SENT, _A.NONE),
    (_S.DROPPED, _E.STOP): (_S.DROPPED, _A.NONE),
}
"""Of a segment: (state, event) to (next state, action)."""

ENDED = frozenset({_S.SENT, _S.DROPPED})
"""States of a segment that is not under way."""
ON_THE_WIRE = frozenset({_S.WRITING, _S.SENDING, _S.SENT})
"""States of a segment that the destination has received or will receive."""
HOLDS_STAGING = frozenset({_S.STAGED, _S.GATHERING, _S.DRAINING, _S.SENDING})
"""States in which a segment that is not written directly holds a staging region."""

_T, _V, _B = SendTransferState, SendTransferEvent, TransferAction
TRANSFER_TRANSITIONS: Mapping[
    tuple[SendTransferState, SendTransferEvent], tuple[SendTransferState, TransferAction]
] = {
    (_T.SENDING, _V.ALL_SENT): (_T.SENT, _B.REPORT_SENT),
    (_T.SENDING, _V.STOP): (_T.STOPPED, _B.STOP_AND_NOTIFY),
    (_T.SENDING, _V.CLOSE): (_T.CLOSING, _B.STOP_AND_NOTIFY),
    (_T.SENT, _V.STOP): (_T.SENT_STOPPED, _B.STOP_SEGMENTS),
    (_T.SENT, _V.CLOSE): (_T.SENT_CLOSING, _B.STOP_SEGMENTS),
    (_T.STOPPED, _V.ALL_SENT): (_T.SENT_STOPPED, _B.REPORT_SENT),  # all segments had left before the stop
    (_T.STOPPED, _V.STOP): (_T.STOPPED, _B.NONE),
    (_T.STOPPED, _V.CLOSE): (_T.CLOSING, _B.NONE),
    (_T.SENT_STOPPED, _V.STOP): (_T.SENT_STOPPED, _B.NONE),
    (_T.SENT_STOPPED, _V.CLOSE): (_T.SENT_CLOSING, _B.NONE),
    (_T.CLOSING, _V.ALL_SENT): (_T.SENT_CLOSING, _B.REPORT_SENT),
    (_T.CLOSING, _V.STOP): (_T.CLOSING, _B.NONE),
    (_T.CLOSING, _V.CLOSE): (_T.CLOSING, _B.NONE),
    (_T.CLOSING, _V.DRAINED): (_T.CLOSED, _B.REPORT_CLOSED),
    (_T.SENT_CLOSING, _V.DRAINED): (_T.CLOSED, _B.REPORT_CLOSED),
}
"""Of a transfer: (state, event) to (next state, action)."""

UNREPORTED = frozenset({_T.SENDING, _T.STOPPED, _T.CLOSING})
"""States of a transfer without `RankSent`."""
STOPPED = frozenset(_T) - {_T.SENDING, _T.SENT}
"""States of a transfer that launches no further copy."""
CLOSE_REQUESTED = frozenset({_T.CLOSING, _T.SENT_CLOSING})
"""States of a transfer in which the leader waits for `RankClosed`."""

StateT = TypeVar("StateT", bound=enum.Enum)
EventT = TypeVar("EventT", bound=enum.Enum)
ActionT = TypeVar("ActionT", bound=enum.Enum)


class _Machine(Generic[StateT, EventT, ActionT]):
    """A state that changes by the transitions of a table alone."""

    __slots__ = ("_name", "_table", "state")

    def __init__(
        self, name: object, state: StateT, table: Mapping[tuple[StateT, EventT], tuple[StateT, ActionT]]
    ) -> None:
        """`name` appears in errors."""
        self._name, self.state, self._table = name, state, table

    def advance(self, event: EventT) -> ActionT:
        """Moves to the next state and returns the action for the caller. Raises `InvariantError`."""
        transition = self._table.get((self.state, event))
        if transition is None:
            raise self._refused(event)
        self.state, action = transition
        return action

    def _refused(self, event: EventT) -> InvariantError:
        return InvariantError(f"{self._name}: no transition from state {self.state.name} on {event.name}")


class SegmentMachine(_Machine[SendState, SendEvent, SendAction]):
    """State machine of one segment."""

    __slots__ = ("again",)

    def __init__(self, key: RequestKey, segment: Segment) -> None:
        super().__init__((key, segment), SendState.PLANNED, TRANSITIONS)
        self.again = False
        """The second sending has begun; `state` is the state of that one."""

    def advance(self, event: SendEvent) -> SendAction:
        """As `_Machine.advance`. A segment is sent again once: a second RESEND raises too."""
        if event is SendEvent.RESEND and self.again:
            raise self._refused(event)
        action = super().advance(event)
        self.again |= event is SendEvent.RESEND
        return action


class TransferMachine(_Machine[SendTransferState, SendTransferEvent, TransferAction]):
    """State machine of one transfer."""

    __slots__ = ()

    def __init__(self, key: RequestKey, ticket: int) -> None:
        super().__init__((key, ticket), SendTransferState.SENDING, TRANSFER_TRANSITIONS)
