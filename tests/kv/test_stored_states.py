"""Recurrent states in the third tier: a hit ends at the deepest position with a state and the KV of all pages."""

from __future__ import annotations

import pytest
from three_tiers import PAGE, STATE_TOKENS, StoringGroup, Tokens, links, prompt, state_key

from disagg.core.prefixes import PrefixKey
from disagg.kv.host_tier import HostTierStatistics
from disagg.kv.storage_tier import Prefetch

LONG = prompt(1, 2, 3, 4)


def lose_state(group: StoringGroup, tokens: Tokens, pages: int, rank: int = 0) -> None:
    del group.storage[rank, state_key(links(PrefixKey.of(tokens, ""))[pages - 1])]


def lose_page(group: StoringGroup, tokens: Tokens, page: int, rank: int = 0) -> None:
    del group.storage[rank, links(PrefixKey.of(tokens, ""))[page]]


def host_of(group: StoringGroup) -> HostTierStatistics:
    found = group.kv_manager.statistics().host
    assert found is not None
    return found


@pytest.fixture
def stored() -> StoringGroup:
    """A group of two ranks that has stored a prompt, with the states behind its second and fourth page."""
    group = StoringGroup.of(ranks=2, states=8)
    table = group.begin(LONG)
    assert table is not None
    group.keep(table, LONG, [2, 4])
    group.end(table)
    group.settle()
    assert (group.counts.written_pages, group.counts.written_states) == (4, 2)
    return group


def fetched(group: StoringGroup, tokens: Tokens = LONG) -> tuple[int, int, int]:
    """Prefetches a prompt; returns how many pages and states were fetched, and how many tokens are then cached."""
    one = group.prefetch(tokens)
    group.settle()
    assert one is None or not one.holds
    group.kv_manager.end_prefetch(one)
    pages, states = group.counts.fetched_pages, group.counts.fetched_states
    return pages, states, group.answer(tokens)


def fetching(stored: StoringGroup) -> tuple[StoringGroup, Prefetch]:
    """A restarted group that has found `LONG` and planned its fetch, and the prefetch."""
    group = stored.restarted()
    one = group.prefetch(LONG)
    assert one is not None
    group.work_once()
    return group, one


def fill_host(group: StoringGroup) -> None:
    """Other prompts fill the 16 blocks of host memory."""
    for first in range(10, 26, 4):
        group.answer(prompt(*range(first, first + 4)))
    assert host_of(group).used_pages == 16


def test_the_time_limit_of_a_fetch_counts_the_bytes_of_its_state(stored: StoringGroup) -> None:
    group = stored.restarted(prefetch_base_s=1.0, prefetch_s_per_1k_tokens=1024.0)
    assert group.prefetch(LONG) is not None
    find = group.works[0].operation
    assert (find.kind, find.limit_s) == ("find", 1 + len(find.links) * PAGE)
    while group.works[0].operation.kind == "find":
        group.work_once()
    fetch = group.works[0].operation
    assert len(fetch.state_links) == 1
    assert fetch.limit_s == 1 + len(fetch.links) * PAGE + STATE_TOKENS
    group.settle()


def test_a_hit_ends_at_the_deepest_state(stored: StoringGroup) -> None:
    group = stored.restarted()
    assert fetched(group, prompt(1, 2, 3, 4, 5)) == (4, 1, 4 * PAGE)
    assert (group.counts.written_pages, group.counts.written_states) == (1, 1), "only what is new is written"
    assert fetched(stored.restarted(), prompt(1, 2, 3, 9)) == (2, 1, 2 * PAGE)
    assert fetched(stored.restarted(), prompt(1, 9)) == (0, 0, 0), "no state covers less than two pages"


def test_only_a_state_on_every_rank_counts(stored: StoringGroup) -> None:
    lose_state(stored, LONG, 4, rank=1)
    assert fetched(stored.restarted()) == (2, 1, 2 * PAGE)


def test_kv_without_a_state_is_computed_and_evicts_nothing(stored: StoringGroup) -> None:
    for rank in range(2):
        lose_state(stored, LONG, 2, rank)
    lose_state(stored, LONG, 4)
    group = stored.restarted(blocks=4)
    group.answer(prompt(5, 6, 7, 8))
    one = group.prefetch(LONG)
    assert one is not None
    group.settle()
    assert not one.holds
    assert (host_of(group).used_pages, host_of(group).cache.evicted_pages) == (4, 0)
    assert (group.counts.fetched_pages, group.answer(LONG)) == (0, 0)


def test_a_find_without_a_deeper_state_evicts_nothing() -> None:
    """The first tier has more of the prompt than host memory: fetching these pages would serve nothing."""
    group = StoringGroup.of(blocks=4, states=8)
    group.answer(prompt(1, 2, 3))
    group.answer(prompt(5, 6, 7, 8))
    assert (host_of(group).used_pages, host_of(group).cache.evicted_pages) == (4, 3)
    one = group.prefetch(prompt(1, 2, 3, 4, 9))
    assert one is not None
    assert one.have_pages == 3
    skipped = group.counts.skipped_pages
    group.settle()
    assert not one.holds
    assert (host_of(group).cache.evicted_pages, group.counts.skipped_pages) == (3, skipped)


def test_states_before_the_end_of_a_hit_in_memory_are_not_fetched(stored: StoringGroup) -> None:
    """The first tier has the prompt up to its deepest stored state, and host memory has lost it."""
    group = stored.restarted(blocks=16, pages=40)
    group.answer(LONG)
    fill_host(group)
    evicted = host_of(group).cache.evicted_pages
    one = group.prefetch(prompt(1, 2, 3, 4, 9))
    assert one is not None
    assert one.have_pages == 4
    group.settle()
    assert not one.holds
    assert (host_of(group).cache.evicted_pages, group.counts.fetched_pages) == (evicted, 0)
    assert group.counts.fetched_states == 0


def test_a_fetch_without_room_for_its_state_evicts_nothing(stored: StoringGroup) -> None:
    stored.answer(prompt(6, 7))
    group = stored.restarted(states=4, blocks=16, pages=40)
    fill_host(group)
    users = [group.prefetch(prompt(1, 2, 8)), group.prefetch(prompt(6, 7))]
    group.work_once()
    assert [len(one.operation.links) for one in group.works] == [2, 2], "one fetch, on two ranks"
    assert (host_of(group).cache.evicted_pages, group.counts.skipped_pages) == (2, 2)
    for one in users:
        group.kv_manager.end_prefetch(one)
    group.settle()


def test_a_request_that_joins_a_find_without_a_state_searches_its_own_pages(stored: StoringGroup) -> None:
    """The first request's prompt has no stored state; the second one's has one behind its own pages."""
    group = stored.restarted()
    first, second, equal = (group.prefetch(one) for one in (prompt(1, 9), LONG, prompt(1, 9)))
    assert first is not None
    assert second is not None
    assert equal is not None
    assert second.follows
    group.work_once()
    assert (first.holds, second.holds, equal.holds) == (False, True, False)
    group.settle()
    assert not second.holds
    assert (group.counts.fetched_pages, group.counts.fetched_states) == (4, 1)
    for one in (first, second, equal):
        group.kv_manager.end_prefetch(one)
    assert group.answer(LONG) == 4 * PAGE


def test_a_state_behind_a_missing_page_is_of_no_use(stored: StoringGroup) -> None:
    lose_page(stored, LONG, 2)
    assert fetched(stored.restarted()) == (2, 1, 2 * PAGE)


@pytest.mark.parametrize(("lost", "pages"), [("state", 4), ("page", 2)])
def test_an_item_lost_after_the_find(stored: StoringGroup, lost: str, pages: int) -> None:
    """It is corrupt, or the storage has evicted it: the state before it is fetched."""
    group, one = fetching(stored)
    if lost == "state":
        lose_state(group, LONG, 4)
    else:
        lose_page(group, LONG, 2, rank=1)
    for fetch in list(group.works):
        assert len(fetch.items) == 5
        group.work(fetch)
    assert one.holds, "a further operation is under way"
    group.settle()
    assert not one.holds
    assert (group.counts.fetched_pages, group.counts.fetched_states) == (pages, 1)
    assert group.answer(LONG) == 2 * PAGE


def test_a_landed_state_counts_when_every_rank_has_it(stored: StoringGroup) -> None:
    group, _ = fetching(stored)
    first, second = group.works
    group.work(first)
    group.work(second, pages=4)
    assert (group.counts.fetched_pages, group.counts.fetched_states) == (4, 0)
    assert group.kv_manager.cached_tokens(PrefixKey.of(LONG, "")) == 0, (
        "the state has not landed on each rank"
    )
    group.check()
    group.work(second)
    assert group.counts.fetched_states == 1
    assert group.kv_manager.cached_tokens(PrefixKey.of(LONG, "")) == 4 * PAGE
    group.check()


def test_the_end_of_a_request_frees_the_state_of_its_fetch(stored: StoringGroup) -> None:
    group, one = fetching(stored)
    assert host_of(group).cache.held_states == 1
    group.kv_manager.end_prefetch(one)
    group.settle()
    assert (host_of(group).cache.held_states, group.counts.fetching_pages) == (0, 0)
    assert group.counts.fetched_states == 0


def test_a_state_that_memory_has_lost_is_fetched_without_pages(stored: StoringGroup) -> None:
    """Host memory has room for few states; the pages remain."""
    group = stored.restarted(states=2, blocks=40, pages=40)
    group.answer(LONG)
    for other in (prompt(7, 7), prompt(8, 8), prompt(9, 9)):
        group.answer(other)
    assert group.kv_manager.cached_tokens(PrefixKey.of(LONG, "")) == 0
    assert fetched(group) == (0, 1, 4 * PAGE)


def test_pages_of_another_turn_are_fetched_behind_those_in_memory(stored: StoringGroup) -> None:
    group = stored.restarted()
    assert fetched(group, prompt(1, 2, 9)) == (2, 1, 2 * PAGE)
    assert fetched(group) == (4, 2, 4 * PAGE)


def test_a_state_that_cannot_be_pinned_is_not_used_again(stored: StoringGroup) -> None:
    group, one = fetching(stored)
    first, second = group.works
    group.work(first)
    group.work(second, error="cannot pin")
    assert not one.holds
    group.check()
    assert host_of(group).cache.held_states == 1
    assert group.answer(LONG) == 0


def test_a_failed_write_of_a_state_is_tried_again_at_the_next_use() -> None:
    group = StoringGroup.of(states=8)
    table = group.begin(LONG)
    assert table is not None
    group.compute(table, LONG)
    group.copy(group.copies[0])
    group.work(group.works[0], pages=4)
    group.work(group.works[0], error="broken")
    assert (group.counts.written_states, group.counts.failed_pages) == (0, 4)
    group.answer(LONG)
    assert (group.counts.written_states, group.counts.written_pages) == (1, 4)


def test_writes_and_fetches_take_a_share_of_the_states(stored: StoringGroup) -> None:
    """With 8 state blocks: two are written at a time."""
    group = StoringGroup.of(states=8)
    table = group.begin(LONG)
    assert table is not None
    group.keep(table, LONG, [1, 2, 3, 4])
    group.copy(group.copies[0])
    assert [len(one.operation.state_links) for one in group.works] == [2]
    group.end(table)
    group.settle()
    assert fetched(group.restarted()) == (4, 1, 4 * PAGE), "the deepest one is among them"
    assert fetched(group.restarted(), prompt(1, 9)) == (1, 1, PAGE)
    group.answer(LONG)
    assert group.counts.written_states == 4
    group = stored.restarted(states=4)
    first, second = group.prefetch(LONG), group.prefetch(prompt(1, 2, 8))
    group.work_once()
    assert host_of(group).cache.held_states == 1
    for one in (first, second):
        group.kv_manager.end_prefetch(one)
    group.settle()


def test_a_state_is_written_after_all_pages_before_it() -> None:
    """With 8 blocks, two pages are written at a time."""
    group = StoringGroup.of(blocks=8, states=8)
    table = group.begin(LONG)
    assert table is not None
    group.keep(table, LONG, [2, 4])
    group.copy(group.copies[0])
    (write,) = group.works
    assert [len(write.operation.links), write.operation.state_links] == [2, write.operation.links[1:]]
    group.end(table)
    group.settle()
    group.answer(LONG)
    assert (group.counts.written_pages, group.counts.written_states) == (4, 2)


def test_routers_count_only_pages_before_a_stored_state() -> None:
    group = StoringGroup.of(states=8)
    table = group.begin(LONG)
    assert table is not None
    group.keep(table, LONG, [2])
    group.end(table)
    group.settle()
    unit = group.tier.prefixes.kv_events.unit_tokens
    hashes = PrefixKey.of(LONG, "").block_hashes(unit)
    assert group.tier.prefixes.kv_events.held == set(hashes[: 2 * PAGE // unit])
