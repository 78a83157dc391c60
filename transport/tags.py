"""The 64-bit tag on every data message: which reservation, which writer, which segment.

    bit 63 ........ 32 | 31 ..... 20 | 19 ....... 0
    ticket number (32) | writer (12) | segment (20)

The ticket number is unique for the life of a decode group, so what a sender still had on the wire for an
earlier try never matches a current reservation: it is recognised by its tag alone and discarded. The two largest
numbers are no tickets': under one come *letters*, with 32 bits of their sender's name (`transport.letters`), under
the other the messages by which the wire is measured, with their probe's number.
"""

from __future__ import annotations

from typing import NamedTuple

TICKET_BITS, WRITER_BITS, SEGMENT_BITS = 32, 12, 20
TICKET_NUMBERS = (1 << TICKET_BITS) - 2
"""Tickets are numbered below it."""
_LETTERS, _PROBES = TICKET_NUMBERS, TICKET_NUMBERS + 1


class Tag(NamedTuple):
    """A tag's three numbers."""

    ticket: int
    """`Ticket.number`, below 2**32."""
    writer: int
    """Source rank, below 4096."""
    segment: int
    """`Segment.index`, below 2**20."""


def pack(ticket: int, writer: int, segment: int) -> int:
    """The tag as one unsigned 64-bit integer. Raises `ValueError` for a number that does not fit its
    field.
    """
    _fits("ticket", ticket, TICKET_BITS)
    _fits("writer", writer, WRITER_BITS)
    _fits("segment", segment, SEGMENT_BITS)
    return ticket << (WRITER_BITS + SEGMENT_BITS) | writer << SEGMENT_BITS | segment


def unpack(tag: int) -> Tag:
    """The inverse of `pack`. Raises `ValueError` unless `0 <= tag < 2**64`."""
    _fits("tag", tag, 64)
    return Tag(
        ticket=tag >> (WRITER_BITS + SEGMENT_BITS),
        writer=(tag >> SEGMENT_BITS) & ((1 << WRITER_BITS) - 1),
        segment=tag & ((1 << SEGMENT_BITS) - 1),
    )


def letter_tag(sender: int) -> int:
    """The tag of letters from `sender`, a number of 32 bits. Raises `ValueError` for one that is larger."""
    _fits("sender", sender, WRITER_BITS + SEGMENT_BITS)
    return _LETTERS << (WRITER_BITS + SEGMENT_BITS) | sender


def is_letter(tag: int) -> bool:
    """Whether a letter came under `tag`."""
    return tag >> (WRITER_BITS + SEGMENT_BITS) == _LETTERS


def probe_tag(number: int) -> int:
    """The tag of a probe's messages, by its number of 32 bits. Raises `ValueError` for one that is larger."""
    _fits("probe", number, WRITER_BITS + SEGMENT_BITS)
    return _PROBES << (WRITER_BITS + SEGMENT_BITS) | number


def is_probe(tag: int) -> bool:
    """Whether a probe's message came under `tag`."""
    return tag >> (WRITER_BITS + SEGMENT_BITS) == _PROBES


def _fits(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise ValueError(
            f"{name} {value} does not fit a tag's {bits} bits: expected 0 <= {name} < {1 << bits}"
        )
