"""Staging of a prefill rank: the memory that segments are sent from, and the holder of each region.

a segment     from `take` to `free`: the segment's send has ended, or will never begin
quarantine    from `quarantine` to its end: a lost peer may still read the region
a probe       takes and frees regions by itself (`prefill_node.probe`)
"""

from __future__ import annotations

import math
from collections import deque

import torch

from disagg.core.errors import InvariantError
from disagg.core.ports import Clock
from prefill_node.outgoing import OutgoingSegment
from staging.allocator import Lease, StagingAllocator
from staging.buffer import StagingBuffer


class StagingSpace:
    """Staging memory of a prefill rank, `size_bytes` on a device. Owned by the transfer thread."""

    def __init__(self, size_bytes: int, device: torch.device, quarantine_s: float, clock: Clock) -> None:
        """`quarantine_s`: time within which a lost peer closes its connection and stops reading this memory."""
        self.buffer = StagingBuffer(size_bytes, device)
        self.allocator = StagingAllocator(size_bytes)
        self._quarantine_s, self._clock = quarantine_s, clock
        self._quarantined: deque[tuple[float, Lease]] = deque()
        self.due_s = math.inf
        """Time at which the next quarantine ends: `end_quarantines` must be called then."""

    def take(self, item: OutgoingSegment) -> None:
        """Assigns a region to the segment.

        An earlier segment may still hold the region: the gather waits until it is `writable`.
        """
        item.lease = self.allocator.assign(item.message_bytes, owner=item.outgoing.key)

    def writable(self, item: OutgoingSegment) -> bool:
        """Returns whether earlier holders of the segment's region have freed it."""
        assert item.lease is not None, "a segment that waits for staging has its region"
        return self.allocator.writable(item.lease)

    def view(self, item: OutgoingSegment) -> torch.Tensor:
        """Returns the segment's region, uint8 `[message_bytes]`."""
        assert item.lease is not None, "a segment that is gathered or sent holds staging"
        return self.buffer.view(self.allocator.offset(item.lease), item.message_bytes)

    def free(self, lease: Lease) -> None:
        """Frees a region that neither a copy nor a send uses."""
        self.allocator.free(lease.id)

    def quarantine(self, item: OutgoingSegment) -> None:
        """Keeps the segment's region for `quarantine_s`: a peer that was only silent may still read it and accept the
        message."""
        if item.lease is not None:
            self._quarantined.append((self._clock() + self._quarantine_s, item.lease))
            item.lease = None
            self.due_s = self._quarantined[0][0]

    def end_quarantines(self, now_s: float) -> None:
        """Frees the regions whose quarantine is over."""
        while self._quarantined and self._quarantined[0][0] <= now_s:
            self.free(self._quarantined.popleft()[1])
        self.due_s = self._quarantined[0][0] if self._quarantined else math.inf

    @property
    def quarantined_bytes(self) -> int:
        """Bytes in quarantine."""
        return sum(lease.nbytes for _, lease in self._quarantined)

    @property
    def in_use_bytes(self) -> int:
        """Bytes held by segments and probes."""
        return self.allocator.in_use_bytes - self.quarantined_bytes

    def check(self, segments: int, probes: int) -> None:
        """Raises `InvariantError` unless exactly `segments` segments and `probes` probes hold regions."""
        self.allocator.check()
        leases, quarantined = self.allocator.statistics().leases, len(self._quarantined)
        if segments + quarantined + probes != leases:
            raise InvariantError(
                f"{segments} segments and {probes} probes hold staging, {quarantined} regions are in quarantine; "
                f"leases: {leases}"
            )
