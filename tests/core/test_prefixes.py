"""Keys of prompts, marks of their beginnings, and what a router makes of the digests of a cache."""

from __future__ import annotations

import random

import pytest
import xxhash

from disagg.core.prefixes import (
    Digest,
    HeldPrefixes,
    PrefixKey,
    longest_held,
    pack_block_hashes,
    unpack_block_hashes,
)
from disagg.kv.event_log import MAX_BLOCK_HASHES, KVEventLog, unit_tokens_for


def test_a_mark_is_the_hash_of_everything_up_to_it() -> None:
    key = PrefixKey.of(range(10), "tenant")
    seed = xxhash.xxh3_64_intdigest(b"tenant")
    assert key.tokens == 10
    assert key.block_hashes(4) == [
        xxhash.xxh3_64_intdigest(key.data[:16], seed),
        xxhash.xxh3_64_intdigest(key.data[:32], seed),
    ]
    for first in range(11):
        assert key.block_hashes(4, first) == key.block_hashes(4)[first // 4 :]


def test_block_hashes_differ_by_salt_and_prefix() -> None:
    keys = [PrefixKey.of(range(8)), PrefixKey.of(range(8), "a"), PrefixKey.of([9, *range(1, 8)])]
    assert len({one for key in keys for one in key.block_hashes(4)}) == 6
    longer = PrefixKey.of([*range(8), 1, 2, 3, 4]).block_hashes(4)
    assert longer[:2] == keys[0].block_hashes(4)


@pytest.mark.parametrize("token", [1 << 31, -(1 << 31) - 1, 1.5])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token ids"):
        PrefixKey.of([1, token])


def test_the_longest_held_beginning_is_found_by_halves() -> None:
    block_hashes = PrefixKey.of(range(400)).block_hashes(4)
    for count in range(len(block_hashes) + 1):
        assert longest_held(block_hashes, set(block_hashes[:count])) == count


def test_block_hashes_are_sent_packed() -> None:
    block_hashes = [5, 1 << 63, 7]
    assert unpack_block_hashes(pack_block_hashes(block_hashes)) == (5, 7, 1 << 63)
    with pytest.raises(ValueError, match="8 bytes each"):
        unpack_block_hashes(b"1234567")


def test_a_listener_starts_with_the_whole_state_and_applies_changes() -> None:
    kv_events, held = KVEventLog(64), HeldPrefixes()
    kv_events.add([1, 2, 3])
    assert held.apply(kv_events.digest(held.version))
    kv_events.remove([3])
    kv_events.add([4])
    digest = kv_events.digest(held.version)
    assert (digest.since, digest.version) == (3, 5)
    assert (unpack_block_hashes(digest.added), unpack_block_hashes(digest.removed)) == ((4,), (3,))
    assert held.apply(digest)
    assert held.longest_tokens([1, 2, 4, 3]) == 3 * 64
    assert kv_events.digest(5) == Digest(5, 5, 64, b"", b"")


def test_a_digest_has_only_net_changes() -> None:
    kv_events = KVEventLog(64)
    kv_events.add(range(10))
    kv_events.add([20])
    kv_events.remove([20, 9])
    kv_events.add([9])
    digest = kv_events.digest(10)
    assert (unpack_block_hashes(digest.added), unpack_block_hashes(digest.removed)) == ((9,), (20,))


def test_a_listener_with_an_old_version_gets_the_whole_state() -> None:
    kv_events = KVEventLog(64, kept=4)
    kv_events.add(range(10))
    assert kv_events.digest(5).since is None, "five changes are not remembered"
    assert kv_events.digest(6).since == 6
    assert kv_events.digest(11).since is None, "a version that never was"
    kv_events.remove(reversed(range(2, 10)))
    assert kv_events.digest(14).since is None, "everything is less than the changes"


def test_a_gap_is_detected() -> None:
    kv_events, held = KVEventLog(64), HeldPrefixes()
    assert not held.apply(Digest(3, 4, 64, b"", b""))
    assert held.apply(kv_events.digest())
    kv_events.add([1])
    missed = kv_events.digest(0)
    kv_events.add([2])
    assert not held.apply(kv_events.digest(1))
    assert held.longest_tokens([1, 2]) == 0
    assert held.apply(missed)
    assert held.apply(kv_events.digest(1))
    assert held.longest_tokens([1, 2]) == 128


def test_random_changes_and_late_listeners_agree_in_the_end() -> None:
    draw, kv_events = random.Random(7), KVEventLog(64, kept=50)
    listeners = [HeldPrefixes() for _ in range(3)]
    for _ in range(300):
        new = draw.sample(range(1000), draw.randrange(6))
        kv_events.add(mark for mark in new if mark not in kv_events.held)
        kv_events.remove(draw.sample(sorted(kv_events.held), draw.randrange(min(6, len(kv_events.held) + 1))))
        for listener in draw.sample(listeners, draw.randrange(3)):
            assert listener.apply(kv_events.digest(listener.version))
            assert listener.held == kv_events.held


@pytest.mark.parametrize(("pages", "page_size"), [(100, 16), (1 << 20, 1), (1 << 20, 16), (40_000, 128)])
def test_a_digest_is_bounded(pages: int, page_size: int) -> None:
    unit = unit_tokens_for(pages, page_size)
    assert unit % page_size == 0
    assert unit >= 64
    assert pages * page_size // unit <= MAX_BLOCK_HASHES
