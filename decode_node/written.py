"""Records the direct writes of one transfer: received and missing completion notifications, and repairs."""

from __future__ import annotations

from collections.abc import Iterator

from decode_node.coverage import Coverage
from disagg.core.types import Segment
from transport.completion_notifications import Written

SegmentName = tuple[int, int]
"""(source rank, segment index)."""


class WrittenSegments:
    """Record of one transfer's segments that prefill ranks write directly. Owned by the transfer thread."""

    def __init__(self) -> None:
        self._first: set[SegmentName] = set()
        self._second: set[SegmentName] = set()
        """Segments whose second write was notified."""
        self._repairs: dict[SegmentName, Segment] = {}
        """Damaged segments that their source writes again."""
        self._owed: set[tuple[int, int, bool]] = set()
        """(source rank, segment index, second write) of notifications that an ended source still owes."""
        self._early: list[Written] = []
        """Notified segments whose predecessor is not notified yet."""

    def notified(self, name: SegmentName, again: bool) -> bool:
        """Records a notification; returns True unless it is a repetition."""
        known = self._second if again else self._first
        new = name not in known
        known.add(name)
        self._owed.discard((*name, again))
        return new

    def in_order(self, written: Written, coverage: Coverage) -> Iterator[Written]:
        """Stores a notified segment; yields each stored segment whose predecessors on its route were all notified.

        Adds each yielded segment to `coverage`.
        Raises `ProtocolError` for a segment that is on no route, or overlaps another one.
        """
        self._early.append(written)
        while ready := [one for one in self._early if not coverage.is_early(one.segment)]:
            for each in ready:
                self._early.remove(each)
                coverage.add(each.segment)
                yield each

    def await_repair(self, segment: Segment) -> None:
        """Records that the source writes the segment a second time."""
        self._repairs[segment.src_rank, segment.index] = segment

    def repair_of(self, name: SegmentName) -> Segment | None:
        """Returns the segment that a second write must match; None when no second write was requested."""
        return self._repairs.get(name)

    def owe(self, src_rank: int, sent: set[int], again: set[int]) -> bool:
        """Records which completion notifications an ended source still owes.

        `sent`, `again`: indices of the segments that the source has written, and those that it has written a second
        time. Returns True while any source owes notifications.
        """
        first = {(src_rank, index, False) for index in sent if (src_rank, index) not in self._first}
        second = {(src_rank, index, True) for index in again if (src_rank, index) not in self._second}
        self._owed = {name for name in self._owed if name[0] != src_rank} | first | second
        return bool(self._owed)

    def forgive(self) -> None:
        """Clears the notifications that ended sources still owe, so that nothing waits for them."""
        self._owed.clear()

    def debtors(self) -> set[int]:
        """Returns the source ranks that owe notifications."""
        return {src_rank for src_rank, *_ in self._owed}
