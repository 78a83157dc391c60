"""KV manager of a group: allocates a row to each sequence, and pages as the sequence grows.

All ranks of a group use the same row and page numbers, so only the leader has a KV manager.

References to a request's pages, by their interval, with their owner and the call that drops them:

    [reserve, release)      the block table references each of its pages, including cached ones; `release` or `vacate`
                            drops the references. After `vacate`, `refill` allocates new pages
    [fork, release)         each fork of a request references the shared pages; `release` of the fork drops them
    [keep, evicted)         the prefix cache references each full page that it adds; eviction drops the reference

State slots of hybrid models, by their interval, with their owner:

    [alloc_state, keep)     the caller; `free_state` also ends the interval
    [keep, evicted)         the prefix cache, unless `keep` frees the slot because the state is not needed

With a second tier (`disagg.kv.host_tier`), `reserve` may plan a load to pages of the block table, and `keep` a store.
With write-back (`disagg.kv.write_back`), evictions plan the stores instead. The tier has its own references and locks
until every rank has reported the end of the copy (`moved`). With a third tier (`disagg.kv.storage_tier`), `prefetch`
reads pages of a queued prompt into the second tier; a request owns its prefetch until `end_prefetch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.core.config.groups import EvictionName, GroupConfig, HostWriteName
from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey, Tier
from disagg.kv.cache_operations import CacheOperation, CacheWork, StorageOperation, StorageReport
from disagg.kv.event_log import KVEventLog
from disagg.kv.free_pages import AHEAD_SHARE
from disagg.kv.host_tier import HostTier, HostTierStatistics
from disagg.kv.page_values import PageCopy, PageStatistics
from disagg.kv.pages import TRASH_PAGE, TokenToKVPoolAllocator, pages_for
from disagg.kv.radix import RadixCache
from disagg.kv.radix_node import Node
from disagg.kv.radix_values import Match, RadixStatistics
from disagg.kv.sequence import KVSequence
from disagg.kv.state_slots import StateSlots
from disagg.kv.storage_tier import Links, Prefetch, StorageTier
from disagg.kv.write_back import WriteBack
from disagg.node.block_table import BlockTable, Layout


class _Hit(NamedTuple):
    """The cached prefix of a prompt, over both memory tiers."""

    first: Match
    """Match in the first tier."""
    longer: Match | None = None
    """Match in the second tier, if longer than `first`; otherwise None."""
    slot: int | None = None
    """State slot for the state of `longer`, owned by the caller."""


@dataclass(frozen=True, slots=True)
class KVManagerStatistics:
    """Current counts of the KV manager."""

    rows: int
    free_rows: int
    pages: PageStatistics
    cache: RadixStatistics | None = None
    """Counts of the prefix cache; None without a prefix cache."""
    host: HostTierStatistics | None = None
    """Counts of the second tier; None without a second tier."""


class KVManager:
    """Allocates rows and pages. Not thread-safe: the leader's lock guards it. Page 0 is the trash page."""

    def __init__(
        self,
        *,
        pool_tokens: int,
        page_size: int,
        rows: int,
        eviction: EvictionName | None = None,
        states: StateSlots | None = None,
        receives_states: bool = False,
    ) -> None:
        """`eviction`: policy of the prefix cache; None: no prefix cache.

        `states`: slots for cached states of a hybrid model, unused without a prefix cache. `receives_states`: whether
        the group receives the state of each prompt, so that `reserve` needs no cached state; see `refill_cached`.
        """
        self.allocator = TokenToKVPoolAllocator(pool_tokens // page_size + 1, page_size)
        """Pages of the pool; only the KV manager allocates and frees."""
        self.cache: RadixCache | None = None
        """The prefix cache; None without one."""
        if eviction:
            self.cache = RadixCache(self.allocator, eviction, states=states, matches_kv=receives_states)
        self._eviction, self._stores_unused = eviction, True
        self.host: HostTier | None = None
        """The second tier of the prefix cache; None without one."""
        self._write_back: WriteBack | None = None
        self._rows = rows
        self._free_rows = list(range(rows - 1, -1, -1))

    def add_host_tier(self, pages: int, states: int, ranks: int, write: HostWriteName = "through") -> None:
        """Adds a second tier of `pages` and `states` blocks of host memory on each of `ranks` ranks.

        `write`: see `GroupConfig.host_cache_write`. Adds no tier without a prefix cache, without pages, or for a
        hybrid model without states.
        """
        if self.cache is not None and self._eviction is not None and pages:
            if self.cache.needs_state and not states:
                return
            self._stores_unused = write == "through"
            self.host = HostTier(
                self.cache,
                self.allocator,
                pages=pages,
                ranks=ranks,
                eviction=self._eviction,
                states=states,
            )
            if write == "back":
                self._write_back = WriteBack(self.cache, self.allocator, self.host)

    def add_storage(self, links: Links, group: GroupConfig, state_tokens: float = 0.0) -> None:
        """Adds a third tier if the group has a second tier; see `HostTier.add_storage`."""
        if self.host is not None:
            self.host.add_storage(links, group, state_tokens)

    @property
    def storage(self) -> StorageTier | None:
        """The third tier of the prefix cache; None without one."""
        return self.host.storage if self.host is not None else None

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.allocator.page_size

    @property
    def caches(self) -> bool:
        """Whether the group has a prefix cache."""
        return self.cache is not None

    @property
    def caches_states(self) -> bool:
        """Whether the prefix cache has slots for recurrent states."""
        return self.cache is not None and self.cache.keeps_states

    @property
    def kv_events(self) -> Mapping[Tier, KVEventLog]:
        """KV events of each tier of the prefix cache; empty without one."""
        if self.cache is None:
            return {}
        if self.host is None:
            return {"device": self.cache.kv_events}
        return {"device": self.cache.kv_events, **self.host.kv_events}

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the largest sequence that fits the pool."""
        return (self.allocator.pages - 1) * self.allocator.page_size

    @property
    def pages(self) -> int:
        """Pages of the pool without the trash page."""
        return self.allocator.pages - 1

    @property
    def rows(self) -> int:
        """Largest number of sequences with pages at one time."""
        return self._rows

    @property
    def free_rows(self) -> int:
        """Rows that can be allocated now."""
        return len(self._free_rows)

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now, including cached pages that can be evicted."""
        return self.allocator.free_pages + (self.cache.evictable_pages if self.cache is not None else 0)

    def reserve(
        self, tokens: int, prompt: PrefixKey | None = None, spare_pages: int = 0
    ) -> BlockTable | None:
        """Allocates a row and pages for `tokens` tokens; None if rows or pages are short.

        With write-back, None can also mean that pages are being copied to host memory; try again when a copy ends.

        With `prompt` the block table begins with the longest cached prefix, which never includes the prompt's last
        token. `spare_pages` pages must remain free. For a hybrid model the prefix ends at a cached state, which
        `BlockTable.state` names and the block table locks.
        """
        if not self._free_rows:
            return None
        hit = self._hit(prompt)
        block_table = BlockTable(self._free_rows[-1], KVSequence(self.allocator))
        if self.cache is not None and hit is not None:
            first = hit.first
            self.cache.lock(first.node, state=first.state is not None)
            sequence = KVSequence(self.allocator, first.pages)
            block_table = BlockTable(block_table.row, sequence, first.tokens, first.node, first.state)
        need = pages_for(tokens, self.page_size) - len(block_table.pages)
        if need + spare_pages > self.free_pages or not self._make_room_beside(hit, need):
            block_table.sequence.free()
            self._forget(block_table)
            self._forget_hit(hit)
            return None
        block_table.sequence.append(
            tokens - block_table.tokens
        )  # shared pages are full: no copies are needed
        self._free_rows.pop()
        if self.cache is not None and hit is not None:
            self.cache.count(hit.first)
            self._load(block_table, hit)
        return block_table

    def _hit(self, prompt: PrefixKey | None) -> _Hit | None:
        """Returns the longest cached prefix over both tiers; None without a prefix cache, or without `prompt`."""
        if self.cache is None or prompt is None:
            return None
        first = self.cache.match(prompt, prompt.tokens - 1)
        longer = self._longer_in_host(prompt, first)
        if longer is None or longer.state is None:
            return _Hit(first, longer)
        slot = self.cache.alloc_state()
        if slot is None:
            return _Hit(self.cache.match(prompt, prompt.tokens - 1))
        # The first tier may have KV after its last state. The loaded state makes that KV usable too.
        return _Hit(self.cache.match_kv(prompt, longer.tokens), longer, slot)

    def _make_room_beside(self, hit: _Hit | None, pages: int) -> bool:
        """Makes room for a new request, which may wait for stores; keeps its hit in the second tier valid."""
        if self.host is None or hit is None or hit.longer is None:
            return self._make_room(pages, waits=True)
        index, longer = self.host.index, hit.longer
        index.lock(longer.node, state=longer.state is not None)
        room = self._make_room(pages, waits=True)
        index.unlock(longer.node, state=longer.state is not None)
        return room

    def _load(self, block_table: BlockTable, hit: _Hit) -> None:
        """Plans the load of the part of a hit that only the second tier has."""
        first, longer = len(hit.first.pages), hit.longer
        if self.host is None or longer is None:
            return
        pages = block_table.pages[first : len(longer.pages)]
        block_table.load = self.host.load(longer, first, pages, hit.slot)
        block_table.cached_tokens = longer.tokens

    def _forget_hit(self, hit: _Hit | None) -> None:
        if hit is not None and hit.slot is not None:
            self.free_state(hit.slot)

    def _longer_in_host(self, prompt: PrefixKey, hit: Match) -> Match | None:
        """Returns the prompt's hit in the second tier, if it is longer than `hit`."""
        if self.host is None:
            return None
        found = self.host.match(prompt, prompt.tokens - 1)
        return found if found.tokens > hit.tokens else None

    def cached_tokens(self, prompt: PrefixKey | None) -> int:
        """Returns the number of cached tokens with which a block table of `prompt` would begin; see `reserve`."""
        if self.cache is None or prompt is None:
            return 0
        hit = self.cache.match(prompt, prompt.tokens - 1)
        return (self._longer_in_host(prompt, hit) or hit).tokens

    def prefetch(self, prompt: PrefixKey | None) -> Prefetch | None:
        """Begins to read from the third tier the pages of a queued prompt that neither memory tier has.

        Returns None if nothing is read. The caller owns the result until `end_prefetch`.
        """
        if self.storage is None or prompt is None:
            return None
        return self.storage.prefetch(prompt.shortened(prompt.tokens - 1), self.cached_tokens(prompt))

    def set_prompt_rate(self, tokens_per_s: float) -> None:
        """Sets the measured rate at which the group computes prompts; see `FetchPatience`."""
        if self.storage is not None:
            self.storage.patience.prompt_tokens_per_s = tokens_per_s

    def end_prefetch(self, prefetch: Prefetch | None) -> None:
        """Ends a prefetch whose request has its pages, or has ended. Idempotent."""
        if self.storage is not None and prefetch is not None:
            self.storage.release(prefetch)

    def alloc_state(self) -> int | None:
        """Returns a state slot, owned by the caller until `keep` or `free_state`, or None if all are in use.

        See `RadixCache.alloc_state`.
        """
        return self.cache.alloc_state() if self.cache is not None else None

    def free_state(self, slot: int) -> None:
        """Frees a slot of `alloc_state`. Raises ValueError, changing nothing, if the caller does not own it."""
        if self.cache is None:
            raise ValueError(f"state slot {slot} is not allocated: the group has no prefix cache")
        if self.host is None or not self.host.frees_later(slot):
            self.cache.free_state(slot)

    def pass_on(
        self, block_table: BlockTable, kept_tokens: int, tokens: int, spare_pages: int = 0
    ) -> BlockTable | None:
        """Resizes the block table of a closed request to `tokens` tokens for another request.

        Keeps the row and the pages of the first `kept_tokens` tokens, which fill whole pages, and frees the other
        pages. Returns the block table; if pages are short, releases the block table and returns None.
        """
        self.shrink(block_table, kept_tokens)
        need = pages_for(tokens, self.page_size) - len(block_table.pages)
        if need + spare_pages > self.free_pages or not self._make_room(need):
            self.release(block_table)
            return None
        block_table.sequence.append(tokens - block_table.tokens)
        return block_table

    def _make_room(self, pages: int, *, waits: bool = False) -> bool:
        """Evicts cached pages until `pages` pages are free; returns False, changing nothing, if too few can be
        evicted.

        `waits`: with write-back, returns False while evicted pages are being copied; see `WriteBack.make_room`.
        """
        short = pages - self.allocator.free_pages
        if short <= 0:
            return True
        if self.cache is None or self.cache.evictable_pages < short:
            return False
        if self._write_back is not None:
            return self._write_back.make_room(pages, waits=waits)
        # With write-through, host memory usually has copies. A few more evictions make the runs of new pages longer.
        spare = self.pages // AHEAD_SHARE if self.host is not None and self._stores_unused else 0
        return self.cache.evict(min(short + spare, self.cache.evictable_pages)) >= short

    def keep(
        self, block_table: BlockTable, prompt: PrefixKey, states: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Adds the full pages of `prompt` to the prefix cache. Their KV must have been computed.

        `states`: (tokens, slot) of each state to cache: the state after the first `tokens` tokens, whole pages. The
        cache takes over the slots, and frees the slots of positions that have a state already. `BlockTable.state`
        becomes None, because even the state that the request began with may now be evicted while the request runs.
        """
        if self.cache is None:
            return
        pages = block_table.pages[: prompt.tokens // self.page_size]
        node = self.cache.insert(prompt, pages)
        self.cache.lock(node, state=False)
        self._unlock(block_table)
        block_table.node = node
        for tokens, slot in states:
            self.cache.attach_state(prompt, tokens, slot)
        if self._write_back is not None:
            self._write_back.free_ahead()
            if self.storage is not None:
                self.storage.write(prompt)
        elif self.host is not None:
            self.host.store(prompt if self._stores_unused else prompt.shortened(self._used_tokens(node)))

    def has_copies(self, block_table: BlockTable, prefix: PrefixKey) -> bool:
        """Returns whether the cache has KV of `prefix` in other pages than the block table.

        `keep` would lock these other pages too. A running sequence must not lock them: the oldest request could then
        lack pages although it fits the pool alone.
        """
        if self.cache is None:
            return False
        pages = self.cache.match_kv(prefix).pages
        return pages != block_table.pages[: len(pages)]

    def _used_tokens(self, node: Node) -> int:
        """Returns the number of tokens of the longest prefix on the path of `node` that some request has hit."""
        above: Node | None = node
        while above is not None and not above.hits:
            above = above.parent
        return above.end * self.page_size if above is not None else 0

    def take_operations(self) -> list[CacheOperation]:
        """Returns the second tier's operations for the next plan; see `HostTier.take_operations`."""
        return self.host.take_operations() if self.host is not None else []

    def moved(self, number: int, rank: int, error: str = "", seconds: float = 0.0) -> None:
        """Records a rank's report of an operation of the second tier; see `HostTier.moved`."""
        if self.host is not None:
            self.host.moved(number, rank, error, seconds)

    def take_storage_operations(self) -> list[StorageOperation]:
        """Returns the third tier's operations for the next plan; see `StorageTier.take_operations`."""
        return self.storage.take_operations() if self.storage is not None else []

    def take_unwanted_fetches(self) -> list[int]:
        """Returns the fetches that ranks must end now; see `StorageTier.take_unwanted`."""
        return self.storage.take_unwanted() if self.storage is not None else []

    def take_cache_work(self) -> CacheWork:
        """Returns the work between the tiers for the next plan; each item is returned once."""
        return CacheWork(self.take_operations(), self.take_storage_operations(), self.take_unwanted_fetches())

    def storage_moved(self, report: StorageReport) -> None:
        """Records a rank's report of an operation of the third tier; see `StorageTier.moved`."""
        if self.storage is not None:
            self.storage.moved(report)

    def fork(self, block_table: BlockTable) -> BlockTable | None:
        """Returns a fork of the sequence with its own row and the same pages; None if no row is free."""
        if not self._free_rows:
            return None
        twin = BlockTable(self._free_rows.pop(), block_table.sequence.fork())
        self._read_cached(twin, block_table)
        return twin

    def refork(self, block_table: BlockTable, other: BlockTable) -> None:
        """Frees the pages of `block_table` and makes it a fork of `other`. `block_table` keeps its row."""
        self.vacate(block_table)
        block_table.sequence.free()
        block_table.sequence = other.sequence.fork()
        self._read_cached(block_table, other)

    def _read_cached(self, block_table: BlockTable, other: BlockTable) -> None:
        """Locks the cached prefix of `other` for its fork `block_table`. The state is not locked: forks copy it."""
        if self.cache is not None and other.node is not None:
            self.cache.lock(other.node, state=False)
        block_table.cached_tokens, block_table.node = other.cached_tokens, other.node
        block_table.load = other.load

    def grow(self, sequences: Sequence[KVSequence]) -> list[PageCopy] | None:
        """Appends a slot for one token to each of `sequences`; None, changing nothing, if pages are short.

        Returns the page copies to launch before the tokens are written: copies of shared, partly filled pages.
        """
        copies = self.allocator.append_one_to_each(sequences)
        if copies is None and self._make_room(self.allocator.pages_to_append(sequences)):
            copies = self.allocator.append_one_to_each(sequences)
        if self._write_back is not None:
            self._write_back.free_ahead()
        return copies

    def shrink(self, block_table: BlockTable, tokens: int) -> None:
        """Truncates the sequence to `tokens` tokens and frees the later pages."""
        block_table.sequence.truncate(tokens)

    def vacate(self, block_table: BlockTable) -> None:
        """Frees the pages but keeps the row; `refill` allocates new pages later."""
        self.shrink(block_table, 0)
        self._forget(block_table)

    def layout(self, block_tables: Sequence[BlockTable], tokens: Sequence[int]) -> Layout:
        """Returns which pages the block tables share in their first `tokens[i]` tokens, as input of `refill`."""
        numbers: dict[int, int] = {}
        sequences = []
        for block_table, count in zip(block_tables, tokens, strict=True):
            pages = block_table.pages[: pages_for(count, self.page_size)]
            sequences.append((count, tuple(numbers.setdefault(page, len(numbers)) for page in pages)))
        return Layout(len(numbers), tuple(sequences))

    def refill(self, block_tables: Sequence[BlockTable], layout: Layout) -> list[int] | None:
        """Allocates pages for vacated block tables, shared as in `layout`.

        Returns the allocated page of each page index in `layout`; None, changing nothing, if pages are short.
        """
        if not self._make_room(layout.pages):
            return None
        pages: list[int] = []
        for block_table, (tokens, numbers) in zip(block_tables, layout.sequences, strict=True):
            shared = [pages[number] for number in numbers if number < len(pages)]
            block_table.sequence.free()
            block_table.sequence = KVSequence(self.allocator, shared)
            if tokens < block_table.tokens:  # the last page is shared and partly filled
                block_table.sequence.truncate(tokens)
            else:
                block_table.sequence.append(tokens - block_table.tokens)
            pages += block_table.pages[len(shared) :]
        return pages

    def refill_cached(
        self,
        block_tables: Sequence[BlockTable],
        layout: Layout,
        keys: Sequence[PrefixKey],
        prompt_tokens: int,
    ) -> bool:
        """Like `refill`, but each block table begins with the longest prefix of its key that ends at a cached state.

        `keys[i]` covers the first `tokens[i]` tokens of `layout`. The block table locks the state and names it in
        `BlockTable.state`; `BlockTable.cached_tokens` is its position. Returns False, changing nothing, if pages are
        short or a table has no state. The states of several tables must be after the full pages of the prompt of
        `prompt_tokens` tokens: tables share only cached pages, and `sequences_that_fit` counts a prompt's pages once.
        """
        if not self.caches_states or self.cache is None:
            return False
        hits = [self.cache.match_state(key) for key in keys]
        least = prompt_tokens // self.page_size * self.page_size if len(hits) > 1 else 0
        if any(hit.state is None or hit.tokens < least for hit in hits):
            return False
        for block_table, hit in zip(block_tables, hits, strict=True):
            self.cache.lock(hit.node)
            block_table.sequence.free()
            block_table.sequence = KVSequence(self.allocator, hit.pages)
            block_table.cached_tokens, block_table.node, block_table.state = hit.tokens, hit.node, hit.state
        missing = [
            tokens - table.tokens for table, (tokens, _) in zip(block_tables, layout.sequences, strict=True)
        ]
        if not self._make_room(sum(pages_for(count, self.page_size) for count in missing)):
            for block_table in block_tables:
                self.vacate(block_table)
            return False
        for block_table, count in zip(block_tables, missing, strict=True):
            block_table.sequence.append(count)
        return True

    def release(self, block_table: BlockTable) -> None:
        """Frees row and pages. Raises `ValueError` if the row is free already."""
        if block_table.row in self._free_rows:
            raise ValueError(f"row {block_table.row} is released twice")
        block_table.sequence.free()
        self._free_rows.append(block_table.row)
        self._forget(block_table)

    def _forget(self, block_table: BlockTable) -> None:
        """Unlocks the cached prefix of the sequence."""
        self._unlock(block_table)
        block_table.cached_tokens, block_table.load = 0, None

    def _unlock(self, block_table: BlockTable) -> None:
        """Unlocks the block table's node, and the node's state if the block table locks it."""
        if self.cache is not None and block_table.node is not None:
            self.cache.unlock(block_table.node, state=block_table.state is not None)
        block_table.node = block_table.state = None

    def unlock_state(self, block_table: BlockTable) -> None:
        """Ends the use of the cached state that the block table locks, if any. The pages stay locked."""
        if self.cache is not None and block_table.node is not None and block_table.state is not None:
            self.cache.lock(block_table.node, state=False)
            self.cache.unlock(block_table.node)
            block_table.state = None

    def statistics(self) -> KVManagerStatistics:
        """Returns the current counts."""
        cache = self.cache.statistics() if self.cache is not None else None
        host = self.host.statistics() if self.host is not None else None
        return KVManagerStatistics(self._rows, len(self._free_rows), self.allocator.statistics(), cache, host)

    def check(self, requests: Sequence[Sequence[BlockTable]]) -> None:
        """Raises `InvariantError` unless each row and page in use belongs to exactly one of `requests`.

        `requests`: the block tables of each request. Only cached pages may belong to several requests. The state of a
        block table must be the state of its node.
        """
        self.allocator.check()
        cached: list[int] = []
        if self.cache is not None:
            self.cache.check()
            cached = self.cache.pages()
        if self.host is not None:
            self.host.check()
        loading = self.host.held_pages() if self.host is not None else []
        block_tables = [block_table for request in requests for block_table in request]
        rows = sorted(self._free_rows + [h.row for h in block_tables])
        references = Counter(page for h in block_tables for page in h.pages)
        references += Counter(cached) + Counter(loading)
        owners = Counter(page for request in requests for page in {p for h in request for p in h.pages})
        shared = set(cached)
        sound = (
            rows == list(range(self._rows))
            and TRASH_PAGE not in references
            and all(count == 1 for page, count in owners.items() if page not in shared)
            and all(self.allocator.readers(page) == count for page, count in references.items())
            and self.allocator.statistics().references == references.total()
            and all(h.state is None or (h.node is not None and h.node.state == h.state) for h in block_tables)
        )
        if not sound:
            raise InvariantError(
                f"KV manager: free rows {self._free_rows}, requests {requests}, pages {owners}, cached {cached}"
            )
