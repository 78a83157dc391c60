"""What a preemption costs, by which way it goes, and what the host's books take."""

from __future__ import annotations

import time
from typing import Any

import pytest

from decode_node.costs import SWAP_OVERHEAD_S, CostEstimates, cheaper
from decode_node.request import DecodeRequest, NewRequest, Residency, Sequence
from decode_node.scheduler import DecodeScheduler
from decode_node.scheduler_options import SchedulerOptions
from disagg.core.config.groups import EvictionName
from disagg.core.errors import BusyError, InvariantError, PromptTooLongError
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.kv.host_blocks import HostBlocks
from disagg.model.chunks import PromptChunks
from disagg.node.kv_manager import KVManager


def test_the_cheaper_way_is_taken() -> None:
    rates = CostEstimates(pages_per_s=1000.0, tokens_per_s=1000.0)
    assert cheaper(10, 1000, rates) == "swap", "22 ms against a second"
    assert cheaper(10, 10, rates) == "recompute", "22 ms against 10"
    swap_s = SWAP_OVERHEAD_S + 2 * 10 / 1000
    assert cheaper(10, round(swap_s * 1000) + 1, rates) == "swap"
    assert cheaper(10, round(swap_s * 1000) - 1, rates) == "recompute"
    assert cheaper(10, 10, rates, steps=1) == "swap", "an answer's token takes a step of 20 ms"
    assert cheaper(10, 10, rates._replace(steps_per_s=1000.0), steps=1) == "recompute"


def test_rates_follow_what_is_measured() -> None:
    rates = CostEstimates.of(page_bytes=1 << 20)
    assert rates.pages_per_s == pytest.approx(16e9 / (1 << 20))
    for _ in range(40):
        rates = rates.copied(100, 1.0).computed(50, 1.0).stepped(0.1)
    assert rates.steps_per_s == pytest.approx(10, rel=0.03)
    assert rates.pages_per_s == pytest.approx(100, rel=0.03)
    assert rates.tokens_per_s == pytest.approx(50, rel=0.05)
    assert rates.copied(5, 0.0) == rates, "a clock that stands still measures nothing"
    once = CostEstimates(100.0, 100.0).copied(1000, 1.0)
    assert 100 < once.pages_per_s < 300, "one odd copy does not turn the choice"


def test_host_blocks() -> None:
    host = HostBlocks(4)
    first = host.alloc(3)
    assert first is not None
    assert len(first) == 3
    assert host.alloc(2) is None
    host.check(first)
    with pytest.raises(InvariantError):
        host.check(first[1:])
    with pytest.raises(ValueError, match="freed twice"):
        host.free([*first, first[0]])
    host.free(first)
    with pytest.raises(ValueError, match="freed twice"):
        host.free(first)
    host.check([])
    assert host.statistics().peak_used_blocks == 3


def make(
    pool_tokens: int,
    rows: int,
    watermark: float = 0.0,
    page_size: int = 4,
    max_batch: int = 0,
    eviction: EvictionName | None = None,
    **more: Any,
) -> DecodeScheduler:
    kv_manager = KVManager(pool_tokens=pool_tokens, page_size=page_size, rows=rows, eviction=eviction)
    return scheduling(kv_manager, watermark=watermark, max_batch=max_batch or rows, **more)


def scheduling(kv_manager: KVManager, watermark: float = 0.0, **more: Any) -> DecodeScheduler:
    return DecodeScheduler(
        kv_manager,
        SchedulerOptions(
            group="decode",
            ranks=1,
            max_context_tokens=kv_manager.capacity_tokens,
            first_ticket=0,
            rates=CostEstimates(1e3, 1e3),
            watermark=watermark,
            **{"chunks": PromptChunks(64), "preemption": "recompute", **more},
        ),
    )


def start(
    scheduler: DecodeScheduler,
    number: int,
    prompt_tokens: int,
    max_tokens: int,
    n: int = 1,
    priority: int = 0,
) -> DecodeRequest:
    """A request whose KV and first tokens are here. No two prompts begin alike."""
    prompt = pack_tokens([1000 * number + at for at in range(prompt_tokens)])
    request = scheduler.reserve(
        NewRequest(
            RequestKey(f"r{number}"),
            prompt,
            SamplingParams(max_tokens=max_tokens, n=n),
            router="",
            prefill_group="",
            deadline_s=0.0,
            prefix=PrefixKey.of(prompt),
        )
    )
    request.priority = priority
    request.landed_ranks.add(0)
    for sequence in request.sequences:
        sequence.tokens.append(1)
    request.begun = True
    return request


def only(request: DecodeRequest) -> Sequence:
    """Its one sequence."""
    (sequence,) = request.sequences
    return sequence


def step(scheduler: DecodeScheduler) -> set[str]:
    """Who took part."""
    plan = scheduler.next_step()
    assert plan is not None
    if not plan.work:
        return set()  # swaps only: no step begins
    for work, one in zip(plan.work, scheduler.stepped(plan), strict=True):
        if work.span.stop == one.sequence.known_tokens and not one.sequence.ended:
            one.sequence.tokens.append(2)
    scheduler.commit(plan)
    return {work.key.request_id for work in plan.work}


def test_the_youngest_leaves_and_comes_back_when_an_older_one_has_ended() -> None:
    scheduler = make(40, 3)
    one, two = start(scheduler, 1, 12, 28), start(scheduler, 2, 16, 24)
    seen = []
    while two.residency is Residency.RESIDENT:
        seen.append(step(scheduler))
    assert {"r1", "r2"} in seen
    assert seen[-1] == {"r1"}, "the older one goes on with its pages, in the same step"
    assert only(two).block_table.pages == []
    with pytest.raises(BusyError, match="1 requests wait for pages"):
        start(scheduler, 3, 1, 1)
    scheduler.close(one)
    scheduler.rank_closed(one, 0)
    assert step(scheduler) == {"r2"}
    assert only(two).left_tokens == 1, "all of it was computed again, in one chunk"
    scheduler.check()


def test_a_later_request_with_a_lower_priority_number_takes_the_pages_of_an_earlier_one() -> None:
    scheduler = make(40, 3)
    batch = start(scheduler, 1, 12, 28, priority=1)
    urgent = start(scheduler, 2, 16, 24)
    seen = []
    while batch.residency is Residency.RESIDENT:
        seen.append(step(scheduler))
    assert seen[-1] == {"r2"}, "it goes on with the pages, in the same step"
    assert urgent.residency is Residency.RESIDENT
    scheduler.close(urgent)
    scheduler.rank_closed(urgent, 0)
    assert step(scheduler) == {"r1"}
    scheduler.check()


def test_who_finds_nobody_younger_waits_with_its_pages() -> None:
    scheduler = make(40, 3)
    one, two = start(scheduler, 1, 28, 12), start(scheduler, 2, 4, 30)
    one.landed_ranks.clear()  # its KV is still on the way: it cannot be preempted, nor does it run
    for _ in range(8):
        assert step(scheduler) == {"r2"}
    assert scheduler.next_step() is None
    assert two.residency is Residency.RESIDENT
    assert len(only(two).block_table.pages) == 3
    one.landed_ranks.add(0)
    assert step(scheduler) == {"r1"}
    assert two.residency is Residency.OUT, "its pages are for the older one, now that it runs"


@pytest.mark.parametrize("place", [Residency.LEAVING, Residency.RETURNING])
def test_what_is_being_copied_is_freed_when_the_copy_has_ended(place: Residency) -> None:
    scheduler = make(40, 3, preemption="swap")
    scheduler.join(10)
    one, two = start(scheduler, 1, 12, 28), start(scheduler, 2, 16, 24)
    while two.residency is not Residency.LEAVING:
        step(scheduler)
    if place is Residency.RETURNING:
        scheduler.swapped(two, 0)
        scheduler.close(one)
        scheduler.rank_closed(one, 0)
        plan = scheduler.next_step()
        assert plan is not None
        assert not plan.work
    assert two.residency is place
    scheduler.close(two)
    scheduler.rank_closed(two, 0)
    assert two.key in scheduler.requests, "a rank still reads or writes its pages and blocks"
    assert only(two).block_table.pages
    assert scheduler.statistics().host.used_blocks
    scheduler.swapped(two, 0)
    assert two.key not in scheduler.requests
    assert not scheduler.statistics().host.used_blocks
    scheduler.check()


@pytest.mark.parametrize("max_batch", [1, 2])
def test_who_waits_for_pages_does_not_take_the_turn_of_the_oldest(max_batch: int) -> None:
    scheduler = make(40, 3, max_batch=max_batch)
    prompts = [12, 16] if max_batch == 1 else [12, 12, 4]
    left = {start(scheduler, at, tokens, 40 - tokens) for at, tokens in enumerate(prompts)}
    for _ in range(200):
        step(scheduler)  # one that computes nothing would be the last one
        scheduler.check()
        for request in [r for r in left if only(r).known_tokens == 40]:
            left.discard(request)
            scheduler.close(request)
            scheduler.rank_closed(request, 0)
        if not left:
            return
    raise AssertionError(f"unfinished: {[(r.key, r.residency, only(r).known_tokens) for r in left]}")


@pytest.mark.parametrize("again", [False, True], ids=["while it is out", "while it is computed again"])
@pytest.mark.parametrize("which", [0, 1])
def test_an_answer_that_ends_before_it_is_computed_again_leaves_no_gap(which: int, again: bool) -> None:
    """What both answers share is computed by the first one, wanted or not, and cached when it is there."""
    kv_manager = KVManager(pool_tokens=64, page_size=4, rows=6, eviction="lru")
    scheduler = scheduling(kv_manager, max_batch=6, chunks=PromptChunks(8))
    one, two = start(scheduler, 1, 12, 30), start(scheduler, 2, 22, 12, n=2)
    while two.residency is Residency.RESIDENT:
        step(scheduler)
    ended, other = two.sequences[which], two.sequences[1 - which]
    if not again:
        scheduler.end(two, ended)
    scheduler.close(one)
    scheduler.rank_closed(one, 0)
    cache = kv_manager.cache
    assert cache is not None
    kept = set(cache.pages())  # the other request's
    computed: set[tuple[int, int]] = set()
    """Pages and places in them."""
    for _ in range(20):
        if again and two.residency is Residency.RESIDENT and two.left_tokens:
            scheduler.end(two, ended)
        plan = scheduler.next_step()
        assert plan is not None
        for work, one in zip(plan.work, scheduler.stepped(plan), strict=True):
            pages = one.sequence.block_table.pages
            places = [(pages[at // 4], at % 4) for at in range(work.span.stop)]
            computed.update(places[work.start :])
            assert computed.issuperset(places), "a step reads what nobody has computed"
        scheduler.commit(plan)
        fresh = {page for page, _ in computed}
        assert fresh >= set(cache.pages()) - kept, "what nobody has computed is cached"
        kept -= fresh
        if two.left_tokens == 0 and two.sequences == [other]:
            break
    assert two.sequences == [other], "what has ended has given back what it held"
    scheduler.check()


def test_tickets_keep_the_watermark_but_for_the_first() -> None:
    scheduler = make(400, 8, watermark=0.25)
    start(scheduler, 1, 320, 80)
    assert scheduler.statistics().memory.pages.free_pages == 20, "less than a quarter of 100"
    with pytest.raises(BusyError):
        start(scheduler, 2, 1, 1)
    with pytest.raises(PromptTooLongError):
        start(scheduler, 3, 320, 81)


def test_a_step_of_256_requests_costs_the_books_little() -> None:
    """Growth of all of them, in one call: its share of a plan. The limit is ten times what an idle core takes."""
    kv_manager = KVManager(pool_tokens=1 << 16, page_size=16, rows=256)
    block_tables = [kv_manager.reserve(100 + number % 16) for number in range(256)]
    tables = [block_table for block_table in block_tables if block_table is not None]
    grown = [table.sequence for table in tables]
    best_s = 1.0
    for _ in range(50):
        began_s = time.perf_counter()
        assert kv_manager.grow(grown) == []
        best_s = min(best_s, time.perf_counter() - began_s)
    kv_manager.check([[block_table] for block_table in tables])
    assert best_s < 1e-3


@pytest.mark.parametrize("number", [0, 1])
def test_who_computes_for_all_does_so_also_when_its_answer_is_not_wanted_any_more(number: int) -> None:
    """What two answers share is computed again by the first of them."""
    scheduler = make(64, 4, chunks=PromptChunks(5))
    one = start(scheduler, 1, 20, 40)
    two = start(scheduler, 2, 16, 12, n=2)
    while two.residency is Residency.RESIDENT:
        step(scheduler)
    scheduler.close(one)
    scheduler.rank_closed(one, 0)
    first = two.sequences[0]
    wanted = two.sequences[1 - number]
    step(scheduler)
    assert first.computed_tokens == 5
    assert not scheduler.end(two, two.sequences[number])
    while two.again:
        before = first.computed_tokens
        step(scheduler)
        assert first.computed_tokens > before or before >= 16, "the prompt, all of it"
    step(scheduler)
    assert two.sequences == [wanted]
    assert wanted.left_tokens == 1
    scheduler.check()


def test_a_page_that_forks_share_is_told_once() -> None:
    """With their first step: else a wide request with a long prompt would fill a whole message."""
    scheduler = make(400, 8)
    one = start(scheduler, 1, 82, 12, n=4)
    plan = scheduler.next_step()
    assert plan is not None
    first, *others = plan.work
    assert (len(first.pages), first.like) == (21, -1)
    assert [(len(work.pages), work.first_page, work.like) for work in others] == [(1, 20, first.row)] * 3
    scheduler.commit(plan)
    for sequence in one.sequences:
        sequence.tokens.append(2)
    plan = scheduler.next_step()
    assert plan is not None
    assert [(work.pages, work.like) for work in plan.work] == [([], -1)] * 4, "and no more"
