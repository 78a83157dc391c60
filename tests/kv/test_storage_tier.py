"""The third tier of the prefix cache: what the leader orders, who owns blocks meanwhile, and random sequences.

Memory and storage are simulated: each block and stored page holds the prefix whose KV it would have. Ranks work when
the test says so.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from three_tiers import PAGE, StoringGroup, Tokens, links, prompt

from disagg.core.prefixes import PrefixKey
from disagg.kv.fetch_patience import LONGEST_S, RECENT_TOKENS, TRIAL_AFTER
from disagg.kv.storage_tier import Prefetch


@pytest.fixture
def stored() -> StoringGroup:
    """A group of two ranks that has stored the pages of a prompt."""
    group = StoringGroup.of(ranks=2)
    group.answer(prompt(1, 2, 3))
    assert group.counts.written_pages == 3
    return group


def test_a_restarted_group_finds_what_was_stored(stored: StoringGroup) -> None:
    group = stored.restarted()
    one = group.prefetch(prompt(1, 2, 3, 4))
    assert one is not None
    assert one.holds
    group.settle()
    assert not one.holds
    assert group.counts.fetched_pages == 3
    assert group.answer(prompt(1, 2, 3, 4)) == 3 * PAGE
    assert group.counts.written_pages == 1, "what came from the storage is not written again"


def test_a_fetched_page_counts_once_as_a_hit_of_the_storage(stored: StoringGroup) -> None:
    group = stored.restarted(pages=8)
    assert group.prefetch(prompt(1, 2, 3)) is not None
    group.settle()
    assert group.counts.used_pages == 0, "no request has loaded the pages"
    assert group.answer(prompt(1, 2, 3)) == 3 * PAGE
    assert group.counts.used_pages == 3
    group.answer(prompt(*range(10, 17)))  # evicts the pages from the pool, not from host memory
    assert group.answer(prompt(1, 2, 3)) == 3 * PAGE
    host = group.kv_manager.statistics().host
    assert host is not None
    assert (host.loaded_pages, group.counts.used_pages) == (6, 3), "the second hit is one of host memory"


def test_the_rate_of_fetches_is_that_of_the_slowest_rank() -> None:
    tokens = prompt(*range(1, 20))
    group = StoringGroup.of(pages=100, blocks=160, ranks=2)
    group.answer(tokens)
    group = group.restarted(pages=100, blocks=160)
    assert group.prefetch(tokens) is not None
    group.work_once()
    for seconds, fetch in zip((0.5, 0.125), list(group.works), strict=True):
        group.work(fetch, seconds=seconds)
    assert (group.counts.fetch_s, group.counts.fetch_tokens_per_s) == (0.5, 19 * PAGE / 0.5)


def group_of_slow_fetches(prompt_tokens_per_s: float, **settings: Any) -> StoringGroup:
    """A group that has fetched 76 tokens in a second; it lacks the 76 tokens of another prompt, which is stored."""
    prompts = prompt(*range(1, 20)), prompt(*range(21, 40))
    group = StoringGroup.of(pages=100, blocks=160)
    for one in prompts:
        group.answer(one)
    group = group.restarted(pages=100, blocks=160, **settings)
    group.kv_manager.set_prompt_rate(prompt_tokens_per_s)
    first = group.prefetch(prompts[0])
    assert first is not None
    assert first.holds, "the rate of fetches is not known yet"
    group.work_once()
    group.work(group.works[0], seconds=1.0)
    assert group.counts.fetch_tokens_per_s == 19 * PAGE
    return group


def end(group: StoringGroup, prefetch: Prefetch | None) -> bool:
    """Ends a prefetch and the operations under way; returns whether the request would have waited."""
    assert prefetch is not None
    holds = prefetch.holds
    group.tier.release(prefetch)
    group.settle()
    return holds


def test_a_request_does_not_wait_for_fetches_slower_than_computing() -> None:
    """After some requests, each one waits for a short time, until a fetch is measured."""
    group = group_of_slow_fetches(prompt_tokens_per_s=760.0)
    stored, other = prompt(*range(21, 40)), prompt(*[50] * 19)
    for _ in range(TRIAL_AFTER):
        assert not end(group, group.prefetch(stored))
    assert end(group, group.prefetch(other))
    one = group.prefetch(stored)
    assert one is not None
    assert one.holds
    assert group.works[0].operation.limit_s == 76 / 760.0, "a trial waits no longer than computing takes"
    group.work_once()
    assert group.works[0].operation.limit_s == 76 / 760.0
    group.work(group.works[0], seconds=0.5)
    assert not end(group, group.prefetch(other)), "the fetch was slow again"
    assert group.counts.fetched_pages == 38
    group.check()


def test_a_storage_that_has_become_fast_is_waited_for_again() -> None:
    group = group_of_slow_fetches(prompt_tokens_per_s=760.0)
    for _ in range(2 * RECENT_TOKENS // 76):
        group.tier.patience.fetched(76, 0.01)
    assert end(group, group.prefetch(prompt(*range(21, 40))))


def test_a_fetch_that_lands_nothing_in_time_is_slow() -> None:
    group = group_of_slow_fetches(prompt_tokens_per_s=0.0)
    group.kv_manager.set_prompt_rate(760.0)
    for _ in range(2 * RECENT_TOKENS // 76):
        group.tier.patience.fetched(76, 0.01)
    for _ in range(30):
        group.tier.patience.fetched(0, 0.4)
    assert not end(group, group.prefetch(prompt(*range(21, 40))))


def test_what_has_landed_is_used_although_the_request_did_not_wait() -> None:
    group = group_of_slow_fetches(prompt_tokens_per_s=760.0)
    one = group.prefetch(prompt(*range(21, 40)))
    assert one is not None
    assert not one.holds
    group.settle()
    assert group.answer(prompt(*range(21, 40))) == 76


@pytest.mark.parametrize(("rate", "policy"), [(76.0, "timeout"), (0.0, "timeout"), (152.0, "wait")])
def test_a_request_waits_for_fetches_that_are_faster_or_wanted(rate: float, policy: str) -> None:
    group = group_of_slow_fetches(rate, prefetch=policy, prefetch_base_s=0.2, prefetch_s_per_1k_tokens=0.1)
    one = group.prefetch(prompt(*range(21, 40)))
    assert one is not None
    assert one.holds
    limit_s = LONGEST_S if policy == "wait" else 0.2 + 0.1 * 76 / 1024
    assert group.works[-1].operation.limit_s == limit_s


def test_a_prompt_that_is_not_stored_evicts_nothing(stored: StoringGroup) -> None:
    group = stored.restarted(blocks=4)
    group.answer(prompt(5, 6, 7, 8))
    one = group.prefetch(prompt(9, 9, 9, 9))
    assert one is not None
    group.settle()
    assert not one.holds
    host = group.kv_manager.statistics().host
    assert host is not None
    assert (host.used_pages, host.cache.evicted_pages) == (4, 0)


def test_only_what_every_rank_has_fetched_counts(stored: StoringGroup) -> None:
    """One rank lacks its part of the last page; the other one is ahead."""
    group = stored.restarted()
    del group.storage[1, links(PrefixKey.of(prompt(1, 2, 3), ""))[2]]
    one = group.prefetch(prompt(1, 2, 3))
    assert one is not None
    group.work_once()
    first, second = group.works
    assert len(first.operation.links) == 2, "the third page is not on every rank"
    group.work(first)
    assert group.counts.fetched_pages == 0
    group.work(second, pages=1)
    assert (group.counts.fetched_pages, group.counts.fetching_pages) == (1, 1)
    group.check()
    assert one.holds
    group.work(second)
    assert group.counts.fetched_pages == 2
    assert not one.holds
    group.check()


def test_a_request_uses_what_has_landed_when_its_turn_comes(stored: StoringGroup) -> None:
    group = stored.restarted(prefetch="best_effort")
    one = group.prefetch(prompt(1, 2, 3))
    assert one is not None
    assert not one.holds
    group.work_once()
    for fetch in list(group.works):
        group.work(fetch, pages=2)
    assert group.kv_manager.cached_tokens(PrefixKey.of(prompt(1, 2, 3), "")) == 2 * PAGE
    group.kv_manager.end_prefetch(one)
    group.kv_manager.end_prefetch(one)
    group.take()
    assert all(work.unwanted for work in group.works)
    group.check()
    group.settle()
    assert group.counts.fetching_pages == 0
    assert group.answer(prompt(1, 2, 3)) == 2 * PAGE


def test_requests_share_a_fetch(stored: StoringGroup) -> None:
    """The second request joins, and then fetches what only it needs; the end of the first one ends nothing."""
    stored.answer(prompt(1, 2, 3, 4))
    group = stored.restarted()
    first, second = group.prefetch(prompt(1, 2, 3)), group.prefetch(prompt(1, 2, 3, 4))
    assert first is not None
    assert second is not None
    assert first.operation == second.operation
    group.work_once()
    group.kv_manager.end_prefetch(first)
    group.take()
    assert not any(work.unwanted for work in group.works)
    group.settle()
    assert group.counts.fetched_pages == 4
    assert not second.holds


def test_a_failed_write_is_tried_again_at_the_next_use() -> None:
    group = StoringGroup.of()
    table = group.begin(prompt(1, 2))
    assert table is not None
    group.compute(table, prompt(1, 2))
    group.copy(group.copies[0])
    group.work(group.works[0], error="broken")
    assert (group.counts.failed_pages, group.counts.written_pages, group.counts.writing_pages) == (2, 0, 0)
    group.answer(prompt(1, 2))
    assert group.counts.written_pages == 2


def test_writes_and_fetches_take_a_share_of_host_memory(stored: StoringGroup) -> None:
    group = stored.restarted(blocks=8, pages=32)
    table = group.begin(prompt(*range(10, 17)))
    assert table is not None
    group.compute(table, prompt(*range(10, 17)))
    for operation in list(group.copies):
        group.copy(operation)
    assert group.counts.writing_pages == 2
    assert group.counts.skipped_pages > 0
    group.settle()
    one = group.prefetch(prompt(1, 2, 3))
    assert one is not None
    group.work_once()
    assert group.counts.fetching_pages == 2
    group.settle()


def test_few_tokens_are_computed(stored: StoringGroup) -> None:
    group = stored.restarted(prefetch_min_tokens=3 * PAGE + 1)
    assert group.prefetch(prompt(1, 2, 3)) is None
    group = stored.restarted(prefetch_min_tokens=3 * PAGE)
    assert group.prefetch(prompt(1, 2, 3)) is not None


def test_the_time_limit_grows_with_the_size(stored: StoringGroup) -> None:
    group = stored.restarted(prefetch_base_s=1.0, prefetch_s_per_1k_tokens=1024.0)
    assert group.prefetch(prompt(1, 2, 3)) is not None
    assert group.works[0].operation.limit_s == 1 + 3 * PAGE
    group = stored.restarted(prefetch="wait", prefetch_base_s=1.0)
    assert group.prefetch(prompt(1, 2, 3)) is not None
    assert group.works[0].operation.limit_s >= 60


def test_blocks_that_cannot_be_pinned_are_not_used_again(stored: StoringGroup) -> None:
    group = stored.restarted()
    one = group.prefetch(prompt(1, 2, 3))
    assert one is not None
    group.work_once()
    first, second = group.works
    group.work(first)
    group.work(second, error="cannot pin")
    assert not one.holds
    assert group.counts.failed_pages == 3
    group.check()
    assert group.answer(prompt(1, 2, 3)) == 0
    host = group.kv_manager.statistics().host
    assert host is not None
    assert host.used_pages == 6


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.slow)], ids=["first", "more"]
)
def test_random_sequences(seeds: range) -> None:
    """Requests, copies, fetches, evictions and restarts in any order: KV is always the prompt's, nothing leaks."""
    fetched = sum(random_run(random.Random(seed)) for seed in seeds)
    assert fetched > 5 * len(seeds)


def random_run(choose: random.Random) -> int:
    """Returns the number of fetched pages."""
    ranks, fetched = choose.randint(1, 2), 0
    group = StoringGroup.of(ranks=ranks)
    for _ in range(3):
        group = group.restarted(
            pages=choose.randint(6, 16),
            blocks=choose.choice([6, 12, 40]),
            prefetch=choose.choice(["best_effort", "wait"]),
        )
        random_life(group, choose)
        fetched += group.counts.fetched_pages
    return fetched


def random_life(group: StoringGroup, choose: random.Random) -> None:
    waiting: list[tuple[Tokens, Prefetch | None]] = []
    tokens: dict[int, Tokens] = {}
    for _ in range(150):
        what = choose.random()
        if what < 0.2 and len(waiting) < 4:
            one = prompt(*(choose.randrange(3) for _ in range(choose.randint(1, 5))))
            waiting.append((one, group.prefetch(one)))
        elif what < 0.4 and waiting:
            at = choose.randrange(len(waiting))
            one, prefetch = waiting[at]
            table = group.begin(one) if prefetch is None or not prefetch.holds else None
            if table is not None or choose.random() < 0.1:  # aborted
                del waiting[at]
                group.kv_manager.end_prefetch(prefetch)
                group.take()
            if table is not None:
                tokens[table.row] = one
        elif what < 0.55 and group.copies:
            group.copy(choose.choice(group.copies))
        elif what < 0.85 and group.works:
            error = "failed" if choose.random() < 0.02 else ""
            group.work(choose.choice(group.works), choose.choice([0, 1, 2, 9]), error)
            if choose.random() < 0.02 and group.storage:
                del group.storage[choose.choice(list(group.storage))]
        elif group.running:
            table = choose.choice(group.running)
            if not table.loading:
                group.compute(table, tokens[table.row])
        group.check()
    for _, prefetch in waiting:
        group.kv_manager.end_prefetch(prefetch)
    for table in list(group.running):
        group.running.remove(table)
        group.kv_manager.release(table)
    group.settle()
    assert (group.counts.writing_pages, group.counts.fetching_pages) == (0, 0)
    assert group.kv_manager.free_pages == group.kv_manager.pages
