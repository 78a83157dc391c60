"""A rank's fetch from the storage: its batches under way, the items that have landed, and the time of its reads.

Several batches of a fetch are read at the same time, and may end in any order. An item has landed when all items
before it have landed too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from disagg.core.ports import Clock
from disagg.kv.cache_operations import StorageOperation


@dataclass(slots=True, eq=False)
class ReadBatch:
    """A batch of a fetch that is being read, or has ended before an earlier one."""

    count: int
    """Number of its items."""
    landed: int | None = None
    """Number of its leading items that have landed; None during the read."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A find or a fetch under way. The controller's lock guards all fields except `unwanted`."""

    operation: StorageOperation
    until_s: float
    landed: int = 0
    """Number of leading items that have landed, or were found."""
    states: list[int] = field(default_factory=list)
    """For a find: see `StorageReport.states`."""
    seconds: float = 0.0
    """Time spent on reads, without the time in the queue; see `ReadTimes`."""
    unwanted: bool = False
    begun: int = 0
    """Number of leading items whose batches have begun."""
    stopped: bool = False
    """Whether no further batch begins: the limit has passed, an item is missing, or all batches have begun."""
    missed: bool = False
    """Whether an item is missing, so that items behind it do not count."""
    error: str = ""
    _batches: deque[ReadBatch] = field(default_factory=deque)
    """Batches whose items have not been counted yet, in their order."""

    @property
    def ended(self) -> bool:
        """Whether no batch is under way, and none will begin."""
        return self.stopped and all(one.landed is not None for one in self._batches)

    def begin(self, count: int) -> ReadBatch:
        """Adds a batch of the next `count` items."""
        operation = self.operation
        self._batches.append(ReadBatch(count))
        self.begun += count
        self.stopped |= self.begun == len(operation.links) + len(operation.state_links)
        return self._batches[-1]

    def end(self, batch: ReadBatch, landed: int, error: str) -> None:
        """Records the end of a batch, and counts the items that have landed now."""
        batch.landed = landed
        self.error = self.error or error
        self.stopped |= landed < batch.count
        while not self.missed and self._batches and (first := self._batches[0].landed) is not None:
            self.landed += first
            self.missed = first < self._batches.popleft().count


class ReadTimes:
    """Divides the time of reads among the fetches under way. Not thread-safe.

    Fetches that are read at the same time share the storage, so each counts an equal share of the time: the sum over
    all fetches is the time in which something was read.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._since_s = clock, 0.0
        self._reading: dict[Fetch, int] = {}
        """Number of batches of each fetch that are being read."""

    def began(self, fetch: Fetch) -> None:
        """Records that a batch of `fetch` is being read."""
        self._count()
        self._reading[fetch] = self._reading.get(fetch, 0) + 1

    def ended(self, fetch: Fetch) -> None:
        """Records the end of a batch of `fetch`."""
        self._count()
        self._reading[fetch] -= 1
        if not self._reading[fetch]:
            del self._reading[fetch]

    def _count(self) -> None:
        now_s = self._clock()
        for fetch in self._reading:
            fetch.seconds += (now_s - self._since_s) / len(self._reading)
        self._since_s = now_s
