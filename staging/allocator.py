"""Allocator of a staging ring with watermark and overcommit. The allocator computes positions and touches no memory.

Positions are byte counters that only grow (64 bits on the wire); `position % size_bytes` is the memory offset. A
lease `[start, end)` never wraps: a lease that would wrap starts at the next multiple of the size instead. Leases are
granted beyond the free space (overcommit), so `assign` never blocks. A lease may be *written* once
`end <= watermark + size`. The watermark is the start of the oldest unfreed lease, or the head if all leases are
freed.

Why no byte has two owners: every unfreed lease starts at or past the watermark. The memory of its position `p` is
reused first at position `p + size >= watermark + size`, which is at or past the end of every writable lease.

Why the ring never stalls: for the oldest lease, `watermark + size - end = size - nbytes >= 0`, so this lease is
writable. Skipped bytes belong to no lease. The watermark passes over them when the lease before them is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from disagg.core.errors import InvariantError

ALIGNMENT_BYTES = 256
"""Alignment of lease starts. The sizes of rings and staging buffers are multiples of this value."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A range of ring positions, `[start, end)`, that belongs to `owner` until the lease is freed."""

    id: int
    start: int
    end: int
    owner: Hashable

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """A snapshot of the ring, for metrics and tests."""

    size_bytes: int
    """Size of the ring memory."""
    head: int
    """End position of the last assigned lease."""
    watermark: int
    """Start of the oldest unfreed lease, or the head."""
    in_use_bytes: int
    """Bytes of unfreed leases; more than `size_bytes` when overcommitted."""
    peak_in_use_bytes: int
    """Peak of `in_use_bytes`."""
    leases: int
    """Number of unfreed leases."""
    assigned: int
    """Number of leases assigned so far."""
    waited: int
    """Number of leases that were not writable when assigned."""
    skipped_bytes: int
    """Bytes skipped so that no lease wraps, not counting bytes skipped for alignment."""


def is_writable(end: int, watermark: int, size_bytes: int) -> bool:
    """Returns whether a lease that ends at position `end` may be written. Sender and receiver both apply this rule.

    A stale watermark is safe: a stale value is smaller, so the lease becomes writable later, never too early.
    """
    return end <= watermark + size_bytes


class StagingAllocator:
    """Grants ring space. Each call is O(1) amortised (`free_owner`: per lease freed). Not thread-safe.

    `size_bytes` must be a multiple of `alignment_bytes`; every lease starts at a multiple of `alignment_bytes`.
    Raises ValueError when a size is below 1 or `size_bytes` is not such a multiple.
    """

    def __init__(self, size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        if alignment_bytes < 1 or size_bytes < 1 or size_bytes % alignment_bytes:
            raise ValueError(
                "size_bytes must be a positive multiple of alignment_bytes; "
                f"got {size_bytes} and {alignment_bytes}"
            )
        self.size_bytes = size_bytes
        self.alignment_bytes = alignment_bytes
        self.head = 0
        """End position of the newest lease. Callers only read this attribute and the next four."""
        self._next_id = 0
        self.order: deque[Lease] = deque()
        """Leases in the order of assignment; freed leases are dropped at the front."""
        self.leases: dict[int, Lease] = {}
        """Unfreed leases, oldest first, by id."""
        self.by_owner: dict[Hashable, dict[int, None]] = {}
        """Ids of unfreed leases, oldest first, by owner."""
        self.in_use_bytes = 0
        """Bytes of unfreed leases; more than `size_bytes` when overcommitted."""
        self._peak_in_use_bytes = 0
        self._waited = 0
        self._skipped_bytes = 0

    @property
    def watermark(self) -> int:
        """Start of the oldest unfreed lease, or the head when there is none. The watermark never decreases."""
        return self.order[0].start if self.order else self.head

    @property
    def waited(self) -> int:
        """Number of leases that were not writable when assigned."""
        return self._waited

    def assign(self, nbytes: int, owner: Hashable) -> Lease:
        """Returns a new lease of `nbytes` for `owner`, which must free the lease. The lease may be written once
        `writable` returns True.

        Raises ValueError when `nbytes` is below 1 or exceeds the size of the ring.
        """
        if not 1 <= nbytes <= self.size_bytes:
            raise ValueError(f"a lease needs 1 to {self.size_bytes} bytes (the ring's size); got {nbytes}")
        start = -(-self.head // self.alignment_bytes) * self.alignment_bytes
        left = self.size_bytes - start % self.size_bytes
        if nbytes > left:
            start += left
            self._skipped_bytes += left
        lease = Lease(self._next_id, start, start + nbytes, owner)
        self._next_id += 1
        self.head = lease.end
        self.order.append(lease)
        self.leases[lease.id] = lease
        self.by_owner.setdefault(owner, {})[lease.id] = None
        self.in_use_bytes += nbytes
        self._peak_in_use_bytes = max(self._peak_in_use_bytes, self.in_use_bytes)
        self._waited += not self.writable(lease)
        return lease

    def writable(self, lease: Lease) -> bool:
        """Returns whether `lease` may be written now. A writable lease stays writable until it is freed."""
        return is_writable(lease.end, self.watermark, self.size_bytes)

    def offset(self, lease: Lease) -> int:
        """Returns the memory offset of `lease`, in bytes."""
        return lease.start % self.size_bytes

    def free(self, lease_id: int) -> Lease:
        """Frees a lease; leases may be freed in any order.

        The caller guarantees that no later write to the lease occurs. Raises ValueError for an unknown lease (never
        assigned, or already freed).
        """
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            raise ValueError(f"lease {lease_id} is not held: never assigned, or freed before")
        owned = self.by_owner[lease.owner]
        del owned[lease_id]
        if not owned:
            del self.by_owner[lease.owner]
        self.in_use_bytes -= lease.nbytes
        while self.order and self.order[0].id not in self.leases:
            self.order.popleft()
        return lease

    def free_owner(self, owner: Hashable) -> tuple[Lease, ...]:
        """Frees and returns all leases of `owner`, possibly none. The caller guarantees that no later write to these
        leases occurs."""
        return tuple(self.free(lease_id) for lease_id in list(self.by_owner.get(owner, ())))

    def oldest(self) -> Lease | None:
        """Returns the oldest unfreed lease, which is always writable; None when all leases are freed."""
        return self.order[0] if self.order else None

    def outstanding(self) -> tuple[Lease, ...]:
        """Returns all unfreed leases, oldest first."""
        return tuple(self.leases.values())

    def statistics(self) -> RingStatistics:
        """Returns a snapshot of the ring."""
        return RingStatistics(
            size_bytes=self.size_bytes,
            head=self.head,
            watermark=self.watermark,
            in_use_bytes=self.in_use_bytes,
            peak_in_use_bytes=self._peak_in_use_bytes,
            leases=len(self.leases),
            assigned=self._next_id,
            waited=self._waited,
            skipped_bytes=self._skipped_bytes,
        )

    def check(self) -> None:
        """Verifies every invariant, in O(leases); raises InvariantError with a dump of the ring."""
        leases = self.outstanding()
        oldest = self.oldest()
        if oldest:
            self._require(oldest.id in self.leases, "a freed lease holds the watermark")
            self._require(self.writable(oldest), "the oldest lease is not writable")
        self._require(
            [x for x in self.order if x.id in self.leases] == list(leases), "order and leases differ"
        )
        self._require(self.in_use_bytes == sum(lease.nbytes for lease in leases), "bytes in use miscounted")
        owned = sorted(lease_id for ids in self.by_owner.values() for lease_id in ids)
        self._require(owned == [lease.id for lease in leases], "owners and leases differ")
        self._require(all(self.by_owner.values()), "an owner without a lease is kept")
        previous = self.watermark
        for lease in leases:
            self._require(
                previous <= lease.start < lease.end <= self.head, f"{lease} overlaps or is out of order"
            )
            self._require(lease.start % self.alignment_bytes == 0, f"{lease} is not aligned")
            self._require(self.offset(lease) + lease.nbytes <= self.size_bytes, f"{lease} wraps")
            self._require(lease.id in self.by_owner.get(lease.owner, ()), f"{lease} is under another owner")
            previous = lease.end

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvariantError(f"ring: {what}; {self.statistics()}; leases {self.outstanding()}")
