"""Transfer of KV: messages between prefill ranks and decode ranks.

The messages from `LeaseRequest` to `ProbeEnded` are active messages (`transport.active_messages`). The messages after
`ProbeEnded` use the control channel.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from disagg.core.bounds import Count, Label
from disagg.core.types import RequestKey, Segment
from transport.control.messages.base import (
    InboxNumber,
    Message,
    ProbeNumber,
    Rank,
    SegmentIndex,
    TicketNumber,
)
from transport.handles import BoardHandle, MemoryHandle


class LeaseRequest(Message, frozen=True):
    """Prefill rank -> decode rank: requests ring space for these segments."""

    key: RequestKey
    ticket: TicketNumber
    src_rank: Rank
    segments: list[Segment]


class LeaseGrant(Message, frozen=True):
    """Decode rank -> prefill rank: grants ring space. `watermark` is the ring's current watermark."""

    key: RequestKey
    ticket: TicketNumber
    dst_rank: Rank
    starts: list[tuple[SegmentIndex, Count]]
    """A `(segment index, start of the lease)` pair for each segment; the start is a ring position."""
    ring_bytes: Count
    watermark: Count


class Watermark(Message, frozen=True):
    """Decode rank -> prefill ranks: the ring's current watermark, which never decreases."""

    dst_rank: Rank
    watermark: Count
    ring_bytes: Count


class SendAgain(Message, frozen=True):
    """Decode rank -> prefill rank: resend a segment whose checksum does not match.

    The resend uses the same lease or the same direct write. Idempotent.
    """

    key: RequestKey
    ticket: TicketNumber
    dst_rank: Rank
    segment: SegmentIndex


class TransferVerified(Message, frozen=True):
    """Decode rank -> each of its prefill ranks: all segments of the tickets are in the tickets' pages, with valid
    checksums."""

    tickets: Annotated[list[tuple[RequestKey, TicketNumber]], msgspec.Meta(min_length=1)]
    dst_rank: Rank


class ProbeRequest(Message, frozen=True):
    """Prefill rank -> decode rank: requests a wire probe with messages of at most `nbytes`. Idempotent."""

    number: ProbeNumber
    """Random number of the probe; part of the tag of the probe's messages."""
    nbytes: Annotated[int, msgspec.Meta(ge=1)]


class ProbeAnswer(Message, frozen=True):
    """Decode rank -> prefill rank: the probe may start, or is refused. The decode rank runs on `host` and
    `device`."""

    number: ProbeNumber
    host: Label
    device: Label
    refused: str = ""
    """Temporary reason for a refusal, after which the prefill rank may repeat the request. Empty if the probe may
    start."""


class ProbeEnded(Message, frozen=True):
    """Prefill rank -> decode rank: the probe has ended; the probe's ring space may be freed."""

    number: ProbeNumber


class PoolOffer(Message, frozen=True):
    """Decode rank -> prefill rank: offers the KV pool and the fence words for direct writes."""

    dst_rank: Rank
    pools: tuple[MemoryHandle, ...]
    """The pool of each layer class, then each allocation of recurrent states."""
    fences: MemoryHandle
    board: BoardHandle | None = None
    """Completion words for the writes of this prefill rank; None if each write needs a notification."""


class PoolRefused(Message, frozen=True):
    """Prefill rank -> decode rank: this rank cannot open the offered pool. Tickets opened from now on do not use
    direct writes."""

    src_rank: Rank
    reason: str


class LinkBroken(Message, frozen=True):
    """Rank -> peer rank: the data connection between the two ranks is broken; the sender has fenced the receiver."""

    answer: bool = False
    """True in a reply. A message with False is always answered by a message with True."""


class Linked(Message, frozen=True):
    """Rank -> peer rank: the sender has linked the receiver; the receiver's active messages go to inbox `inbox`."""

    inbox: InboxNumber


class SenderEnded(Message, frozen=True):
    """Prefill rank -> decode rank: the segments `sent` were sent, and no further segments follow for this ticket."""

    key: RequestKey
    ticket: TicketNumber
    src_rank: Rank
    sent: list[SegmentIndex]
    reason: str
    again: list[SegmentIndex] = msgspec.field(default_factory=list)
    """Segments among `sent` that were sent a second time."""


class StopSending(Message, frozen=True):
    """Decode rank -> prefill rank: stop sending for this ticket. The prefill rank replies with `SenderEnded`."""

    key: RequestKey
    ticket: TicketNumber
    reason: str
