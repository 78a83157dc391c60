"""A KV manager with three tiers whose memory, ranks and storage are simulated.

Each page, block and stored page holds the prefix whose KV it would have. Ranks work when the test says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from disagg.core.config.groups import HostWriteName, PrefillConfig
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import TOKEN_BYTES
from disagg.kv.cache_operations import CacheOperation, StorageOperation, StorageReport
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


@dataclass
class RankWork:
    """An operation on one rank, which reports once or several times."""

    operation: StorageOperation
    rank: int
    finished: int = 0
    unwanted: bool = False


@dataclass
class StoringGroup:
    """A KV manager, the memory of its ranks, its storage, and the work that is under way."""

    kv_manager: KVManager
    ranks: int = 1
    storage: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    """Content of each rank's part of a page."""
    pages: dict[int, bytes] = field(default_factory=dict)
    blocks: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """The prefix whose KV a rank has in a block."""
    copies: list[CacheOperation] = field(default_factory=list)
    works: list[RankWork] = field(default_factory=list)
    running: list[BlockTable] = field(default_factory=list)

    @classmethod
    def of(cls, pages: int = 16, blocks: int = 32, ranks: int = 1, **more: Any) -> StoringGroup:
        kv_manager = KVManager(pool_tokens=pages * PAGE, page_size=PAGE, rows=4, eviction="lru")
        group = cls(kv_manager, ranks)
        group.add_memory(blocks, **more)
        return group

    def add_memory(self, blocks: int, write: HostWriteName = "through", **more: Any) -> None:
        self.kv_manager.add_host_tier(blocks, 0, self.ranks, write)
        self.kv_manager.add_storage(links, PrefillConfig(**{"prefetch_min_tokens": 1, **more}))

    @property
    def tier(self) -> StorageTier:
        assert self.kv_manager.storage is not None
        return self.kv_manager.storage

    @property
    def counts(self) -> StorageTierStatistics:
        return self.tier.statistics()

    def restarted(self, **more: Any) -> StoringGroup:
        """Another group with the same storage."""
        other = StoringGroup.of(ranks=self.ranks, **more)
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
                        self.blocks[rank, block] = self.pages[page]
                    else:
                        self.pages[page] = self.blocks[rank, block]
        for rank in range(self.ranks):
            self.kv_manager.moved(operation.number, rank, error)
        self.take()

    def work(self, one: RankWork, pages: int = 100, error: str = "", seconds: float = 0.0) -> None:
        """A rank works on up to `pages` pages for `seconds`, and reports."""
        operation, rank = one.operation, one.rank
        done = one.unwanted or bool(error)
        for at in range(one.finished, min(len(operation.links), one.finished + pages) if not done else 0):
            link = operation.links[at]
            if operation.kind == "write":
                assert self.blocks[rank, operation.blocks[at]] == link, "the page of the link is written"
                self.storage[rank, link] = link
            elif (rank, link) not in self.storage:
                done = True
                break
            elif operation.kind == "fetch":
                self.blocks[rank, operation.blocks[at]] = self.storage[rank, link]
            one.finished += 1
        done |= one.finished == len(operation.links)
        if done:
            self.works.remove(one)
        report = StorageReport(operation.number, rank, one.finished, done, error, seconds)
        self.kv_manager.storage_moved(report)
        self.take()

    def settle(self) -> None:
        """All copies and all work."""
        self.take()
        while self.copies or self.works:
            for operation in list(self.copies):
                self.copy(operation)
            for one in list(self.works):
                self.work(one)
        self.check()

    def begin(self, tokens: Tokens) -> BlockTable | None:
        table = self.kv_manager.reserve(len(tokens), PrefixKey.of(tokens, ""))
        self.take()
        if table is not None:
            self.running.append(table)
        return table

    def compute(self, table: BlockTable, tokens: Tokens) -> None:
        """Reads what is cached and loaded, computes the rest, caches it, and ends the request."""
        self.keep(table, tokens)
        self.end(table)

    def keep(self, table: BlockTable, tokens: Tokens) -> None:
        """Reads what is cached and loaded, computes the rest, and caches it."""
        wanted = links(PrefixKey.of(tokens, ""))
        have = table.cached_tokens // PAGE
        assert [self.pages[page] for page in table.pages[:have]] == wanted[:have], "cached KV is the prompt's"
        self.pages.update(zip(table.pages[have:], wanted[have:], strict=False))
        self.kv_manager.keep(table, PrefixKey.of(tokens, ""))
        self.take()

    def end(self, table: BlockTable) -> None:
        """The request ends, even while ranks load its pages."""
        self.running.remove(table)
        self.kv_manager.release(table)
        self.take()

    def grow(self, table: BlockTable, prompt_pages: int) -> bool:
        """Adds a token to the answer; returns False if pages are short."""
        grown = self.kv_manager.grow([table]) is not None
        self.take()
        self.pages.update(dict.fromkeys(table.pages[prompt_pages:], b"of an answer"))
        return grown

    def require_equal(self, tokens: Tokens) -> None:
        """Asserts that each place of a page of a prompt has the prompt's KV."""
        key = PrefixKey.of(tokens, "")
        wanted, host = links(key), self.kv_manager.host
        assert self.kv_manager.cache is not None
        assert host is not None
        cached = self.kv_manager.cache.match_kv(key, uses=False).pages
        assert [self.pages[page] for page in cached] == wanted[: len(cached)]
        blocks = host.index.match_kv(key, uses=False).pages
        for rank in range(self.ranks):
            # page 0 of an allocator is its trash page
            assert [self.blocks[rank, block - 1] for block in blocks] == wanted[: len(blocks)]
            assert all(self.storage.get((rank, link), link) == link for link in wanted)

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
