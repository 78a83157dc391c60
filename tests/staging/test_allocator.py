"""The ring by example; `test_allocator_machine.py` drives it at random."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from disagg.core.errors import InvariantError
from staging.allocator import Lease, StagingAllocator, is_writable


def test_leases_follow_each_other_aligned() -> None:
    ring = StagingAllocator(1024, alignment_bytes=64)
    first, second = ring.assign(100, "a"), ring.assign(64, "b")
    assert first == Lease(0, 0, 100, "a")
    assert second == Lease(1, 128, 192, "b")
    assert (ring.offset(second), second.nbytes) == (128, 64)
    assert ring.outstanding() == (first, second)
    assert ring.oldest() == first
    ring.check()


def test_a_lease_skips_rather_than_wraps_and_positions_keep_growing() -> None:
    ring = StagingAllocator(1024, alignment_bytes=64)
    first = ring.assign(640, "a")
    second = ring.assign(448, "a")
    assert (second.start, ring.offset(second)) == (1024, 0)
    assert not ring.writable(second), "its bytes are still the first lease's"
    assert ring.statistics().skipped_bytes == 384
    ring.free(first.id)
    assert ring.watermark == 1024, "the skipped bytes belong to no lease"
    assert ring.writable(second)
    ring.free(second.id)
    assert ring.watermark == 1472
    third = ring.assign(1024, "a")
    assert (third.start, ring.writable(third)) == (2048, True)
    ring.check()


def test_an_overcommitted_lease_waits_for_exactly_the_bytes_it_needs() -> None:
    ring = StagingAllocator(1024, alignment_bytes=64)
    small, large = ring.assign(64, "a"), ring.assign(960, "a")
    waits_for_small, waits_for_large = ring.assign(64, "b"), ring.assign(64, "b")
    assert ring.statistics().in_use_bytes == 1152
    assert ring.statistics().waited == 2
    assert [ring.writable(x) for x in (small, large, waits_for_small, waits_for_large)] == [1, 1, 0, 0]
    ring.free(small.id)
    assert [ring.writable(x) for x in (waits_for_small, waits_for_large)] == [1, 0]
    ring.free(large.id)
    assert ring.writable(waits_for_large)
    ring.check()


def test_out_of_order_frees_move_the_watermark_once_the_oldest_is_free() -> None:
    ring = StagingAllocator(1024, alignment_bytes=64)
    leases = [ring.assign(128, "a") for _ in range(4)]
    ring.free(leases[2].id)
    ring.free(leases[1].id)
    assert ring.watermark == 0
    ring.check()
    ring.free(leases[0].id)
    assert ring.watermark == leases[3].start
    assert ring.oldest() == leases[3]
    ring.free(leases[3].id)
    assert (ring.watermark, ring.oldest(), ring.outstanding()) == (512, None, ())
    ring.check()


def test_free_owner_frees_all_of_one_and_nothing_else() -> None:
    ring = StagingAllocator(1024, alignment_bytes=64)
    dead = [ring.assign(64, "dead"), ring.assign(64, "dead")]
    alive = ring.assign(64, ("alive", 1))
    dead.append(ring.assign(64, "dead"))
    assert ring.free_owner("dead") == tuple(dead)
    assert ring.outstanding() == (alive,)
    assert ring.watermark == alive.start
    assert ring.free_owner("dead") == ()
    ring.check()


def test_double_and_unknown_frees_are_refused_and_change_nothing() -> None:
    ring = StagingAllocator(1024)
    freed, held = ring.assign(1, "a"), ring.assign(1, "a")
    ring.free(freed.id)
    before = ring.statistics()
    for lease_id in (freed.id, 2, -1):
        with pytest.raises(ValueError, match=f"lease {lease_id} is not held"):
            ring.free(lease_id)
    assert ring.statistics() == before
    assert ring.outstanding() == (held,)


@pytest.mark.parametrize("nbytes", [0, -1, 1025])
def test_sizes_that_no_ring_space_can_hold(nbytes: int) -> None:
    ring = StagingAllocator(1024)
    with pytest.raises(ValueError, match=rf"1 to 1024 bytes .* got {nbytes}"):
        ring.assign(nbytes, "a")
    assert ring.statistics() == StagingAllocator(1024).statistics()


@pytest.mark.parametrize(("size_bytes", "alignment_bytes"), [(0, 1), (-256, 256), (1000, 256), (1024, 0)])
def test_impossible_rings(size_bytes: int, alignment_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive multiple of alignment_bytes"):
        StagingAllocator(size_bytes, alignment_bytes)


def test_positions_beyond_32_bits() -> None:
    ring = StagingAllocator(1 << 30)
    for _ in range(10):
        ring.free(ring.assign((1 << 30) - 5, "a").id)
    lease = ring.assign(1 << 30, "a")
    assert lease.start == 10 << 30
    assert ring.writable(lease)
    ring.check()


def test_is_writable_is_the_rule_of_both_sides() -> None:
    assert is_writable(end=1024, watermark=0, size_bytes=1024)
    assert not is_writable(end=1025, watermark=0, size_bytes=1024)
    assert is_writable(end=1025, watermark=1, size_bytes=1024)


def test_statistics_count_and_are_frozen() -> None:
    ring = StagingAllocator(1024, alignment_bytes=64)
    first = ring.assign(600, "a")
    ring.assign(600, "a")
    ring.free(first.id)
    seen = ring.statistics()
    assert (seen.size_bytes, seen.head, seen.watermark) == (1024, 1624, 1024)
    assert (seen.in_use_bytes, seen.peak_in_use_bytes) == (600, 1200)
    assert (seen.leases, seen.assigned, seen.waited, seen.skipped_bytes) == (1, 2, 1, 384)
    with pytest.raises(FrozenInstanceError):
        seen.head = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda ring: ring.order.clear(), "order and leases differ"),
        (lambda ring: ring.leases.pop(0), "a freed lease holds the watermark"),
        (lambda ring: ring.by_owner.clear(), "owners and leases differ"),
        (lambda ring: ring.by_owner.update(b={}), "an owner without a lease"),
        (lambda ring: setattr(ring, "in_use_bytes", 1), "bytes in use miscounted"),
        (lambda ring: setattr(ring, "head", 64), "overlaps or is out of order"),
        (lambda ring: setattr(ring, "alignment_bytes", 1000), "is not aligned"),
        (lambda ring: setattr(ring, "size_bytes", 64), "the oldest lease is not writable"),
    ],
)
def test_check_sees_damage(damage: object, message: str) -> None:
    ring = StagingAllocator(1024, alignment_bytes=64)
    ring.assign(100, "a")
    ring.assign(100, "a")
    ring.check()
    damage(ring)
    with pytest.raises(InvariantError, match=message):
        ring.check()
