"""The second tier of the prefix cache: what is stored and loaded, who owns pages meanwhile, and random sequences.

Memory is simulated: each page and block holds the prefix whose KV it would have. Copies run when the test says so.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from disagg.core.config.groups import HostWriteName
from disagg.core.prefixes import PrefixKey
from disagg.kv.cache_operations import CacheOperation
from disagg.kv.host_tier import HostTierStatistics
from disagg.kv.token_rate import LEAST_TOKENS
from disagg.node.block_table import BlockTable
from disagg.node.kv_manager import KVManager

PAGE = 4
LONG = range(10, 24)
"""Of a prompt that fills a pool of 16 pages."""
Tokens = tuple[int, ...]


def prompt(*pages: int) -> Tokens:
    """A prompt of whole pages, each of one repeated token, and a last token."""
    return (*(token for page in pages for token in [page] * PAGE), 99)


@dataclass
class Group:
    """A KV manager, the memory of its ranks, and the copies that are under way."""

    kv_manager: KVManager
    ranks: int = 1
    pages: dict[int, Tokens] = field(default_factory=dict)
    """The prefix at whose end the KV in a page is."""
    blocks: dict[int, Tokens] = field(default_factory=dict)
    waiting: list[CacheOperation] = field(default_factory=list)
    running: list[BlockTable] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    """Blocks of failed stores."""

    @classmethod
    def of(
        cls, pages: int, blocks: int, ranks: int = 1, rows: int = 4, write: HostWriteName = "through"
    ) -> Group:
        kv_manager = KVManager(pool_tokens=pages * PAGE, page_size=PAGE, rows=rows, eviction="lru")
        kv_manager.add_host_tier(blocks, 0, ranks, write)
        return cls(kv_manager, ranks)

    def begin(self, tokens: Tokens) -> BlockTable | None:
        table = self.kv_manager.reserve(len(tokens), PrefixKey.of(tokens, ""))
        self.waiting += self.kv_manager.take_operations()
        if table is not None:
            self.running.append(table)
        return table

    def compute(self, table: BlockTable, tokens: Tokens) -> None:
        """Reads what is cached and loaded, computes the rest, and caches it."""
        have = table.cached_tokens // PAGE
        for number, page in enumerate(table.pages[:have]):
            assert self.pages[page] == tokens[: (number + 1) * PAGE], "cached KV is that of the prompt"
        for number in range(have, len(tokens) // PAGE):
            self.pages[table.pages[number]] = tokens[: (number + 1) * PAGE]
        self.kv_manager.keep(table, PrefixKey.of(tokens, ""))
        self.waiting += self.kv_manager.take_operations()

    def end(self, table: BlockTable) -> None:
        self.running.remove(table)
        self.kv_manager.release(table)

    def copy(self, operation: CacheOperation, error: str = "") -> None:
        """One rank's copy stands for that of all; each rank reports."""
        self.waiting.remove(operation)
        self.failed |= {block for part in operation.transfers if error for block in part.host}
        for part in operation.transfers if not error else ():
            for page, block in zip(part.device, part.host, strict=True):
                if operation.store:
                    self.blocks[block] = self.pages[page]
                else:
                    self.pages[page] = self.blocks[block]
        for rank in range(self.ranks):
            self.kv_manager.moved(operation.number, rank, error)

    def copy_all(self) -> None:
        for operation in list(self.waiting):
            self.copy(operation)

    def answer(self, tokens: Tokens) -> None:
        """A whole request, and all copies. With write-back, the request may wait for copies first."""
        while (table := self.begin(tokens)) is None:
            assert self.waiting
            self.copy_all()
        self.copy_all()
        self.compute(table, tokens)
        self.end(table)
        self.copy_all()
        self.check()

    @property
    def host(self) -> HostTierStatistics:
        found = self.kv_manager.statistics().host
        assert found is not None
        return found

    def check(self) -> None:
        self.kv_manager.check([[table] for table in self.running])


def test_an_evicted_prefix_comes_back() -> None:
    group = Group.of(pages=16, blocks=32)
    group.answer(prompt(1, 2, 3))
    group.answer(prompt(*LONG))  # evicts the first prompt
    group.answer(prompt(*LONG[:4]))
    host = group.kv_manager.host
    assert host is not None
    assert host.statistics().loaded_pages == 0, "what the first tier has is not loaded"
    table = group.begin(prompt(1, 2, 3))
    assert table is not None
    assert table.cached_tokens == 3 * PAGE
    assert host.statistics().loading_pages > 0
    assert table.loading
    group.copy_all()
    assert not table.loading
    group.compute(table, prompt(1, 2, 3))
    group.end(table)
    group.check()


def test_a_load_takes_as_long_as_its_slowest_rank() -> None:
    group = Group.of(pages=100, blocks=200, ranks=2)
    group.answer(prompt(*range(1, 21)))
    group.answer(prompt(*range(101, 200)))
    assert group.begin(prompt(*range(1, 21))) is not None
    [load] = group.waiting
    pages = len(load.transfers[0].device)
    assert pages * PAGE >= LEAST_TOKENS
    group.kv_manager.moved(load.number, 0, "", 0.5)
    assert group.host.load_s == 0.0, "the second rank still loads"
    group.kv_manager.moved(load.number, 1, "", 0.25)
    assert (group.host.load_s, group.host.load_tokens_per_s) == (0.5, pages * PAGE / 0.5)


def test_pages_of_a_load_are_not_given_away_before_its_end() -> None:
    """The request ends while ranks still load: later requests must not get its pages."""
    group = Group.of(pages=16, blocks=32, ranks=2)
    group.answer(prompt(1, 2, 3))
    group.answer(prompt(*LONG))
    table = group.begin(prompt(1, 2, 3))
    assert table is not None
    (load,) = group.waiting
    pages = set(load.transfers[0].device)
    assert pages
    group.end(table)
    group.check()
    assert group.begin(prompt(*LONG, 9)) is None, "all pages but those of the load are too few"
    free = group.kv_manager.free_pages
    group.kv_manager.moved(load.number, 0)
    assert group.kv_manager.free_pages == free, "the second rank still loads"
    group.kv_manager.moved(load.number, 0)
    assert group.kv_manager.free_pages == free, "a repeated report changes nothing"
    group.copy(load)
    assert group.kv_manager.free_pages == free + len(pages)
    group.check()


def test_pages_of_a_store_are_not_evicted_before_its_end() -> None:
    group = Group.of(pages=8, blocks=32)
    table = group.begin(prompt(1, 2))
    assert table is not None
    group.compute(table, prompt(1, 2))
    group.end(table)
    (store,) = group.waiting
    assert store.store
    assert group.kv_manager.free_pages == 6, "the pages that are being stored are locked"
    group.copy(store)
    assert group.kv_manager.free_pages == 8
    group.check()


def test_the_blocks_of_a_failed_store_are_not_used_again() -> None:
    """A rank could not pin their memory: the next store would take them first, and fail too."""
    group = Group.of(pages=8, blocks=32)
    table = group.begin(prompt(1, 2))
    assert table is not None
    group.compute(table, prompt(1, 2))
    group.end(table)
    group.copy(group.waiting[0], error="no memory")
    statistics = group.kv_manager.statistics().host
    assert statistics is not None
    assert (statistics.cache.cached_pages, statistics.failed_operations, statistics.storing_pages) == (
        0,
        1,
        0,
    )
    failed = group.failed
    group.check()
    table = group.begin(prompt(1, 2))
    assert table is not None
    group.compute(table, prompt(1, 2))
    (store,) = group.waiting
    assert not failed & set(store.transfers[0].host)
    group.end(table)
    group.copy_all()
    group.check()


def test_a_prefix_is_stored_once() -> None:
    group = Group.of(pages=16, blocks=32)
    first, second = group.begin(prompt(1, 2)), group.begin(prompt(1, 2, 3))
    assert first is not None
    assert second is not None
    group.compute(first, prompt(1, 2))
    group.compute(second, prompt(1, 2, 3))
    stored = [part.device for operation in group.waiting for part in operation.transfers]
    assert [len(pages) for pages in stored] == [2, 1], "pages of an earlier store are not stored again"
    group.copy_all()
    statistics = group.kv_manager.statistics().host
    assert statistics is not None
    assert (statistics.used_pages, statistics.stored_pages) == (3, 3)


def test_stores_may_use_a_part_of_the_first_tier_only() -> None:
    """Stores lock pages: without a limit, a slow host would keep requests out."""
    group = Group.of(pages=16, blocks=32)
    table = group.begin(prompt(*range(10)))
    assert table is not None
    group.compute(table, prompt(*range(10)))
    statistics = group.kv_manager.statistics().host
    assert statistics is not None
    assert (statistics.storing_pages, statistics.skipped_pages) == (4, 6)
    group.copy_all()
    group.kv_manager.keep(table, PrefixKey.of(prompt(*range(10)), ""))
    (store,) = group.kv_manager.take_operations()
    assert len(store.transfers[0].device) == 4, "the next use of the prefix stores more of it"


def test_prompts_that_never_come_back_cost_no_copies() -> None:
    """With `second_hit` the shared beginning is stored when a second request has used it, and the rest is not."""
    group = Group.of(pages=32, blocks=32)
    group.kv_manager.add_host_tier(32, 0, 1, "second_hit")
    host = group.kv_manager.host
    assert host is not None
    group.answer(prompt(1, 2, 3))
    assert host.statistics().stored_pages == 0
    group.answer(prompt(1, 2, 4))
    assert host.statistics().stored_pages == 2
    group.answer(prompt(1, 2, 4, 5))
    assert host.statistics().stored_pages == 3


@pytest.mark.parametrize(("write", "evicted"), [("through", 1 + 32 // 16), ("second_hit", 1)])
def test_eviction_ahead_needs_copies_in_host_memory(write: HostWriteName, evicted: int) -> None:
    group = Group.of(pages=32, blocks=64, write=write)
    for number in range(16):
        group.answer(prompt(100 + number))
    assert group.kv_manager.cache is not None
    before = group.kv_manager.cache.statistics()
    tokens = prompt(*range(16))
    table = group.begin(tokens)
    assert table is not None
    after = group.kv_manager.cache.statistics()
    assert (before.cached_pages, after.evicted_pages - before.evicted_pages) == (16, evicted)


def test_blocks_are_freed_ahead() -> None:
    group = Group.of(pages=128, blocks=64)
    for number in range(64):
        group.answer(prompt(number))
    assert group.kv_manager.host is not None
    blocks = group.kv_manager.host.blocks
    assert blocks.free_pages == 0
    group.answer(prompt(99))
    assert blocks.free_pages == 65 // 32


def held_back(pages: int = 8, blocks: int = 32) -> Group:
    """A group with write-back whose pool is full of the pages of two prompts."""
    group = Group.of(pages, blocks, write="back")
    group.answer(prompt(1, 2, 3))
    group.answer(prompt(4, 5, 6))
    assert group.host.stored_pages == 0, "nothing was evicted"
    return group


def test_write_back_copies_pages_when_they_are_evicted() -> None:
    """The new request waits for the copies; the pages are not allocated before their end."""
    group = held_back()
    assert group.begin(prompt(7, 8, 9)) is None
    (store,) = group.waiting
    assert len(store.transfers[0].device) == 2, "the quarter of the pool that may be copied at one time"
    assert group.begin(prompt(7, 8, 9)) is None
    assert len(group.waiting) == 1, "no further store is planned while the first one is under way"
    group.copy_all()
    assert group.begin(prompt(7, 8, 9)) is None, "the end of the evicted prompt is not copied yet"
    group.copy_all()
    table = group.begin(prompt(7, 8, 9))
    assert table is not None
    group.compute(table, prompt(7, 8, 9))
    group.end(table)
    assert (group.host.stored_pages, group.host.skipped_pages) == (3, 0)
    group.answer(prompt(1, 2, 3))
    assert group.host.loaded_pages > 0


def test_write_back_without_blocks_evicts() -> None:
    """Host memory that has no room for a prompt must not keep requests out."""
    group = held_back(blocks=1)
    tables = [group.begin(prompt(7, 8, 9, 10)) for _ in range(4) if not group.copy_all()]
    assert any(tables)
    assert group.host.skipped_pages > 0
    group.check()


def test_a_running_request_does_not_wait_for_write_back() -> None:
    group = held_back()
    table = group.begin((1,))
    assert table is not None
    free = group.kv_manager.allocator.free_pages
    for _ in range((free + 2) * PAGE):
        assert group.kv_manager.grow([table.sequence]) is not None
    assert group.host.skipped_pages > 0
    group.check()


def test_failed_copies_of_write_back_keep_no_request_out() -> None:
    group = held_back()
    for _ in range(30):
        for operation in list(group.waiting):
            group.copy(operation, error="no memory")
        group.check()
        if group.begin(prompt(7, 8, 9)) is not None:
            return
    pytest.fail("the request never gets pages")


def test_write_back_frees_a_share_of_the_pool_ahead() -> None:
    """A request of few pages does not wait."""
    group = Group.of(32, 64, write="back")
    for number in range(12):
        group.answer(prompt(number, number, number))
    assert group.kv_manager.allocator.free_pages >= 2
    assert group.host.stored_pages > 0


def test_salts_share_nothing() -> None:
    group = Group.of(pages=8, blocks=32)
    group.answer(prompt(1, 2, 3))
    assert group.kv_manager.cached_tokens(PrefixKey.of(prompt(1, 2, 3), "other")) == 0
    assert group.kv_manager.cached_tokens(PrefixKey.of(prompt(1, 2, 3), "")) == 3 * PAGE


def test_no_second_tier_without_a_prefix_cache() -> None:
    kv_manager = KVManager(pool_tokens=64, page_size=PAGE, rows=2)
    kv_manager.add_host_tier(10, 0, 1)
    assert kv_manager.host is None


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.slow)], ids=["first", "more"]
)
def test_random_sequences(seeds: range) -> None:
    """Requests, copies, failures and ends in any order: cached KV is always that of the prompt, nothing leaks."""
    loaded = 0
    for seed in seeds:
        loaded += random_run(random.Random(seed))
    assert loaded > 10 * len(seeds)


def random_run(choose: random.Random) -> int:
    """Returns the number of loaded pages."""
    write: HostWriteName = choose.choice(["through", "back"])
    group = Group.of(choose.randint(6, 16), choose.choice([6, 12, 40]), choose.randint(1, 2), write=write)
    tokens: dict[int, Tokens] = {}
    for _ in range(300):
        what = choose.random()
        if what < 0.35:
            one = prompt(*(choose.randrange(3) for _ in range(choose.randint(1, 5))))
            table = group.begin(one)
            if table is not None:
                tokens[table.row] = one
        elif what < 0.65 and group.waiting:
            # A load is first in the order of plans, and fails with its whole group only.
            operation = choose.choice(group.waiting)
            group.copy(operation, "failed" if operation.store and choose.random() < 0.05 else "")
        elif what < 0.85 and group.running:
            table = choose.choice(group.running)
            if not table.loading:
                group.compute(table, tokens[table.row])
                group.end(table)
        elif group.running and choose.random() < 0.3:
            group.end(choose.choice(group.running))  # aborted, even while ranks load
        group.check()
    for table in list(group.running):
        group.end(table)
    group.copy_all()
    group.check()
    statistics = group.kv_manager.statistics()
    assert statistics.host is not None
    assert statistics.host.storing_pages == statistics.host.loading_pages == 0
    assert group.kv_manager.free_pages == group.kv_manager.pages
    return statistics.host.loaded_pages
