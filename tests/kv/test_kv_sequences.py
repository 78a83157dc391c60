"""Shared pages: reference counts, copy on write, forks; then random sequences over a memory that is written."""

from __future__ import annotations

import itertools

import pytest
from counted_machine import CountedMachine, counted, run_steps
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from kv_memory import KVMemory, Word

from disagg.core.errors import InvariantError
from disagg.kv.page_values import PageCopy
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.sequence import KVSequence


def grown(allocator: TokenToKVPoolAllocator, tokens: int) -> KVSequence:
    sequence = KVSequence(allocator)
    assert sequence.append(tokens) == []
    return sequence


def test_a_page_is_free_when_its_last_reader_is_gone() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    first = grown(allocator, 8)
    second, third = first.fork(), first.fork()
    assert allocator.statistics().used_pages == 2
    assert allocator.statistics().references == 6
    assert [allocator.readers(page) for page in first.pages] == [3, 3]
    assert (first.free(), third.free(), second.free()) == (0, 0, 2)
    assert allocator.statistics().references == allocator.statistics().used_pages == 0
    with pytest.raises(ValueError, match="freed already"):
        second.free()
    allocator.check()


def test_the_last_page_is_copied_for_all_writers_but_one() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    first = grown(allocator, 6)
    second, last = first.fork(), first.pages[1]
    copies = second.append(1)
    assert copies == [PageCopy(last, second.pages[1])]
    assert second.pages[0] == first.pages[0]
    assert first.append(1) == [], "it reads its last page alone now"
    assert first.pages[1] == last
    assert allocator.statistics().used_tokens == 4 + 3 + 3
    allocator.check()


def test_a_full_last_page_stays_shared() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    first = grown(allocator, 4)
    second = first.fork()
    assert second.append(1) == []
    assert second.pages[0] == first.pages[0]
    assert second.append(0) == first.append(0) == []
    allocator.check()


def test_a_copy_counts_as_a_page_where_room_is_short() -> None:
    allocator = TokenToKVPoolAllocator(3, 4)
    first = grown(allocator, 7)
    second = first.fork()
    before = allocator.statistics()
    assert second.append(1) is None
    assert allocator.append_one_to_each([first, second]) is None
    assert allocator.statistics() == before
    assert (first.pages, first.tokens) == (second.pages, second.tokens)
    second.free()
    assert first.append(1) == []
    allocator.check()


def test_alloc_tokens_never_writes_where_others_read() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    first = grown(allocator, 6)
    first.fork()
    assert allocator.alloc_tokens(6, 6, first.pages) == []
    with pytest.raises(ValueError, match="is shared"):
        allocator.alloc_tokens(6, 7, first.pages)
    allocator.check()


def test_a_decode_step_takes_exactly_the_pages_it_needs() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    alone, full, first = grown(allocator, 1), grown(allocator, 4), grown(allocator, 6)
    second = first.fork()
    assert allocator.free_pages == 3
    copies = allocator.append_one_to_each([alone, full, first, second])
    assert copies == [PageCopy(second.pages[-1], first.pages[-1])]
    assert [s.tokens for s in (alone, full, first, second)] == [2, 5, 7, 7]
    assert [len(s.pages) for s in (alone, full, first, second)] == [1, 2, 2, 2]
    assert allocator.free_pages == 1
    assert allocator.statistics().used_tokens == 2 + 5 + 4 + 3 + 3
    allocator.check()


def test_a_fork_of_three_of_which_two_go_on_copies_twice() -> None:
    allocator = TokenToKVPoolAllocator(4, 4)
    first = grown(allocator, 2)
    second, third = first.fork(), first.fork()
    copies = allocator.append_one_to_each([second, third])
    assert copies is not None
    assert {copy.source for copy in copies} == set(first.pages)
    assert len({*first.pages, *second.pages, *third.pages}) == 3
    allocator.check()


def test_truncated_tokens_come_back_and_what_is_shared_stays() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    first = grown(allocator, 11)
    second = first.fork()
    second.truncate(5)
    assert (len(second.pages), allocator.statistics().used_tokens) == (2, 11)
    assert second.append(1) == [PageCopy(first.pages[1], second.pages[1])]
    first.truncate(5)
    assert allocator.statistics().used_tokens == 4 + 1 + 2
    first.truncate(0)
    assert first.pages == []
    for wrong in (-1, 1):
        with pytest.raises(ValueError, match="cannot truncate"):
            first.truncate(wrong)
    allocator.check()


def test_a_sequence_with_a_shared_prefix_grows_behind_it() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    cached = grown(allocator, 8)
    request = KVSequence(allocator, cached.pages)
    assert (request.tokens, request.append(2)) == (8, [])
    assert cached.free() == 0
    assert request.free() == 3
    allocator.check()


@pytest.mark.parametrize("wrong", [[0], [9], [7], [1, 1]])
def test_a_wrong_share_raises_and_changes_nothing(wrong: list[int]) -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    grown(allocator, 8)
    before = allocator.statistics()
    with pytest.raises(ValueError, match="page"):
        allocator.share(wrong)
    assert allocator.statistics() == before
    with pytest.raises(ValueError, match="not one of pages"):
        allocator.readers(8)


def test_check_finds_a_lost_page() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    allocator.unused.take(1)
    with pytest.raises(InvariantError, match="free"):
        allocator.check()


class SequenceMachine(CountedMachine):
    """Sequences grow, fork, shrink, end, are preempted and come back in one memory; each reads back its own tokens at
    every moment."""

    page_size, pages = 4, 14
    fresh = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(self.pages, self.page_size)
        self.memory = KVMemory(self.pages, self.page_size)
        self.alive: list[tuple[KVSequence, list[Word]]] = []
        self.preempted: list[list[Word]] = []

    def pick(self, number: int) -> tuple[KVSequence, list[Word]]:
        return self.alive[number % len(self.alive)]

    def written(self, sequence: KVSequence, words: list[Word], copies: list[PageCopy], count: int) -> None:
        self.memory.copy(copies)
        new = [next(self.fresh) for _ in range(count)]
        self.memory.write(sequence.pages, len(words), new)
        words.extend(new)

    @precondition(lambda self: len(self.alive) < 8)
    @rule(tokens=st.integers(0, 11))
    @counted
    def start(self, tokens: int) -> None:
        self.alive.append((KVSequence(self.allocator), []))
        self.append(len(self.alive) - 1, tokens)

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 7), tokens=st.integers(0, 9))
    @counted
    def append(self, number: int, tokens: int) -> None:
        sequence, words = self.pick(number)
        before = (list(sequence.pages), sequence.tokens, self.allocator.statistics())
        copies = sequence.append(tokens)
        if copies is None:
            assert (sequence.pages, sequence.tokens, self.allocator.statistics()) == before
        else:
            assert sequence.tokens == len(words) + tokens
            self.written(sequence, words, copies, tokens)

    @precondition(lambda self: self.alive)
    @rule(numbers=st.sets(st.integers(0, 7)))
    @counted
    def step(self, numbers: set[int]) -> None:
        chosen = [self.alive[n] for n in numbers if n < len(self.alive)]
        before = ([list(s.pages) for s, _ in self.alive], self.allocator.statistics())
        copies = self.allocator.append_one_to_each([sequence for sequence, _ in chosen])
        if copies is None:
            assert ([s.pages for s, _ in self.alive], self.allocator.statistics()) == before
            assert self.one_by_one(chosen), "there was room after all"
            return
        self.memory.copy(copies)
        for sequence, words in chosen:
            self.written(sequence, words, [], 1)

    def one_by_one(self, chosen: list[tuple[KVSequence, list[Word]]]) -> bool:
        """The same step in single appends, until there is no room; True when it came to that."""
        for sequence, words in chosen:
            copies = sequence.append(1)
            if copies is None:
                return True
            self.written(sequence, words, copies, 1)
        return False

    @precondition(lambda self: 0 < len(self.alive) < 8)
    @rule(number=st.integers(0, 7))
    @counted
    def fork(self, number: int) -> None:
        sequence, words = self.pick(number)
        free = self.allocator.free_pages
        self.alive.append((sequence.fork(), list(words)))
        assert self.allocator.free_pages == free

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 7), part=st.floats(0, 1))
    @counted
    def truncate(self, number: int, part: float) -> None:
        sequence, words = self.pick(number)
        keep = int(part * len(words))
        sequence.truncate(keep)
        del words[keep:]

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 7))
    @counted
    def free(self, number: int) -> None:
        sequence, _ = self.alive.pop(number % len(self.alive))
        alone = sum(self.allocator.readers(page) == 1 for page in sequence.pages)
        assert sequence.free() == alone

    @precondition(lambda self: self.alive)
    @rule()
    @counted
    def preempt(self) -> None:
        """The youngest loses all its pages; who shares some with it keeps those."""
        _, words = self.alive[-1]
        self.free(len(self.alive) - 1)
        self.preempted.append(words)

    @precondition(lambda self: self.preempted and len(self.alive) < 8)
    @rule()
    @counted
    def come_back(self) -> None:
        """All of it is computed again, in pages of its own, or it waits."""
        sequence = KVSequence(self.allocator)
        copies = sequence.append(len(self.preempted[0]))
        if copies is None:
            sequence.free()
            return
        words = self.preempted.pop(0)
        assert copies == []
        self.memory.write(sequence.pages, 0, words)
        self.alive.append((sequence, words))

    @invariant()
    def sound(self) -> None:
        self.allocator.check()
        owned = [page for sequence, _ in self.alive for page in sequence.pages]
        statistics = self.allocator.statistics()
        assert statistics.references == len(owned)
        assert statistics.used_pages == len(set(owned))
        for page in set(owned):
            assert self.allocator.readers(page) == owned.count(page)
        for sequence, words in self.alive:
            assert self.memory.read(sequence.pages, len(words)) == words


TestSequenceMachine = SequenceMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_steps_of_the_page_allocator() -> None:
    """Checked after each."""
    run_steps(SequenceMachine, 100_000)
    for name in ("start", "append", "step", "fork", "truncate", "free", "preempt", "come_back"):
        assert SequenceMachine.done[name] > 2000, name
