"""A prefill rank's staging: the memory that segments are sent from, and who holds which part of it.

a segment     from `take` to `free`: its send has ended, or will never begin
nobody        from `quarantine` until its time is over: a peer that was lost may still read it
a probe       what it takes and frees by itself (`prefill_node.probe`)
"""

from __future__ import annotations

import math
from collections import deque

import torch

from disagg.core.errors import InvariantError
from disagg.core.ports import Clock
from prefill_node.outgoing import Item
from staging.allocator import Lease, StagingAllocator
from staging.buffer import StagingBuffer


class StagingSpace:
    """`size_bytes` of memory on a device. Owned by the transfer thread."""

    def __init__(self, size_bytes: int, device: torch.device, quarantine_s: float, clock: Clock) -> None:
        """`quarantine_s`: a peer that we took for dead has noticed by then, and reads our memory no more."""
        self.buffer = StagingBuffer(size_bytes, device)
        self.allocator = StagingAllocator(size_bytes)
        self._quarantine_s, self._clock = quarantine_s, clock
        self._quarantined: deque[tuple[float, Lease]] = deque()
        self.due_s = math.inf
        """When `end_quarantines` has something to do."""

    def take(self, item: Item) -> None:
        """A place for the segment, maybe still occupied: it is gathered when that is `writable`."""
        item.lease = self.allocator.assign(item.message_bytes, owner=item.outgoing.key)

    def writable(self, item: Item) -> bool:
        """Whether nothing else is in the segment's place any more."""
        assert item.lease is not None, "a segment that waits for staging has its place"
        return self.allocator.writable(item.lease)

    def view(self, item: Item) -> torch.Tensor:
        """The segment's place, uint8 `[message_bytes]`."""
        assert item.lease is not None, "a segment that is gathered or sent holds staging"
        return self.buffer.view(self.allocator.offset(item.lease), item.message_bytes)

    def free(self, lease: Lease) -> None:
        """Nothing reads the region any more, nor will."""
        self.allocator.free(lease.id)

    def quarantine(self, item: Item) -> None:
        """Keeps the segment's region for a while: a peer that only was silent may still read, and believe, it."""
        if item.lease is not None:
            self._quarantined.append((self._clock() + self._quarantine_s, item.lease))
            item.lease = None
            self.due_s = self._quarantined[0][0]

    def end_quarantines(self, now_s: float) -> None:
        """Frees what has been kept for long enough."""
        while self._quarantined and self._quarantined[0][0] <= now_s:
            self.free(self._quarantined.popleft()[1])
        self.due_s = self._quarantined[0][0] if self._quarantined else math.inf

    @property
    def quarantined_bytes(self) -> int:
        """Kept from use, for a lost peer's sake."""
        return sum(lease.nbytes for _, lease in self._quarantined)

    @property
    def in_use_bytes(self) -> int:
        """Held by segments and probes."""
        return self.allocator.in_use_bytes - self.quarantined_bytes

    def check(self, segments: int, probes: int) -> None:
        """Raises `InvariantError` unless it is held by so many segments and probes."""
        self.allocator.check()
        leases, quarantined = self.allocator.statistics().leases, len(self._quarantined)
        if segments + quarantined + probes != leases:
            raise InvariantError(
                f"{segments} segments and {probes} probes hold staging, {quarantined} regions wait; leases: {leases}"
            )
