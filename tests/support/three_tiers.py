"""A KV manager with three tiers whose memory, ranks and storage are simulated.

Each page, block and stored page holds the prefix whose KV it would have, and each place of a recurrent state the
prefix whose state it would have. Ranks work when the test says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.core.config.groups import HostWriteName, PrefillConfig
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import TOKEN_BYTES
from disagg.kv.cache_operations import CacheOperation, StorageOperation, StorageReport
from disagg.kv.state_slots import StateSlots
from disagg.kv.storage_tier import Prefetch, StorageTier, StorageTierStatistics
from disagg.node.block_table import BlockTable
from disagg.node.kv_manager import KVManager

PAGE = 4
Tokens = tuple[int, ...]


def prompt(*pages: int) -> Tokens:
    """A prompt of whole pages, each of one repeated token, and a last token."""
    return (*(token for page in pages for token in [page] * PAGE), 99)


def links(prefix: PrefixKey) -> list[bytes]:
    """Of each page, the prefix itself up to its end."""
    size = PAGE * TOKEN_BYTES
    return [prefix.data[:stop] for stop in range(size, len(prefix.data) + 1, size)]


def state_key(link: bytes) -> bytes:
    """Stands for the state behind the page of `link` in the storage."""
    return b"state" + link


@dataclass
class RankWork:
    """An operation on one rank, which reports once or several times."""

    operation: StorageOperation
    rank: int
    finished: int = 0
    unwanted: bool = False

    @property
    def items(self) -> list[tuple[bytes, str, bytes, int]]:
        """Of each item: key in the storage, pool, link, host memory block (0 for a find)."""
        one = self.operation
        blocks = one.blocks or [0] * len(one.links)
        pages = [(link, "kv", link, block) for link, block in zip(one.links, blocks, strict=True)]
        states = zip(one.state_links, one.state_blocks, strict=False)  # a find has no blocks
        return pages + [(state_key(link), "state", link, block) for link, block in states]


STATE_TOKENS = 20
"""Tokens whose KV has as many bytes as a state."""


@dataclass
class StoringGroup:
    """A KV manager, the memory of its ranks, its storage, and the work that is under way."""

    kv_manager: KVManager
    ranks: int = 1
    storage: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    """Content of each rank's part of a page."""
    states: int = 0
    """State slots of the first tier, and state blocks of the second one; 0 for a model without states."""
    device: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """The prefix whose KV or state is in a page or slot."""
    blocks: dict[tuple[int, str, int], bytes] = field(default_factory=dict)
    """The prefix whose KV or state a rank has in a block of a pool."""
    copies: list[CacheOperation] = field(default_factory=list)
    works: list[RankWork] = field(default_factory=list)
    running: list[BlockTable] = field(default_factory=list)
    loaded: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(tokens, slot) of the state that a row's request owns."""

    @classmethod
    def of(
        cls, pages: int = 16, blocks: int = 32, ranks: int = 1, states: int = 0, **more: Any
    ) -> StoringGroup:
        slots = StateSlots(0, states) if states else None
        kv_manager = KVManager(pool_tokens=pages * PAGE, page_size=PAGE, rows=4, eviction="lru", states=slots)
        group = cls(kv_manager, ranks, states=states)
        group.add_memory(blocks, **more)
        return group

    def add_memory(self, blocks: int, write: HostWriteName = "through", **more: Any) -> None:
        self.kv_manager.add_host_tier(blocks, self.states, self.ranks, write)
        settings = PrefillConfig(**{"prefetch_min_tokens": 1, "storage": "pages", **more})
        self.kv_manager.add_storage(links, settings, STATE_TOKENS if self.states else 0)

    @property
    def tier(self) -> StorageTier:
        assert self.kv_manager.storage is not None
        return self.kv_manager.storage

    @property
    def counts(self) -> StorageTierStatistics:
        return self.tier.statistics()

    def restarted(self, **more: Any) -> StoringGroup:
        """Another group with the same storage."""
        other = StoringGroup.of(**{"ranks": self.ranks, "states": self.states, **more})
        other.storage = self.storage
        return other

    def take(self) -> None:
        """Sends a plan to all ranks."""
        self.copies += self.kv_manager.take_operations()
        for operation in self.kv_manager.take_storage_operations():
            self.works += [RankWork(operation, rank) for rank in range(self.ranks)]
        for number in self.kv_manager.take_unwanted_fetches():
            found = [work for work in self.works if work.operation.number == number]
            for work in found:
                work.unwanted = True

    def copy(self, operation: CacheOperation, error: str = "") -> None:
        """All ranks copy and report. `error`: of a store; nothing is copied."""
        self.copies.remove(operation)
        for part in operation.transfers if not error else ():
            for page, block in zip(part.device, part.host, strict=True):
                for rank in range(self.ranks):
                    if operation.store:
                        self.blocks[rank, part.pool, block] = self.device[part.pool, page]
                    else:
                        self.device[part.pool, page] = self.blocks[rank, part.pool, block]
        for rank in range(self.ranks):
            self.kv_manager.moved(operation.number, rank, error)
        self.take()

    def work(self, one: RankWork, pages: int = 100, error: str = "", seconds: float = 0.0) -> None:
        """A rank works on up to `pages` pages and states for `seconds`, and reports."""
        operation, rank, items = one.operation, one.rank, one.items
        done = one.unwanted or bool(error)
        for key, pool, link, block in items[one.finished : one.finished + pages] if not done else ():
            if operation.kind == "write":
                assert self.blocks[rank, pool, block] == link, "the page or state of the link is written"
                self.storage[rank, key] = link
            elif (rank, key) not in self.storage:
                done = True
                break
            elif operation.kind == "fetch":
                self.blocks[rank, pool, block] = self.storage[rank, key]
            one.finished += 1
        done |= one.finished == len(items)
        if done:
            self.works.remove(one)
        report = StorageReport(operation.number, rank, one.finished, done, error, seconds, self.found(one))
        self.kv_manager.storage_moved(report)
        self.take()

    def found(self, one: RankWork) -> list[int]:
        """The states that a find has found."""
        at = [*one.operation.state_links, *one.operation.links[: one.finished]]
        if one.operation.kind != "find" or not self.states:
            return []
        return [number for number, link in enumerate(at) if (one.rank, state_key(link)) in self.storage]

    def work_once(self) -> None:
        """All ranks finish the operations under way, but not those that are planned meanwhile."""
        for one in list(self.works):
            self.work(one)

    def settle(self) -> None:
        """All copies and all work."""
        self.take()
        while self.copies or self.works:
            for operation in list(self.copies):
                self.copy(operation)
            self.work_once()
        self.check()

    def begin(self, tokens: Tokens) -> BlockTable | None:
        table = self.kv_manager.reserve(len(tokens), PrefixKey.of(tokens, ""))
        self.take()
        if table is not None:
            self.running.append(table)
            if table.load is not None and table.load.state is not None:
                self.loaded[table.row] = table.load.state
        return table

    def compute(self, table: BlockTable, tokens: Tokens) -> None:
        """Reads what is cached and loaded, computes the rest, caches it, and ends the request."""
        self.keep(table, tokens)
        self.end(table)

    def keep(self, table: BlockTable, tokens: Tokens, state_pages: Sequence[int] | None = None) -> None:
        """Reads what is cached and loaded, computes the rest, and caches it.

        `state_pages`: numbers of pages behind which the state is cached; by default all pages.
        """
        wanted = links(PrefixKey.of(tokens, ""))
        have = table.cached_tokens // PAGE
        read = [self.device["kv", page] for page in table.pages[:have]]
        assert read == wanted[:have], "cached KV is the prompt's"
        self.device.update(
            {("kv", page): link for page, link in zip(table.pages[have:], wanted[have:], strict=False)}
        )
        states = self.states_of(table, wanted, have, state_pages) if self.states else []
        self.kv_manager.keep(table, PrefixKey.of(tokens, ""), states)
        self.take()

    def states_of(
        self, table: BlockTable, wanted: list[bytes], have: int, state_pages: Sequence[int] | None
    ) -> list[tuple[int, int]]:
        """Reads the state of the cached prefix; returns the states to cache."""
        loaded = self.loaded.pop(table.row, None)
        if have:
            slot = loaded[1] if loaded is not None else table.state
            assert slot is not None, "a hit ends at a state"
            assert self.device["state", slot] == wanted[have - 1], "the state is that of the cached prefix"
        states = [loaded] if loaded is not None else []
        for end in state_pages if state_pages is not None else [len(wanted)]:
            if have < end <= len(wanted) and (slot := self.kv_manager.alloc_state()) is not None:
                self.device["state", slot] = wanted[end - 1]
                states.append((end * PAGE, slot))
        return states

    def end(self, table: BlockTable) -> None:
        """The request ends, even while ranks load its pages."""
        self.running.remove(table)
        if (loaded := self.loaded.pop(table.row, None)) is not None:
            self.kv_manager.free_state(loaded[1])
        self.kv_manager.release(table)
        self.take()

    def grow(self, table: BlockTable, prompt_pages: int) -> bool:
        """Adds a token to the answer; returns False if pages are short."""
        grown = self.kv_manager.grow([table.sequence]) is not None
        self.take()
        self.device.update({("kv", page): b"of an answer" for page in table.pages[prompt_pages:]})
        return grown

    def require_equal(self, tokens: Tokens) -> None:
        """Asserts that each place of a page of a prompt has the prompt's KV."""
        key = PrefixKey.of(tokens, "")
        wanted, host = links(key), self.kv_manager.host
        assert self.kv_manager.cache is not None
        assert host is not None
        cached = self.kv_manager.cache.match_kv(key, uses=False).pages
        assert [self.device["kv", page] for page in cached] == wanted[: len(cached)]
        for node in self.kv_manager.cache.state_nodes(key, uses=False):
            assert self.device["state", node.state or 0] == wanted[node.end - 1]
        blocks = host.index.match_kv(key, uses=False).pages
        for rank in range(self.ranks):
            # page 0 of an allocator is its trash page
            assert [self.blocks[rank, "kv", block - 1] for block in blocks] == wanted[: len(blocks)]
            for node in host.index.state_nodes(key, uses=False):
                assert self.blocks[rank, "state", node.state or 0] == wanted[node.end - 1]
            for one in wanted:
                assert {self.storage.get((rank, stored), one) for stored in (one, state_key(one))} == {one}

    def answer(self, tokens: Tokens) -> int:
        """A whole request without a prefetch, and all work; returns the number of cached tokens."""
        table = self.begin(tokens)
        assert table is not None
        self.settle()
        cached = table.cached_tokens
        self.compute(table, tokens)
        self.settle()
        return cached

    def prefetch(self, tokens: Tokens) -> Prefetch | None:
        found = self.kv_manager.prefetch(PrefixKey.of(tokens, ""))
        self.take()
        return found

    def check(self) -> None:
        self.kv_manager.check([[table] for table in self.running])
