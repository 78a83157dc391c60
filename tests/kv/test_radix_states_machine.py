"""Prompts are cached with states, matched, locked and evicted at random; a plain model predicts each match.

The model has a page for each cached prefix of whole pages, and a state for some of them. It takes from the cache only
which pages were evicted; matches, state evictions and slots are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import pytest
from counted_machine import CountedMachine, counted, run_steps
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from disagg.core.config.groups import EvictionName
from disagg.core.prefixes import PrefixKey
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix import RadixCache
from disagg.kv.radix_node import Node
from disagg.kv.state_slots import StateSlots

Prefix = tuple[str, tuple[int, ...]]
"""A salt, and tokens that fill whole pages."""
PAGES, PAGE, FIRST, SLOTS, MOST_LOCKS, MOST_HELD = 20, 2, 5, 5, 3, 2
TOKENS = st.lists(st.sampled_from([(0, 0), (0, 1)]), max_size=5).map(lambda pages: (*chain(*pages), 1))
"""Prompts of few different pages, whose last page is not full."""
SALTS = st.sampled_from(["", "", "", "a"])


@dataclass
class State:
    """A cached state in the model."""

    slot: int
    used: int
    """Time of the latest attachment or hit."""


@dataclass(frozen=True)
class Lock:
    """A lock of the node at the end of `prefix`."""

    node: Node
    prefix: Prefix
    state: bool


def prefixes(salt: str, tokens: tuple[int, ...], limit: int) -> list[Prefix]:
    """Prefixes of whole pages of at most `limit` tokens, shortest first."""
    return [(salt, tokens[:stop]) for stop in range(PAGE, min(limit, len(tokens)) + 1, PAGE)]


def extends(longer: Prefix, prefix: Prefix) -> bool:
    return longer[0] == prefix[0] and longer[1][: len(prefix[1])] == prefix[1]


class StatesMachine(CountedMachine):
    """`pages` and `states` are the model; `held` are slots that the caller owns."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(PAGES, PAGE)
        self.slots = StateSlots(FIRST, SLOTS)
        self.pages: dict[Prefix, int] = {}
        self.states: dict[Prefix, State] = {}
        self.held: list[int] = []
        self.locks: list[Lock] = []
        self.now = self.evicted = 0

    @initialize(policy=st.sampled_from(["lru", "lfu", "fifo"]))
    def choose(self, policy: EvictionName) -> None:
        self.cache = RadixCache(self.allocator, policy, unit_tokens=2 * PAGE, states=self.slots)

    def is_leaf(self, prefix: Prefix) -> bool:
        return not any(extends(other, prefix) for other in self.pages if other != prefix)

    def page_locked(self, prefix: Prefix) -> bool:
        return any(extends(lock.prefix, prefix) for lock in self.locks)

    def state_locked(self, prefix: Prefix) -> bool:
        return any(lock.state and lock.prefix == prefix for lock in self.locks)

    def next_evicted_state(self) -> Prefix | None:
        """Of the states that are not locked: inner ones first, then by latest use."""
        unlocked = [prefix for prefix in self.states if not self.state_locked(prefix)]
        return min(
            unlocked, key=lambda prefix: (self.is_leaf(prefix), self.states[prefix].used), default=None
        )

    def evicted_pages(self) -> None:
        """Removes evicted pages from the model, and the states at their ends."""
        there = set(self.cache.pages())
        self.pages = {prefix: page for prefix, page in self.pages.items() if page in there}
        kept = {prefix: state for prefix, state in self.states.items() if prefix in self.pages}
        self.evicted += len(self.states) - len(kept)
        self.states = kept

    @rule(tokens=TOKENS, salt=SALTS, positions=st.sets(st.integers(0, 4), max_size=3))
    @counted
    def insert(self, tokens: tuple[int, ...], salt: str, positions: set[int]) -> None:
        """Caches a prompt, and states at the ends of the pages `positions`."""
        pages: list[int] = []
        whole = prefixes(salt, tokens, len(tokens))
        short = len(whole) - self.allocator.free_pages
        if short > 0:
            self.cache.evict(short)
            self.evicted_pages()
        if self.allocator.alloc_tokens(0, len(whole) * PAGE, pages) is None:
            return
        self.cache.insert(PrefixKey.of(tokens, salt), pages)
        for prefix, page in zip(whole, pages, strict=True):
            self.pages.setdefault(prefix, page)
        self.allocator.free(pages)
        for position in sorted(positions):
            if position < len(whole) and len(self.held) < MOST_HELD:
                before = len(self.held)
                self.alloc_state()
                if len(self.held) > before:
                    self.attach(tokens, whole[position])

    @rule(tokens=TOKENS, salt=SALTS, most=st.integers(0, 12), lock=st.booleans())
    @counted
    def match(self, tokens: tuple[int, ...], salt: str, most: int, lock: bool) -> None:
        self.match_equals_model(tokens, salt, most, lock=lock)

    @precondition(lambda self: self.states)
    @rule(number=st.integers(0, SLOTS - 1), more=TOKENS, shorter=st.integers(0, 2), lock=st.booleans())
    @counted
    def match_a_state(self, number: int, more: tuple[int, ...], shorter: int, lock: bool) -> None:
        """Prompts that begin with the tokens of a state, with a limit before, at or after the state."""
        salt, tokens = list(self.states)[number % len(self.states)]
        self.match_equals_model(tokens + more, salt, len(tokens) + 1 - shorter, lock=lock)

    def match_equals_model(self, tokens: tuple[int, ...], salt: str, most: int, *, lock: bool) -> None:
        found = self.cache.match(PrefixKey.of(tokens, salt), most)
        stateful = [prefix for prefix in prefixes(salt, tokens, most) if prefix in self.states]
        longest = stateful[-1] if stateful else (salt, ())
        self.now += 1
        if stateful:
            assert found.state == self.states[longest].slot
            self.states[longest].used = self.now
        else:
            assert found.state is None
        assert found.tokens == len(longest[1])
        assert found.pages == [self.pages[prefix] for prefix in prefixes(*longest, most)]
        if lock:
            self.lock(found.node, longest, state=True)

    @rule(tokens=TOKENS, salt=SALTS, most=st.integers(0, 12), lock=st.booleans(), state=st.booleans())
    @counted
    def match_kv(self, tokens: tuple[int, ...], salt: str, most: int, lock: bool, state: bool) -> None:
        found = self.cache.match_kv(PrefixKey.of(tokens, salt), most)
        cached = [prefix for prefix in prefixes(salt, tokens, most) if prefix in self.pages]
        assert (found.pages, found.state) == ([self.pages[prefix] for prefix in cached], None)
        if lock:
            self.lock(found.node, cached[-1] if cached else (salt, ()), state=state)

    def lock(self, node: Node, prefix: Prefix, *, state: bool) -> None:
        if len(self.locks) < MOST_LOCKS:
            self.cache.lock(node, state=state)
            self.locks.append(Lock(node, prefix, state))

    @precondition(lambda self: self.locks)
    @rule(number=st.integers(0, MOST_LOCKS - 1))
    @counted
    def unlock(self, number: int) -> None:
        lock = self.locks.pop(number % len(self.locks))
        self.cache.unlock(lock.node, state=lock.state)

    @precondition(lambda self: len(self.held) < MOST_HELD)
    @rule()
    @counted
    def alloc_state(self) -> None:
        free, victim = self.slots.free_slots, self.next_evicted_state()
        slot = self.cache.alloc_state()
        if not free and victim is None:
            assert slot is None
            return
        assert slot is not None
        assert slot not in self.held
        if not free and victim is not None:
            assert slot == self.states.pop(victim).slot
            self.evicted += 1
        self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule()
    @counted
    def free_state(self) -> None:
        self.cache.free_state(self.held.pop())

    @precondition(lambda self: self.held)
    @rule(tokens=TOKENS, salt=SALTS, pages=st.integers(1, 5))
    @counted
    def attach_anywhere(self, tokens: tuple[int, ...], salt: str, pages: int) -> None:
        if whole := prefixes(salt, tokens, pages * PAGE):
            self.attach(tokens, whole[-1])

    @precondition(lambda self: self.held and self.pages)
    @rule(number=st.integers(0, PAGES), more=TOKENS)
    @counted
    def attach_to_cached(self, number: int, more: tuple[int, ...]) -> None:
        """The key may go on after the position."""
        prefix = list(self.pages)[number % len(self.pages)]
        self.attach(prefix[1] + more, prefix)

    def attach(self, tokens: tuple[int, ...], prefix: Prefix) -> None:
        slot, free = self.held.pop(), self.slots.free_slots
        attached = self.cache.attach_state(PrefixKey.of(tokens, prefix[0]), len(prefix[1]), slot)
        self.now += 1
        assert attached == (prefix in self.pages and prefix not in self.states)
        assert self.slots.free_slots == free + (not attached)
        if attached:
            self.states[prefix] = State(slot, self.now)
        elif prefix in self.states:
            self.states[prefix].used = self.now

    @rule(pages=st.integers(1, 5))
    @counted
    def evict(self, pages: int) -> None:
        unlocked = [prefix for prefix in self.pages if not self.page_locked(prefix)]
        useless = [prefix for prefix in unlocked if self.is_leaf(prefix) and prefix not in self.states]
        states = len(self.states)
        assert self.cache.evict(pages) == min(pages, len(unlocked))
        self.evicted_pages()
        if pages <= len(useless):
            assert len(self.states) == states, "pages without a state are evicted first"

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.allocator.check()
        self.cache.check()
        found = self.cache.statistics()
        assert sorted(self.cache.pages()) == sorted(self.pages.values())
        assert all(extends_all(prefix, self.pages) for prefix in self.pages)
        assert set(self.states) <= set(self.pages)
        locked = sum(self.state_locked(prefix) for prefix in self.states)
        assert (found.cached_states, found.locked_states) == (len(self.states), locked)
        assert (found.held_states, found.evicted_states) == (len(self.held), self.evicted)
        assert found.free_states == self.slots.free_slots == SLOTS - len(self.states) - len(self.held)
        assert found.locked_pages == sum(map(self.page_locked, self.pages))

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.locks:
            self.unlock(0)
        while self.held:
            self.free_state()
        self.cache.evict(PAGES)
        self.evicted_pages()
        self.sound()
        assert self.slots.free_slots == SLOTS
        assert self.allocator.statistics().used_pages == 0


def extends_all(prefix: Prefix, pages: dict[Prefix, int]) -> bool:
    """Whether all shorter prefixes are cached too."""
    return all(shorter in pages for shorter in prefixes(*prefix, len(prefix[1])))


TestStatesMachine = StatesMachine.TestCase
TestStatesMachine.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_steps() -> None:
    """Tree, slots and model are compared after each."""
    run_steps(StatesMachine, 100_000)
    for name in (
        "insert",
        "match",
        "match_a_state",
        "match_kv",
        "unlock",
        "alloc_state",
        "free_state",
        "attach_anywhere",
        "attach_to_cached",
        "evict",
    ):
        assert StatesMachine.done[name] > 1000, name
