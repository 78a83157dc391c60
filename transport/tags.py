"""The 64-bit tag of every data message: ticket, writer, and segment.

    bit 63 ........ 32 | 31 ..... 20 | 19 ....... 0
    ticket number (32) | writer (12) | segment (20)

The ticket number is unique for the life of a decode group. A message still in flight from an earlier attempt
therefore never matches a current reservation, and is discarded by its tag. The two largest ticket numbers are
reserved. One marks active messages, and the tag then has the number of the receiver's inbox
(`transport.active_messages`). The other marks wire probes, and the tag then has the probe's number.
"""

from __future__ import annotations

from typing import NamedTuple

TICKET_BITS, WRITER_BITS, SEGMENT_BITS = 32, 12, 20
TICKET_NUMBERS = (1 << TICKET_BITS) - 2
"""Upper bound (exclusive) of ticket numbers."""
INBOX_NUMBERS = 1 << (WRITER_BITS + SEGMENT_BITS)
"""Upper bound (exclusive) of inbox numbers."""
_ACTIVE_MESSAGES, _PROBES = TICKET_NUMBERS, TICKET_NUMBERS + 1


class Tag(NamedTuple):
    """The three numbers in a tag."""

    ticket: int
    """Number of the ticket (`Ticket.number`), below 2**32."""
    writer: int
    """Source rank, below 4096."""
    segment: int
    """Index of the segment (`Segment.index`), below 2**20."""


def pack(ticket: int, writer: int, segment: int) -> int:
    """Returns the tag as an unsigned 64-bit integer. Raises `ValueError` for a number that exceeds its field."""
    _fits("ticket", ticket, TICKET_BITS)
    _fits("writer", writer, WRITER_BITS)
    _fits("segment", segment, SEGMENT_BITS)
    return ticket << (WRITER_BITS + SEGMENT_BITS) | writer << SEGMENT_BITS | segment


def unpack(tag: int) -> Tag:
    """Returns the three numbers of a tag; the inverse of `pack`. Raises `ValueError` unless `0 <= tag <
    2**64`."""
    _fits("tag", tag, 64)
    return Tag(
        ticket=tag >> (WRITER_BITS + SEGMENT_BITS),
        writer=(tag >> SEGMENT_BITS) & ((1 << WRITER_BITS) - 1),
        segment=tag & ((1 << SEGMENT_BITS) - 1),
    )


def active_message_tag(inbox: int) -> int:
    """Returns the tag of active messages to an inbox, by its 32-bit number. Raises `ValueError` for a larger
    number."""
    _fits("inbox", inbox, WRITER_BITS + SEGMENT_BITS)
    return _ACTIVE_MESSAGES << (WRITER_BITS + SEGMENT_BITS) | inbox


def inbox_of(tag: int) -> int:
    """Returns the inbox number in the tag of an active message."""
    return tag & (INBOX_NUMBERS - 1)


def is_active_message(tag: int) -> bool:
    """Returns whether `tag` belongs to an active message."""
    return tag >> (WRITER_BITS + SEGMENT_BITS) == _ACTIVE_MESSAGES


def probe_tag(number: int) -> int:
    """Returns the tag of a probe's messages, by its 32-bit number. Raises `ValueError` for a larger number."""
    _fits("probe", number, WRITER_BITS + SEGMENT_BITS)
    return _PROBES << (WRITER_BITS + SEGMENT_BITS) | number


def is_probe(tag: int) -> bool:
    """Returns whether `tag` belongs to a message of a wire probe."""
    return tag >> (WRITER_BITS + SEGMENT_BITS) == _PROBES


def _fits(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise ValueError(
            f"{name} {value} does not fit a tag's {bits} bits: expected 0 <= {name} < {1 << bits}"
        )
