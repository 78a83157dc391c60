"""Requests come, match, grow, fork, are preempted, cached and evicted, at random, over a memory that is written.

What a request reads back must always be its own tokens' KV; no page is lost, freed twice or written by two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

import pytest
from counted_machine import CountedMachine, counted, run_steps
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from kv_memory import KVMemory, Word

from disagg.core.config.groups import EvictionName
from disagg.core.prefixes import HeldPrefixes, PrefixKey
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix import RadixCache
from disagg.kv.radix_node import Node
from disagg.kv.sequence import KVSequence

Tokens = tuple[int, ...]
PAGES, PAGE, MOST, MOST_HELD = 24, 2, 7, 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
SALTS = st.sampled_from(["", "a"])


def words_of(salt: str, tokens: Sequence[int]) -> list[Word]:
    """KV of a position depends on all tokens up to it, so that reading another prompt's is seen."""
    return [(salt, *tokens[: position + 1]) for position in range(len(tokens))]


@dataclass(eq=False)
class Request:
    """One that runs: its KV of `tokens` stands in its sequence's pages, and `node` is locked for it."""

    salt: str
    tokens: list[int]
    sequence: KVSequence
    node: Node

    @property
    def words(self) -> list[Word]:
        """What stands in its pages."""
        return words_of(self.salt, self.tokens)


class CacheMachine(CountedMachine):
    """`running`, oldest first, prompts that were preempted, and locked paths without references."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(PAGES, PAGE)
        self.memory = KVMemory(PAGES, PAGE)
        self.running: list[Request] = []
        self.preempted: list[tuple[str, Tokens]] = []
        self.held: list[tuple[Node, list[int], list[Word]]] = []
        self.router = HeldPrefixes()

    @initialize(policy=st.sampled_from(["lru", "lfu", "fifo"]))
    def choose(self, policy: EvictionName) -> None:
        self.cache = RadixCache(self.allocator, policy, unit_tokens=2 * PAGE)

    def room_for(self, pages: int) -> bool:
        short = pages - self.allocator.free_pages
        return short <= 0 or (self.cache.evict(short) >= short)

    @precondition(lambda self: len(self.running) < MOST)
    @rule(tokens=TOKENS, salt=SALTS)
    def start(self, tokens: Tokens, salt: str) -> None:
        self.admit(salt, tokens)

    @precondition(lambda self: self.preempted and len(self.running) < MOST)
    @rule()
    def come_back(self) -> None:
        self.admit(*self.preempted.pop())

    def admit(self, salt: str, tokens: Tokens) -> None:
        key = PrefixKey.of(tokens, salt)
        found = self.cache.match(key, len(tokens) - 1)
        assert found.tokens < len(tokens)
        self.cache.lock(found.node)
        sequence = KVSequence(self.allocator, found.pages)
        if not self.room_for(-(-len(tokens) // PAGE) - len(found.pages)):
            sequence.free()
            self.cache.unlock(found.node)
            return
        self.cache.count(found)
        assert sequence.append(len(tokens) - found.tokens) == []
        request = Request(salt, list(tokens), sequence, found.node)
        self.memory.write(sequence.pages, found.tokens, request.words[found.tokens :])
        self.running.append(request)

    @rule(tokens=TOKENS, salt=SALTS, most=st.integers(0, 14))
    @counted
    def match(self, tokens: Tokens, salt: str, most: int) -> None:
        """What is found is the prompt's own KV; of a shorter limit, as much less in the same pages."""
        key = PrefixKey.of(tokens, salt)
        found = self.cache.match(key)
        assert self.memory.read(found.pages, found.tokens) == words_of(salt, tokens)[: found.tokens]
        assert self.cache.match(key, most).pages == found.pages[: most // PAGE]

    @precondition(lambda self: len(self.held) < MOST_HELD)
    @rule(tokens=TOKENS, salt=SALTS)
    @counted
    def lock(self, tokens: Tokens, salt: str) -> None:
        """Locks a match without references: the lock alone must keep the pages."""
        found = self.cache.match(PrefixKey.of(tokens, salt))
        self.cache.lock(found.node)
        self.held.append((found.node, found.pages, words_of(salt, tokens)[: found.tokens]))

    @precondition(lambda self: self.held)
    @rule()
    @counted
    def unlock(self) -> None:
        self.cache.unlock(self.held.pop(0)[0])

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, MOST - 1), tokens=st.lists(st.integers(0, 1), max_size=5))
    @counted
    def append(self, number: int, tokens: list[int]) -> None:
        """A chunk of one request: where there is no room, nothing has changed."""
        request = self.running[number % len(self.running)]
        before = (list(request.sequence.pages), self.allocator.statistics())
        copies = request.sequence.append(len(tokens))
        if copies is None:
            assert (request.sequence.pages, self.allocator.statistics()) == before
            return
        self.memory.copy(copies)
        have = len(request.tokens)
        request.tokens += tokens
        self.memory.write(request.sequence.pages, have, request.words[have:])

    @precondition(lambda self: self.running)
    @rule(numbers=st.sets(st.integers(0, MOST - 1), min_size=1), token=st.integers(0, 1))
    @counted
    def decode(self, numbers: set[int], token: int) -> None:
        """A step: when pages run out and nothing can be evicted, the latest request is preempted, all of it."""
        while chosen := [self.running[n] for n in sorted(numbers) if n < len(self.running)]:
            copies = self.allocator.append_one_to_each([request.sequence for request in chosen])
            if copies is not None:
                break
            if not self.cache.evict(1):
                self.preempt()
        else:
            return
        self.memory.copy(copies)
        for request in chosen:
            request.tokens.append(token)
            self.memory.write(request.sequence.pages, len(request.tokens) - 1, request.words[-1:])

    @precondition(lambda self: self.running)
    @rule()
    @counted
    def preempt(self) -> None:
        request = self.running[-1]
        self.preempted.append((request.salt, tuple(request.tokens[:14])))
        self.end(len(self.running) - 1)

    @precondition(lambda self: 0 < len(self.running) < MOST)
    @rule(number=st.integers(0, MOST - 1))
    @counted
    def fork(self, number: int) -> None:
        request = self.running[number % len(self.running)]
        self.cache.lock(request.node)
        twin = Request(request.salt, list(request.tokens), request.sequence.fork(), request.node)
        self.running.append(twin)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, MOST - 1))
    @counted
    def insert(self, number: int) -> None:
        """The request goes on; the cache gets references of its own."""
        request = self.running[number % len(self.running)]
        key = PrefixKey.of(request.tokens, request.salt)
        pages = request.sequence.pages[: len(request.tokens) // PAGE]
        cached = self.cache.match(key).pages
        readers = [self.allocator.readers(page) for page in pages]
        before, request.node = request.node, self.cache.insert(key, pages)
        added = [0] * len(cached) + [1] * (len(pages) - len(cached))
        assert [self.allocator.readers(page) for page in pages] == [*map(add, readers, added)]
        self.cache.lock(request.node)
        self.cache.unlock(before)
        self.reads_back(key, request.words)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, MOST - 1), cached=st.booleans())
    @counted
    def end(self, number: int, cached: bool = False) -> None:
        if cached:
            self.insert(number)
        request = self.running.pop(number % len(self.running))
        self.cache.unlock(request.node)
        request.sequence.free()

    @rule(pages=st.integers(1, 6))
    @counted
    def evict(self, pages: int) -> None:
        evictable, free = self.cache.evictable_pages, self.allocator.free_pages
        freed = self.cache.evict(pages)
        assert freed == self.allocator.free_pages - free
        assert freed <= min(pages, evictable)
        assert freed == pages or self.cache.evictable_pages == 0

    def reads_back(self, key: PrefixKey, words: list[Word]) -> None:
        found = self.cache.match(key)
        assert found.tokens == len(words) // PAGE * PAGE, "all of it was cached a moment ago"
        assert self.memory.read(found.pages, found.tokens) == words[: found.tokens]

    @rule()
    def router_listens(self) -> None:
        assert self.router.apply(self.cache.digest(self.router.version))
        for request in self.running:
            key = PrefixKey.of(request.tokens, request.salt)
            unit = self.router.unit_tokens
            held = self.router.longest_tokens(key.block_hashes(unit))
            assert held == self.cache.match(key).tokens // unit * unit

    @invariant()
    def sound(self) -> None:
        self.allocator.check()
        self.cache.check()
        statistics = self.cache.statistics()
        owned = sum(len(request.sequence.pages) for request in self.running)
        assert self.allocator.statistics().references == owned + statistics.cached_pages
        for request in self.running:
            assert request.sequence.tokens == len(request.tokens)
            assert self.memory.read(request.sequence.pages, len(request.tokens)) == request.words
        for _, pages, words in self.held:
            assert self.memory.read(pages, len(words)) == words

    def teardown(self) -> None:
        while self.held:
            self.unlock()
        while self.running:
            self.end(0)
        if hasattr(self, "cache"):
            assert self.cache.evictable_pages == self.cache.statistics().cached_pages
            self.cache.evict(PAGES)
            self.cache.check()
            assert self.cache.digest().added == b""
        assert self.allocator.statistics().used_pages == 0


TestCacheMachine = CacheMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_steps() -> None:
    """Pages and tree are checked after each."""
    run_steps(CacheMachine, 100_000)
    for name in ("fork", "append", "decode", "end", "insert", "match", "evict", "lock", "unlock", "preempt"):
        assert CacheMachine.done[name] > 2000, name
