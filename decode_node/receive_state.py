"""State machines of the receiving side: one for each segment, each source rank of a transfer, and each transfer.

The tables in this file list every transition; `disagg.core.state_table` applies them.
"""

from __future__ import annotations

from disagg.core.state_table import StateEnum, StateTable, Transition


class ReceiveState(StateEnum):
    """State of a segment that is received through the ring. The segment holds its lease until LANDED or DROPPED."""

    LEASED = "leased"
    """Ring space is granted; the bytes have not arrived."""
    RECEIVING = "receiving"
    """The transport writes the ring region."""
    SCATTERING = "scattering"
    """A kernel reads the ring region and writes pages."""
    LANDED = "landed"
    """The bytes are in their pages, and their checksum matches."""
    DROPPED = "dropped"
    """The segment was discarded, because the request ended or a fault occurred."""


class SegmentEvent(StateEnum):
    """Event of a segment that is received through the ring."""

    ARRIVED = "arrived"
    """A message of the expected size has arrived for a writable lease."""
    REJECTED = "rejected"
    """A message arrived before its lease was writable, or with a wrong size."""
    CANCELLED = "cancelled"
    """The source has ended or is fenced, and did not send the segment."""
    RECEIVED = "received"
    """The receive has ended, and the request still needs the segment."""
    RECEIVED_VOID = "received void"
    """The receive has ended, but the request has failed or is closing."""
    RECEIVE_FAILED = "receive failed"
    LAUNCH_FAILED = "launch failed"
    """The scatter could not be launched."""
    VERIFIED = "verified"
    """The scatter is done, and the checksum matches."""
    DAMAGED = "damaged"
    """The checksum does not match; the source sends the segment again."""
    ABANDONED = "abandoned"
    """The checksum does not match; the segment is not sent again."""


class SourceState(StateEnum):
    """State of one prefill rank in one transfer."""

    SENDING = "sending"
    STOPPING = "stopping"
    """`StopSending` was sent; `SenderEnded` has not arrived."""
    ENDED = "ended"
    """`SenderEnded` has arrived: it lists the segments that the rank sent, and no others follow."""
    LOST = "lost"
    """The rank is fenced; its later messages are void."""


class SourceEvent(StateEnum):
    """Event of a prefill rank in one transfer."""

    STOP = "stop"
    """The transfer closes while the rank may still send."""
    END = "end"
    """`SenderEnded` has arrived."""
    LOSE = "lose"
    """The rank is lost: it died or was cut off."""


class ReceiveTransferState(StateEnum):
    """State of one ticket's transfer into this rank."""

    RECEIVING = "receiving"
    """KV is missing, and the request continues."""
    LANDED = "landed"
    """All KV is in its pages, and all checksums match."""
    FAILED = "failed"
    """The leader has received `RankFailed`; no further segment is scattered."""
    CLOSING = "closing"
    """The leader ended the request. Ring regions may still be leased, and writers may still write."""
    CLOSED = "closed"
    """No rank can write the ticket's pages."""


class ReceiveTransferEvent(StateEnum):
    """Event of a transfer."""

    COMPLETED = "completed"
    """The last missing segment has landed."""
    FAIL = "fail"
    CLOSE = "close"
    """The leader ends the request."""
    DRAINED = "drained"
    """No ring region is held, and no writer can write."""


class Action(StateEnum):
    """Action that the caller performs after an event."""

    COUNT_LANDED = "count landed"
    """Add the segment's size to the transfer's landed bytes."""
    FREE_LEASE = "free lease"
    AWAIT_AGAIN = "await again"
    """Keep the lease and wait until the source sends the segment again."""
    SEND_STOP = "send stop"
    """Send `StopSending` to the source rank."""
    REPORT_LANDED = "report landed"
    """Send `Landed` to the leader and `TransferVerified` to the sources."""
    REPORT_FAILED = "report failed"
    """Send `RankFailed` to the leader."""
    REPORT_CLOSED = "report closed"
    """Forget the ticket, and send `RankClosed` to the leader."""


_DROPPED = Transition(ReceiveState.DROPPED, (Action.FREE_LEASE,))

SEGMENT_TRANSITIONS: StateTable[ReceiveState, SegmentEvent, Action] = {
    (ReceiveState.LEASED, SegmentEvent.ARRIVED): Transition(ReceiveState.RECEIVING),
    (ReceiveState.LEASED, SegmentEvent.REJECTED): _DROPPED,
    (ReceiveState.LEASED, SegmentEvent.CANCELLED): _DROPPED,
    (ReceiveState.RECEIVING, SegmentEvent.RECEIVED): Transition(ReceiveState.SCATTERING),
    (ReceiveState.RECEIVING, SegmentEvent.RECEIVED_VOID): _DROPPED,
    (ReceiveState.RECEIVING, SegmentEvent.RECEIVE_FAILED): _DROPPED,
    (ReceiveState.SCATTERING, SegmentEvent.LAUNCH_FAILED): _DROPPED,
    (ReceiveState.SCATTERING, SegmentEvent.VERIFIED): Transition(
        ReceiveState.LANDED, (Action.COUNT_LANDED, Action.FREE_LEASE)
    ),
    (ReceiveState.SCATTERING, SegmentEvent.DAMAGED): Transition(ReceiveState.LEASED, (Action.AWAIT_AGAIN,)),
    (ReceiveState.SCATTERING, SegmentEvent.ABANDONED): _DROPPED,
}

SOURCE_TRANSITIONS: StateTable[SourceState, SourceEvent, Action] = {
    (SourceState.SENDING, SourceEvent.STOP): Transition(SourceState.STOPPING, (Action.SEND_STOP,)),
    (SourceState.SENDING, SourceEvent.END): Transition(SourceState.ENDED),
    (SourceState.SENDING, SourceEvent.LOSE): Transition(SourceState.LOST),
    (SourceState.STOPPING, SourceEvent.STOP): Transition(SourceState.STOPPING),
    (SourceState.STOPPING, SourceEvent.END): Transition(SourceState.ENDED),
    (SourceState.STOPPING, SourceEvent.LOSE): Transition(SourceState.LOST),
    (SourceState.ENDED, SourceEvent.STOP): Transition(SourceState.ENDED),
    (SourceState.ENDED, SourceEvent.END): Transition(SourceState.ENDED),
    (SourceState.ENDED, SourceEvent.LOSE): Transition(SourceState.LOST),
    (SourceState.LOST, SourceEvent.STOP): Transition(SourceState.LOST),
    (SourceState.LOST, SourceEvent.LOSE): Transition(SourceState.LOST),
}

TRANSFER_TRANSITIONS: StateTable[ReceiveTransferState, ReceiveTransferEvent, Action] = {
    (ReceiveTransferState.RECEIVING, ReceiveTransferEvent.COMPLETED): Transition(
        ReceiveTransferState.LANDED, (Action.REPORT_LANDED,)
    ),
    (ReceiveTransferState.RECEIVING, ReceiveTransferEvent.FAIL): Transition(
        ReceiveTransferState.FAILED, (Action.REPORT_FAILED,)
    ),
    (ReceiveTransferState.RECEIVING, ReceiveTransferEvent.CLOSE): Transition(ReceiveTransferState.CLOSING),
    (ReceiveTransferState.LANDED, ReceiveTransferEvent.FAIL): Transition(
        ReceiveTransferState.FAILED, (Action.REPORT_FAILED,)
    ),
    (ReceiveTransferState.LANDED, ReceiveTransferEvent.CLOSE): Transition(ReceiveTransferState.CLOSING),
    # Segments whose scatter was launched before the error or the end still land; the leader may cache their pages.
    (ReceiveTransferState.FAILED, ReceiveTransferEvent.COMPLETED): Transition(
        ReceiveTransferState.FAILED, (Action.REPORT_LANDED,)
    ),
    (ReceiveTransferState.FAILED, ReceiveTransferEvent.FAIL): Transition(ReceiveTransferState.FAILED),
    (ReceiveTransferState.FAILED, ReceiveTransferEvent.CLOSE): Transition(ReceiveTransferState.CLOSING),
    (ReceiveTransferState.CLOSING, ReceiveTransferEvent.COMPLETED): Transition(
        ReceiveTransferState.CLOSING, (Action.REPORT_LANDED,)
    ),
    (ReceiveTransferState.CLOSING, ReceiveTransferEvent.FAIL): Transition(ReceiveTransferState.CLOSING),
    (ReceiveTransferState.CLOSING, ReceiveTransferEvent.CLOSE): Transition(ReceiveTransferState.CLOSING),
    (ReceiveTransferState.CLOSING, ReceiveTransferEvent.DRAINED): Transition(
        ReceiveTransferState.CLOSED, (Action.REPORT_CLOSED,)
    ),
    # The receive of a repeated completion notification can fail after the close.
    (ReceiveTransferState.CLOSED, ReceiveTransferEvent.FAIL): Transition(ReceiveTransferState.CLOSED),
}
