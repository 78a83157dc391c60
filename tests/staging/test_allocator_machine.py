"""The ring driven at random: senders with stale watermarks, late and unordered frees, aborts, deaths.

A shadow of the ring's memory holds, for each byte, the lease that wrote it last. A write onto a byte of
another lease that is still held, or a lease that finds other bytes than its own when it is scattered, is
corruption.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from staging.allocator import Lease, StagingAllocator, is_writable

SENDERS = st.integers(0, 3)
NO_LEASE = -1


class Ring(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(alignment_bytes=st.sampled_from([1, 3, 8]), units=st.integers(1, 24))
    def start(self, alignment_bytes: int, units: int) -> None:
        self.ring = StagingAllocator(alignment_bytes * units, alignment_bytes)
        self.size_bytes = alignment_bytes * units
        self.memory = np.full(self.size_bytes, NO_LEASE)
        self.known_watermark = dict.fromkeys(range(4), 0)
        self.last_watermark = 0
        self.leases: dict[int, Lease] = {}
        self.written: set[int] = set()

    def region(self, lease: Lease) -> slice:
        offset = self.ring.offset(lease)
        return slice(offset, offset + lease.nbytes)

    def forget(self, lease: Lease) -> None:
        del self.leases[lease.id]
        self.written.discard(lease.id)

    @rule(target=held, sender=SENDERS, share=st.floats(0, 1))
    def assign(self, sender: int, share: float) -> Lease:
        lease = self.ring.assign(1 + int(share * (self.size_bytes - 1)), sender)
        assert lease.id not in self.leases
        self.leases[lease.id] = lease
        return lease

    @rule(sender=SENDERS)
    def publish(self, sender: int) -> None:
        """Updates the sender's watermark; until then the sender uses an old one."""
        self.known_watermark[sender] = self.ring.watermark

    @rule(lease=held)
    def write(self, lease: Lease) -> None:
        """The sender writes when the watermark that it knows of allows it."""
        if lease.id not in self.leases or not is_writable(
            lease.end, self.known_watermark[lease.owner], self.size_bytes
        ):
            return
        assert self.ring.writable(lease), "a stale watermark said yes too early"
        there = set(self.memory[self.region(lease)].tolist()) - {NO_LEASE, lease.id}
        assert not there & self.leases.keys(), f"{lease} overwrites leases {there} that are still held"
        self.memory[self.region(lease)] = lease.id
        self.written.add(lease.id)

    @rule(lease=consumes(held))
    def scatter_and_free(self, lease: Lease) -> None:
        """The receiver is done with a segment; it finds there what was sent."""
        if lease.id not in self.leases:
            return
        if lease.id in self.written:
            assert (self.memory[self.region(lease)] == lease.id).all(), f"{lease} was overwritten"
        assert self.ring.free(lease.id) == lease  # an abort, when it was never written
        self.forget(lease)

    @rule(target=held, lease=consumes(held))
    def free_late_and_again(self, lease: Lease) -> object:
        """A lease that went with its owner cannot be freed again."""
        if lease.id in self.leases:
            return lease
        try:
            self.ring.free(lease.id)
        except ValueError:
            return multiple()
        raise AssertionError(f"{lease} was freed twice")

    @rule(sender=SENDERS)
    def die(self, sender: int) -> None:
        freed = self.ring.free_owner(sender)
        assert freed == tuple(lease for lease in self.leases.values() if lease.owner == sender)
        for lease in freed:
            self.forget(lease)

    @invariant()
    def sound(self) -> None:
        self.ring.check()
        assert self.ring.outstanding() == tuple(self.leases.values())

    @invariant()
    def watermark_never_falls(self) -> None:
        assert self.ring.watermark >= self.last_watermark
        self.last_watermark = self.ring.watermark

    @invariant()
    def oldest_can_always_be_written(self) -> None:
        oldest = self.ring.oldest()
        assert (oldest is None) == (not self.leases)
        assert oldest is None or self.ring.writable(oldest)

    @invariant()
    def no_byte_is_writable_by_two(self) -> None:
        owners = np.zeros(self.size_bytes, dtype=np.int64)
        for lease in self.leases.values():
            if self.ring.writable(lease):
                owners[self.region(lease)] += 1
        assert owners.max() <= 1


TestRing = Ring.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
