"""Copies of pages end as if made one after the other, in as few launches as that allows; one call owes one launch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_model import FakeRunner, fake_spec, next_token
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import make_runner

from disagg.core.types import Span
from disagg.kv.page_values import PageCopy
from disagg.kv.pages import TokenToKVPoolAllocator, slots_of
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.sequence import KVSequence
from disagg.model import page_copies
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.page_copies import copy_in_order, independent
from disagg.node.warm import warm_page_copies

PAGES = 12
pages = st.integers(0, PAGES - 1)


def one_by_one(copies: list[tuple[int, int]]) -> list[int]:
    """Which page's content each page ends with."""
    memory = list(range(PAGES))
    for source, destination in copies:
        memory[destination] = memory[source]
    return memory


@given(st.lists(st.tuples(pages, pages), max_size=12), st.randoms(use_true_random=False))
def test_launches_without_an_order_end_as_one_by_one(
    copies: list[tuple[int, int]], shuffle: random.Random
) -> None:
    """Within a launch the copies' bytes may be read and written in any order."""
    memory, made = list(range(PAGES)), 0
    for span in independent(copies):
        assert span.start == made
        assert len(span) > 0
        made = span.stop
        work = [(kind, copy) for copy in range(span.start, span.stop) for kind in ("read", "write")]
        shuffle.shuffle(work)
        held: dict[int, int] = {}
        for _, index in work:  # the first mention of a copy reads, the second writes
            source, destination = copies[index]
            if index in held:
                memory[destination] = held[index]
            else:
                held[index] = memory[source]
    assert made == len(copies)
    assert memory == one_by_one(copies)


@pytest.mark.parametrize(
    ("copies", "spans"),
    [
        ([], []),
        ([(1, 2), (1, 3), (4, 5)], [Span(0, 3)]),
        ([(1, 2), (2, 3)], [Span(0, 1), Span(1, 2)]),
        ([(1, 2), (3, 1)], [Span(0, 1), Span(1, 2)]),
        ([(1, 2), (3, 2), (4, 5)], [Span(0, 1), Span(1, 3)]),
    ],
)
def test_only_what_depends_is_a_launch_of_its_own(copies: list[tuple[int, int]], spans: list[Span]) -> None:
    assert list(independent(copies)) == spans


@given(st.lists(st.tuples(*[st.integers(0, 7)] * 4), min_size=1, max_size=20))
def test_one_call_of_the_allocator_owes_one_launch(rounds: list[tuple[int, int, int, int]]) -> None:
    """Each round some are freed, one is forked some times, one grows, and all from some one on make a step."""
    allocator = TokenToKVPoolAllocator(60, 4)
    alive = [KVSequence(allocator)]
    owed: list[list[PageCopy] | None] = [alive[0].append(2)]
    for freed, forked, grown, rest in rounds:
        for one in alive[1 : freed // 2]:
            one.free()
            alive.remove(one)
        origin = alive[forked % len(alive)]
        alive += [origin.fork() for _ in range(8 - len(alive))]
        owed.append(alive[grown % len(alive)].append(forked))
        owed.append(allocator.append_one_to_each(alive[rest:]))
    assert max(len(list(independent(copies or []))) for copies in owed) <= 1


def test_the_step_of_three_forks_owes_two_copies_in_one_launch() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    first = KVSequence(allocator)
    first.append(2)
    forks = [first, first.fork(), first.fork()]
    copies = allocator.append_one_to_each(forks)
    assert copies is not None
    assert [len(span) for span in independent(copies)] == [2]


def test_copies_of_two_calls_may_chain() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    first = KVSequence(allocator)
    first.append(2)
    second = first.fork()
    copies = second.append(1)
    third = second.fork()
    more = third.append(1)
    assert copies is not None
    assert more is not None
    assert copies[0].destination == more[0].source
    assert list(independent(copies + more)) == [Span(0, 1), Span(1, 2)]


def numbered(slots: int) -> MHATokenToKVPool:
    """A pool of pages of 4 tokens, each filled with its number."""
    pool = MHATokenToKVPool(2, slots, 1, 4, torch.float32)
    pool.buffer[:] = (torch.arange(slots) // 4).view(1, 1, -1, 1, 1)
    return pool


def held(pool: MHATokenToKVPool) -> list[int]:
    """The number that each page is filled with."""
    whole = pool.buffer.view(4, -1, 16)
    assert bool((whole == whole[:1, :, :1]).all())
    return [int(number) for number in whole[0, :, 0]]


def test_a_chain_is_carried_on(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    real = page_copies.copy_pages

    def counted(buffer: torch.Tensor, sources: torch.Tensor, *rest: object) -> None:
        launches.append(len(sources))
        real(buffer, sources, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(page_copies, "copy_pages", counted)
    pool = numbered(4 * PAGES)
    chain = [(1, 2), (1, 3), (2, 4), (5, 1), (4, 6)]
    copy_in_order(pool, 4, chain)
    assert held(pool) == one_by_one(chain)
    assert launches == [2, 2, 1]
    copy_in_order(pool, 4, [])
    assert len(launches) == 3


@pytest.mark.parametrize(("copy", "wrong"), [((0, PAGES), PAGES), ((-1, 3), -1)])
def test_what_is_no_page_is_refused_before_anything_is_copied(copy: tuple[int, int], wrong: int) -> None:
    pool = numbered(4 * PAGES + 3 * 4)
    pool.buffer = pool.buffer[:, :, : 4 * PAGES + 3].contiguous()  # three slots that are no page
    before = pool.buffer.clone()
    with pytest.raises(
        ValueError, match=rf"page {wrong} cannot be copied: the pool has pages 0..{PAGES - 1}"
    ):
        copy_in_order(pool, 4, [(1, 2), copy])
    assert torch.equal(pool.buffer, before)


def test_the_runner_copies_pages_of_its_pool(checkpoint: Callable[[str], Path]) -> None:
    runner = make_runner(checkpoint("llama"))
    size, buffer = runner.page_size, runner.pool.buffer
    buffer[:] = torch.rand(buffer.shape)
    before = buffer.clone()
    runner.copy_pages([(1, 2), (2, 3), (1, 4)])
    for page, source in itertools.zip_longest(range(runner.pages), (0, 1, 1, 1, 1)):
        origin = page if source is None else source
        here, there = (slice(number * size, (number + 1) * size) for number in (page, origin))
        assert torch.equal(buffer[:, :, here], before[:, :, there])


@pytest.mark.parametrize("copied", [True, False])
def test_a_fork_goes_on_in_its_copy_and_the_other_is_unharmed(copied: bool) -> None:
    """The fake model reads all of a context at each step, and fails where a byte is not its own."""
    runner = FakeRunner(fake_spec(2, 2), 0, 1, page_size=4, pool_tokens=32, rows=3)
    allocator, prompt = TokenToKVPoolAllocator(9, 4), (5, 6, 7, 8, 9, 10)
    first = KVSequence(allocator)
    first.append(len(prompt))
    rows = [runner.req_to_token.alloc() for _ in range(2)]
    set_slots(runner, rows[0], first)
    runner.forward(StepBatch((SequenceSlice(rows[0], 0, prompt),)))
    second = first.fork()
    copies = allocator.append_one_to_each([first, second])
    assert copies is not None
    if copied:
        runner.copy_pages(copies)
    for row, one in zip(rows, (first, second), strict=True):
        set_slots(runner, row, one)
    step = StepBatch(
        tuple(SequenceSlice(row, 6, (token,)) for row, token in zip(rows, (20, 30), strict=True))
    )
    if copied:
        assert runner.forward(step).argmax(-1).tolist() == [
            next_token((*prompt, token)) for token in (20, 30)
        ]
    else:
        with pytest.raises(AssertionError, match="has KV"):
            runner.forward(step)


def set_slots(runner: FakeRunner, row: int, one: KVSequence) -> None:
    """Sets the row's slots to the sequence's pages."""
    runner.req_to_token.set_slots(row, 0, slots_of(one.pages, 4, Span(0, one.tokens)))


def test_warming_meets_each_alignment_of_the_two_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, ...]] = set()

    def noted(buffer: torch.Tensor, *lists: object) -> None:
        # Places of int64: an even one begins at a 16-byte boundary of what was uploaded.
        seen.add(tuple(one.storage_offset() % 2 for one in lists if isinstance(one, torch.Tensor)))

    monkeypatch.setattr(page_copies, "copy_pages", noted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    warm_page_copies(FakeRunner(fake_spec(1, 1), 0, 1, page_size=4, pool_tokens=8, rows=1))  # type: ignore[arg-type]
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}
