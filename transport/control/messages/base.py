"""Base class of the messages, and the bounded types of their fields."""

from __future__ import annotations

from typing import Annotated

import msgspec

from transport.tags import INBOX_NUMBERS, SEGMENT_BITS, TICKET_NUMBERS, WRITER_BITS

TicketNumber = Annotated[int, msgspec.Meta(ge=0, lt=TICKET_NUMBERS)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << WRITER_BITS)]
SegmentIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << SEGMENT_BITS)]
ProbeNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << (WRITER_BITS + SEGMENT_BITS))]
InboxNumber = Annotated[int, msgspec.Meta(ge=0, lt=INBOX_NUMBERS)]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base class of all messages."""
