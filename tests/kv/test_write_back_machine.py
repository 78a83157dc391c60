"""Requests come, hit, load, grow, are cached and aborted, at random, while evicted pages are copied to host memory.

Memory of all ranks is simulated: what a request reads must always be its own tokens' KV and state. A page that leaves
both tiers is counted, no request waits without a copy under way, and nothing is lost at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from counted_machine import CountedMachine, counted, run_steps
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from disagg.core.config.groups import EvictionName
from disagg.core.prefixes import PrefixKey
from disagg.kv.cache_operations import CacheOperation
from disagg.kv.host_tier import HostTier, HostTierStatistics
from disagg.kv.radix import RadixCache
from disagg.kv.state_slots import StateSlots
from disagg.kv.write_back import WriteBack
from disagg.node.block_table import BlockTable
from disagg.node.kv_manager import KVManager

Tokens = tuple[int, ...]
Word = tuple[int, ...]
"""KV of a page, or a state: the salt, and all tokens up to its end."""
PAGE, PAGES, ROWS, SLOTS = 2, 24, 4, 5
PROMPTS = st.tuples(st.sampled_from(["", "a"]), st.integers(0, 5), st.integers(1, 15)).map(
    lambda chosen: (chosen[0], tuple(chosen[1] >> at % 3 & 1 for at in range(chosen[2])))
)
"""Salt and tokens of a prompt: few of them, so that prompts come again, and begin like others."""


def words_of(salt: str, tokens: Tokens) -> list[Word]:
    """The word of each whole page."""
    return [(ord(salt or "-"), *tokens[:stop]) for stop in range(PAGE, len(tokens) // PAGE * PAGE + 1, PAGE)]


@dataclass(eq=False)
class Running:
    """A request with pages; `slot` has the state that a load brings, until the cache takes it over."""

    salt: str
    tokens: Tokens
    table: BlockTable
    slot: int | None = None
    computed: bool = False

    @property
    def key(self) -> PrefixKey:
        return PrefixKey.of(self.tokens, self.salt)


@dataclass(eq=False)
class Copying:
    """A copy under way, and the ranks that have not reported."""

    operation: CacheOperation
    missing: set[int]
    sources: dict[str, list[Word]] = field(default_factory=dict)
    """What a store must copy: the content of its pages and slots when it was planned."""


class WriteBackMachine(CountedMachine):
    """`copies` are under way; `device` and `host` have the content of pages and slots, by rank, pool and number."""

    @initialize(
        policy=st.sampled_from(["lru", "lfu", "fifo"]),
        blocks=st.sampled_from([3, 10, 40]),
        ranks=st.integers(1, 2),
        hybrid=st.booleans(),
    )
    def begin(self, policy: EvictionName, blocks: int, ranks: int, hybrid: bool) -> None:
        states = StateSlots(0, SLOTS) if hybrid else None
        self.kv_manager = KVManager(
            pool_tokens=PAGES * PAGE, page_size=PAGE, rows=ROWS, eviction=policy, states=states
        )
        self.kv_manager.add_host_tier(blocks, 4 if hybrid else 0, ranks, "back")
        self.hybrid, self.ranks = hybrid, ranks
        self.running: list[Running] = []
        self.copies: list[Copying] = []
        self.device: dict[tuple[int, str, int], Word] = {}
        self.host: dict[tuple[int, str, int], Word] = {}
        self.lost_blocks = 0

    # --- parts

    @property
    def cache(self) -> RadixCache:
        assert self.kv_manager.cache is not None
        return self.kv_manager.cache

    @property
    def tier(self) -> HostTier:
        assert self.kv_manager.host is not None
        return self.kv_manager.host

    @property
    def write_back(self) -> WriteBack:
        """It has no state of its own."""
        return WriteBack(self.cache, self.kv_manager.allocator, self.tier)

    def counts(self) -> HostTierStatistics:
        return self.tier.statistics()

    def take(self) -> None:
        """The operations of a plan begin."""
        for operation in self.kv_manager.take_operations():
            one = Copying(operation, set(range(self.ranks)))
            for part in operation.transfers if operation.store else ():
                one.sources[part.pool] = [self.device[0, part.pool, number] for number in part.device]
            self.copies.append(one)

    def write(self, pool: str, number: int, word: Word) -> None:
        for rank in range(self.ranks):
            self.device[rank, pool, number] = word

    def words_in(self, index: RadixCache) -> set[tuple[str, Word]]:
        """The words of all pages of a tree."""
        found, content = set(), self.device if index is self.cache else self.host
        shift = 0 if index is self.cache else 1  # page 0 of an allocator is its trash page
        for page in index.pages():
            found.add(("kv", content[0, "kv", page - shift]))
        return found

    # --- requests

    @precondition(lambda self: len(self.running) < ROWS)
    @rule(prompt=PROMPTS, computes=st.booleans())
    @counted
    def start(self, prompt: tuple[str, Tokens], computes: bool) -> None:
        """A new request, which waits if its pages are being copied."""
        salt, tokens = prompt
        table = self.kv_manager.reserve(len(tokens), PrefixKey.of(tokens, salt))
        self.take()
        if table is None:
            self.require_reason_to_wait(-(-len(tokens) // PAGE))
            return
        one = Running(salt, tokens, table)
        if table.load is not None and table.load.state is not None:
            one.slot = table.load.state[1]
        self.running.append(one)
        if computes:
            self.compute(len(self.running) - 1, states=True)

    def require_reason_to_wait(self, pages: int) -> None:
        """A copy is under way, or too many pages are in use: otherwise nothing would start the request later."""
        locked = self.cache.statistics().locked_pages
        assert self.copies or self.kv_manager.allocator.free_pages + self.cache.evictable_pages < pages, (
            locked
        )

    @precondition(lambda self: any(not one.computed for one in self.running))
    @rule(number=st.integers(0, ROWS - 1), states=st.booleans())
    @counted
    def compute(self, number: int, states: bool) -> None:
        """Reads what is cached and loaded, computes the rest, and caches it."""
        one = self.running[number % len(self.running)]
        if one.table.loading or one.computed:
            return
        words, have = words_of(one.salt, one.tokens), one.table.cached_tokens // PAGE
        for rank in range(self.ranks):
            read = [self.device[rank, "kv", page] for page in one.table.pages[:have]]
            assert read == words[:have], "cached KV is that of the prompt"
        self.read_state(one, words, have)
        for page, word in zip(one.table.pages[have:], words[have:], strict=False):
            self.write("kv", page, word)
        self.kv_manager.keep(one.table, one.key, self.states_to_keep(one, words, have, states))
        one.computed = True
        self.take()

    def read_state(self, one: Running, words: list[Word], have: int) -> None:
        """A hit of a hybrid model ends at a state, cached or loaded."""
        if not (self.hybrid and have):
            return
        slot = one.slot if one.slot is not None else one.table.state
        assert slot is not None
        for rank in range(self.ranks):
            assert self.device[rank, "state", slot] == words[have - 1]

    def states_to_keep(self, one: Running, words: list[Word], have: int, more: bool) -> list[tuple[int, int]]:
        """The loaded state, and a new one at the end of the prompt's pages."""
        found = []
        if one.slot is not None:
            found.append((have * PAGE, one.slot))
            one.slot = None
        if self.hybrid and more and words and (slot := self.kv_manager.alloc_state()) is not None:
            self.write("state", slot, words[-1])
            found.append((len(words) * PAGE, slot))
        return found

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, ROWS - 1))
    @counted
    def end(self, number: int) -> None:
        """A request ends, or is aborted while ranks load its pages."""
        one = self.running.pop(number % len(self.running))
        self.done["abort"] += one.table.loading
        if one.slot is not None:
            self.kv_manager.free_state(one.slot)
        self.kv_manager.release(one.table)
        self.take()

    @precondition(lambda self: any(one.computed for one in self.running) and not self.hybrid)
    @rule(number=st.integers(0, ROWS - 1))
    @counted
    def grow(self, number: int) -> None:
        """A running request never waits: it lacks pages only if none can be evicted."""
        one = self.running[number % len(self.running)]
        if not one.computed:
            return
        free = self.kv_manager.free_pages
        grown = self.kv_manager.grow([one.table.sequence]) is not None
        assert grown or not free
        self.take()
        for page in one.table.pages[len(one.tokens) // PAGE :]:
            self.write("kv", page, (-1,))

    # --- tiers

    @precondition(lambda self: self.counts().used_pages)
    @rule(prompt=PROMPTS)
    @counted
    def hit(self, prompt: tuple[str, Tokens]) -> None:
        """What a tree has of a prompt is the prompt's."""
        salt, tokens = prompt
        key, words = PrefixKey.of(tokens, salt), words_of(salt, tokens)
        for index, content, shift in ((self.cache, self.device, 0), (self.tier.index, self.host, 1)):
            found = index.match(key)
            for rank in range(self.ranks):
                read = [content[rank, "kv", page - shift] for page in found.pages]
                assert read == words[: len(found.pages)]
                if found.state is not None:
                    assert content[rank, "state", found.state] == words[len(found.pages) - 1]

    @precondition(lambda self: self.cache.evictable_pages)
    @rule(pages=st.integers(1, PAGES), waits=st.sampled_from([True, True, True, False]))
    @counted
    def evict(self, pages: int, waits: bool) -> None:
        """No page leaves both tiers uncounted; pages are short for a reason."""
        before, counts = self.words_in(self.cache) | self.words_in(self.tier.index), self.counts()
        done = self.write_back.make_room(pages, waits=waits)
        self.take()
        free = self.kv_manager.allocator.free_pages
        assert done == (free >= pages)
        if not done and waits:
            self.require_reason_to_wait(pages)
        elif not done:
            assert not self.cache.evictable_pages, "a request that cannot wait gets all evictable pages"
        if self.hybrid:  # pages that follow the last state are of no use, and are not copied
            return
        gone = before - self.words_in(self.cache) - self.words_in(self.tier.index)
        now = self.counts()
        dropped = now.skipped_pages - counts.skipped_pages
        assert len(gone) <= dropped + now.cache.evicted_pages - counts.cache.evicted_pages
        full = not self.tier.blocks.free_pages
        assert full or not (waits and dropped), (
            "a request that can wait drops no page that fits in host memory"
        )

    @precondition(lambda self: self.copies)
    @rule()
    @counted
    def copy_all(self) -> None:
        """All copies that are under way end."""
        while self.copies:
            self.copy(0, 0, 0)

    @precondition(lambda self: self.copies)
    @rule(number=st.integers(0, 40), rank=st.integers(0, 1), fails=st.integers(0, 20))
    @counted
    def copy(self, number: int, rank: int, fails: int) -> None:
        """A rank copies and reports, or fails to store."""
        one = self.copies[number % len(self.copies)]
        rank = sorted(one.missing)[rank % len(one.missing)]
        failed = one.operation.store and fails == 20
        for part in one.operation.transfers if not failed else ():
            for at, (page, block) in enumerate(zip(part.device, part.host, strict=True)):
                if one.operation.store:
                    word = self.device[rank, part.pool, page]
                    assert word == one.sources[part.pool][at], "its source was not written during the store"
                    self.host[rank, part.pool, block] = word
                else:
                    self.device[rank, part.pool, page] = self.host[rank, part.pool, block]
        one.missing.remove(rank)
        if not one.missing:
            self.copies.remove(one)
        self.done["fail"] += failed
        self.done["store" if one.operation.store else "load"] += not one.missing
        self.kv_manager.moved(one.operation.number, rank, "cannot pin" if failed else "", 0.5)
        self.kv_manager.moved(one.operation.number, rank)  # a repeated report changes nothing
        self.take()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "kv_manager"):
            return
        self.kv_manager.check([[one.table] for one in self.running])
        counts = self.counts()
        under_way = [part for one in self.copies for part in one.operation.transfers if part.pool == "kv"]
        assert counts.storing_pages + counts.loading_pages == sum(len(part.device) for part in under_way)
        assert self.tier.leaving_pages <= self.cache.statistics().locked_pages
        if not self.copies:
            assert not self.tier.leaving_pages
            owned = sum(one.slot is not None for one in self.running)
            assert self.cache.statistics().held_states == owned, "a slot is the request's, or the cache's"

    def teardown(self) -> None:
        """All copies end, then all requests: every page can be evicted, and a free pool loses nothing."""
        if not hasattr(self, "kv_manager"):
            return
        self.copy_all()
        while self.running:
            self.end(0)
        assert self.kv_manager.free_pages == PAGES
        while not self.write_back.make_room(PAGES, waits=True):
            self.take()
            assert self.copies, "otherwise the pool would never be free"
            self.copy_all()
        self.kv_manager.check([])
        assert self.cache.statistics().cached_pages == 0


TestWriteBackMachine = WriteBackMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_steps_of_write_back() -> None:
    """All structures are checked after each."""
    run_steps(WriteBackMachine, 100_000)
    for name in ("start", "compute", "end", "grow", "hit", "evict", "copy", "store", "load", "abort", "fail"):
        assert WriteBackMachine.done[name] > 50, name
