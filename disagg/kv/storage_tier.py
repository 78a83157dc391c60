"""The leader's part of the third tier of a prefix cache: pages in a storage, such as files or a server.

The leader decides which pages of host memory (the second tier, `disagg.kv.host_tier`) are written to the storage. It
also decides which pages of a queued prompt are fetched into host memory. The leader handles only links (hashes) of
pages and numbers of blocks. Ranks do the I/O, each for its own heads, and report how many leading pages they have
finished.

    write    writes pages of the second tier that the storage may lack. Until every rank has reported the end, the
             pages are locked in the second tier
    find     counts how many of a prompt's missing pages are stored on every rank. Only found pages get blocks, so a
             prompt that no group has stored evicts nothing
    fetch    reads found pages into new blocks, which belong to the operation. Pages that *every* rank has reported
             enter the second tier at once, while later pages are still being read. Blocks of pages that were not read
             are freed at the end. The path before the fetched pages is locked in the second tier

If a request needs pages that another request is fetching, its prefetch joins that fetch, then searches for the
remaining pages. The pages under way are limited to a share of host memory. Pages beyond the limit are skipped and
counted: skipped pages of a prefetch are computed, skipped pages of a write are written at their next use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.core.config.groups import GroupConfig
from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.kv.cache_operations import StorageOperation, StorageOperationKind, StorageReport
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix import RadixCache
from disagg.kv.radix_node import Node
from disagg.kv.stored_prefixes import StoredPrefixes
from disagg.kv.token_rate import TokenRate

SHARE = 4
"""Divisor of the second tier's blocks: fetches may own at most a quarter of them, and writes may lock as many."""
MOST_PAGES = 4096
"""Largest number of pages of one operation, because a plan contains their links. A longer prefix takes several
operations."""
MOST_ROUNDS = 8
"""Largest number of operations that a prefetch waits for one after another."""
LONGEST_S = 60.0
"""Time limit of a find or a fetch under the prefetch policies `best_effort` and `wait`, which set no limit."""

Links = Callable[[PrefixKey], Sequence[bytes]]
"""Function that returns the link of each whole page of a prompt."""
AllocBlocks = Callable[[int, Node], list[int]]
"""Function like `HostTier.alloc`: allocates up to a number of blocks, without evicting the path of a node."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """A request's prefetch. It ends when no further pages are found, or with `StorageTier.release`."""

    prefix: PrefixKey
    """Whole pages that the request can use."""
    links: Sequence[bytes]
    """Link of each page of `prefix`."""
    waits: bool
    """Whether the request waits for the end of the prefetch."""
    operation: int | None = None
    """Number of the operation under way; None before the first one, and after the last one."""
    follows: bool = False
    """Whether another request's prefetch planned the operation, and this prefetch joined it. The operation may cover
    fewer pages than this prefetch needs, so a further operation may follow."""
    rounds: int = 0
    """Number of operations so far."""

    @property
    def holds(self) -> bool:
        """Whether the request must not get its pages yet."""
        return self.waits and self.operation is not None


@dataclass(frozen=True, slots=True)
class StorageTierStatistics:
    """Current counts of the third tier, and totals since the start."""

    writing_pages: int
    """Number of pages of the second tier that running writes copy to the storage."""
    fetching_pages: int
    """Blocks of fetches that have not entered the second tier."""
    written_pages: int
    """Pages that all ranks have stored, including pages that were stored before."""
    fetched_pages: int
    """Pages that entered the second tier from the storage."""
    skipped_pages: int
    """Pages that were not written, or not searched, because too many pages were under way."""
    failed_pages: int
    """Pages that a rank could not write, and blocks that a rank could not use for a fetch."""
    used_pages: int
    """Fetched pages that a request has loaded. Each fetch of a page counts once."""
    fetch_s: float
    """Sum of the durations of all fetches, each on the slowest rank, without the time in queues."""
    fetch_tokens_per_s: float
    """Mean rate of recent fetches; 0 before the first one."""


@dataclass(slots=True, eq=False)
class _StorageWork:
    """An operation under way."""

    kind: StorageOperationKind
    prefix: PrefixKey
    """Prefix up to the last page of the operation."""
    links: Sequence[bytes]
    first: int = 0
    """For find and fetch: index of the first page in `prefix`."""
    blocks: list[int] = field(default_factory=list)
    """For a fetch: blocks that the operation owns, except the first `inserted`. For a write: blocks of the tree."""
    node: Node | None = None
    """Locked node of the second tier; None for a find."""
    users: list[Prefetch] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    """Number of leading pages that each rank has finished."""
    missing_ranks: set[int] = field(default_factory=set)
    inserted: int = 0
    """For a fetch: number of leading blocks that have entered the second tier, or were freed because their pages had
    entered before."""
    failed: bool = False
    seconds: float = 0.0
    """For a fetch: the longest time that a rank has reported."""


class StorageTier:
    """Plans finds, fetches and writes. Not thread-safe: the leader's lock guards it."""

    def __init__(
        self,
        index: RadixCache,
        blocks: TokenToKVPoolAllocator,
        alloc: AllocBlocks,
        links: Links,
        *,
        ranks: int,
        group: GroupConfig,
    ) -> None:
        """`index`: tree of the second tier, over `blocks`. `group`: configuration with the limits of prefetches."""
        self._index, self._blocks, self._alloc, self._links = index, blocks, alloc, links
        self._ranks, self._group, self._page_size = ranks, group, blocks.page_size
        self._most_pages = max(1, (blocks.pages - 1) // SHARE)
        self._under_way: dict[int, _StorageWork] = {}
        self._sought: dict[bytes, int] = {}
        """Number of the operation (find or fetch) that covers each link."""
        self._planned: list[StorageOperation] = []
        self._unwanted: list[int] = []
        self._writing: set[int] = set()
        """Blocks of the second tier that running writes copy to the storage."""
        self.prefixes = StoredPrefixes(index.kv_events.unit_tokens)
        """Prefixes that the storage probably has, for routers."""
        self._stored: set[int] = set()
        """Blocks whose pages were written to the storage, or came from it."""
        self._unused: set[int] = set()
        """Blocks of the second tier whose pages came from the storage, and were not loaded yet."""
        self._lost: list[int] = []
        """Blocks of failed fetches, which are not used again."""
        self._number = self._fetching = self._written = self._fetched = self._skipped = self._failed = 0
        self._used, self._fetch_s, self._fetch_rate = 0, 0.0, TokenRate()

    # --- writes

    def write(self, prefix: PrefixKey) -> None:
        """Plans a write of the pages of `prefix` in the second tier that are not stored yet."""
        known = self._index.match_kv(prefix)
        waiting = [
            (at, block)
            for at, block in enumerate(known.pages)
            if block not in self._stored and block not in self._writing
        ]
        stored = next(
            (at for at, block in enumerate(known.pages) if block not in self._stored), len(known.pages)
        )
        self.prefixes.add(prefix.shortened(stored * self._page_size))
        room = min(MOST_PAGES, max(0, self._most_pages - len(self._writing)))
        self._skipped += max(0, len(waiting) - room)
        waiting = waiting[:room]
        if not waiting:
            return
        prefix = prefix.shortened((waiting[-1][0] + 1) * self._page_size)
        links = self._links(prefix)
        blocks = [block for _, block in waiting]
        self._index.lock(known.node, state=False)
        self._writing.update(blocks)
        work = _StorageWork("write", prefix, [links[at] for at, _ in waiting], blocks=blocks, node=known.node)
        self._order(work, LONGEST_S)

    def allocated(self, blocks: Sequence[int]) -> None:
        """Records that `blocks` get new content."""
        self._stored.difference_update(blocks)
        self._unused.difference_update(blocks)

    def used(self, blocks: Sequence[int]) -> None:
        """Records that a request loads `blocks` of the second tier."""
        found = self._unused.intersection(blocks)
        self._unused -= found
        self._used += len(found)

    # --- prefetches

    def prefetch(self, prefix: PrefixKey, have_tokens: int) -> Prefetch | None:
        """Begins to fetch the pages of `prefix` that the second tier lacks; returns None if nothing is fetched.

        `prefix`: the part of a prompt that a request can use. `have_tokens`: tokens of `prefix` cached in memory.
        """
        prefix = prefix.shortened(prefix.tokens // self._page_size * self._page_size)
        if prefix.tokens - have_tokens < max(1, self._group.prefetch_min_tokens):
            return None
        one = Prefetch(prefix, self._links(prefix), self._group.prefetch != "best_effort")
        self._begin(one)
        return one if one.operation is not None else None

    def release(self, prefetch: Prefetch) -> None:
        """Ends a prefetch, because its request gets its pages or ends. Landed pages stay in the second tier."""
        number, prefetch.operation = prefetch.operation, None
        if number is None:
            return
        work = self._under_way[number]
        work.users.remove(prefetch)
        if not work.users and work.kind == "fetch":
            self._unwanted.append(number)

    def _begin(self, prefetch: Prefetch) -> None:
        """Joins an operation that covers the first missing page, or plans a find.

        If neither is possible, ends the prefetch.
        """
        prefetch.operation = None
        start = len(self._index.match_kv(prefetch.prefix).pages)
        links = prefetch.links[start : start + MOST_PAGES]
        if not links or prefetch.rounds == MOST_ROUNDS:
            return
        prefetch.rounds += 1
        joined = self._sought.get(links[0])
        prefetch.follows = joined is not None
        if joined is not None:
            prefetch.operation = joined
            self._under_way[joined].users.append(prefetch)
        elif self._fetching >= self._most_pages:
            self._skipped += len(links)
        else:
            prefix = prefetch.prefix.shortened((start + len(links)) * self._page_size)
            self._seek(_StorageWork("find", prefix, links, start, users=[prefetch]))

    def _seek(self, work: _StorageWork) -> None:
        """Plans a find or a fetch, and sets it as the operation of the prefetches that use it."""
        number = self._order(work, self._limit_s(len(work.links)))
        self._sought.update(dict.fromkeys(work.links, number))
        for one in work.users:
            one.operation = number

    def _limit_s(self, pages: int) -> float:
        group = self._group
        if group.prefetch != "timeout":
            return LONGEST_S
        return group.prefetch_base_s + group.prefetch_s_per_1k_tokens * pages * self._page_size / 1024

    # --- operations

    def take_operations(self) -> list[StorageOperation]:
        """Returns the operations for the next plan; each operation is returned once."""
        planned, self._planned = self._planned, []
        return planned

    def take_unwanted(self) -> list[int]:
        """Returns the fetches that ranks must end now; each fetch is returned once, not before its operation."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def moved(self, report: StorageReport) -> None:
        """Records a rank's report; the last rank's last report ends the operation. Later reports change nothing."""
        number, rank = report.operation, report.rank
        work = self._under_way.get(number)
        if work is None or rank not in work.missing_ranks:
            return
        work.finished[rank] = max(work.finished[rank], min(report.pages, len(work.links)))
        work.failed |= bool(report.error)
        work.seconds = max(work.seconds, report.seconds)
        if work.kind == "fetch":
            self._insert(work)
        if report.done:
            work.missing_ranks.remove(rank)
        if work.missing_ranks:
            return
        del self._under_way[number]
        if work.kind == "write":
            self._end_write(work)
            return
        for link in work.links:
            if self._sought.get(link) == number:  # an overlapping operation may have replaced the entry
                del self._sought[link]
        if work.kind == "find":
            self._end_find(work)
        else:
            self._end_fetch(work)

    def _order(self, work: _StorageWork, limit_s: float) -> int:
        self._number += 1
        work.missing_ranks, work.finished = set(range(self._ranks)), [0] * self._ranks
        self._under_way[self._number] = work
        blocks = [block - 1 for block in work.blocks]  # page 0 of an allocator is its trash page
        self._planned.append(StorageOperation(self._number, work.kind, list(work.links), blocks, limit_s))
        return self._number

    def _end_write(self, work: _StorageWork) -> None:
        assert work.node is not None, "a write locks its pages"
        self._index.unlock(work.node, state=False)
        self._writing.difference_update(work.blocks)
        if work.failed or min(work.finished) < len(work.blocks):
            self._failed += len(work.blocks)  # the next use of the prefix tries again
        else:
            self._stored.update(work.blocks)
            self._written += len(work.blocks)
            self.prefixes.add(work.prefix)

    def _end_find(self, work: _StorageWork) -> None:
        """Plans the fetch of the found pages, from the first page that the second tier still lacks."""
        known = self._index.match_kv(work.prefix)
        start, stop = len(known.pages), work.first + min(work.finished)
        self.prefixes.forget(work.prefix, stop * self._page_size)
        room = max(0, self._most_pages - self._fetching)
        count = stop - start if work.users and not work.failed else 0
        self._skipped += max(0, count - room)
        # Pages before `work.first` may have been evicted since the find; the operation has no links of these pages.
        blocks = (
            self._alloc(min(count, room), known.node) if min(count, room) > 0 and start >= work.first else []
        )
        if not blocks:
            for one in work.users:
                one.operation = None
            return
        self._index.lock(known.node, state=False)
        self._fetching += len(blocks)
        links = work.links[start - work.first :][: len(blocks)]
        prefix = work.prefix.shortened((start + len(blocks)) * self._page_size)
        self._seek(_StorageWork("fetch", prefix, links, start, blocks, known.node, work.users))

    def _insert(self, work: _StorageWork) -> None:
        """Inserts into the second tier the pages that every rank has fetched."""
        count = min(work.finished)
        if count <= work.inserted or work.failed:
            return
        assert work.node is not None, "a fetch locks the pages before its own"
        prefix = work.prefix.shortened((work.first + count) * self._page_size)
        known = self._index.match_kv(prefix).pages
        # A store may have inserted some of the pages during the fetch: the fetch's blocks of these pages are freed.
        added = work.blocks[len(known) - work.first : count]
        node = self._index.insert(prefix, [*known, *added])
        self._index.lock(node, state=False)
        self._index.unlock(work.node, state=False)
        work.node = node
        self._blocks.free(work.blocks[work.inserted : count])  # blocks in the tree keep the tree's reference
        self._fetching -= count - work.inserted
        self._fetched += len(added)
        self._stored.update(added)
        self._unused.update(added)
        self.prefixes.add(prefix)
        work.inserted = count

    def _end_fetch(self, work: _StorageWork) -> None:
        assert work.node is not None, "a fetch locks the pages before its own"
        self._index.unlock(work.node, state=False)
        left = work.blocks[work.inserted :]
        self._fetching -= len(left)
        self._fetch_s += work.seconds
        self._fetch_rate.add(min(work.finished) * self._page_size, work.seconds)
        if work.failed:
            # A rank could not pin the blocks, and would fail again the next time: the blocks are not used again.
            self._lost.extend(left)
            self._failed += len(left)
        elif left:
            self._blocks.free(left)
        cut = len(work.links) == MOST_PAGES
        for one in work.users:
            one.operation = None
        for one in work.users:
            if work.inserted and (one.follows or cut):
                self._begin(one)

    # --- state

    def held_blocks(self) -> list[int]:
        """Returns the blocks that fetches own."""
        fetches = (work for work in self._under_way.values() if work.kind == "fetch")
        return [*self._lost, *(block for work in fetches for block in work.blocks[work.inserted :])]

    def statistics(self) -> StorageTierStatistics:
        """Returns the current counts."""
        return StorageTierStatistics(
            writing_pages=len(self._writing),
            fetching_pages=self._fetching,
            written_pages=self._written,
            fetched_pages=self._fetched,
            skipped_pages=self._skipped,
            failed_pages=self._failed,
            used_pages=self._used,
            fetch_s=self._fetch_s,
            fetch_tokens_per_s=self._fetch_rate.tokens_per_s,
        )

    def check(self) -> None:
        """Raises `InvariantError` unless operations, blocks, locks and users agree."""
        self.prefixes.check()
        self._fetch_rate.check()
        works = self._under_way
        cached = set(self._index.pages())
        writing = [block for work in works.values() if work.kind == "write" for block in work.blocks]
        sound = (
            len(self.held_blocks()) == self._fetching + len(self._lost)
            and self._fetching <= self._most_pages
            and len(writing) == len(self._writing) <= self._most_pages
            and cached.issuperset(self._writing)
            and self._stored.issuperset(self._unused)
            and all(link in works[number].links for link, number in self._sought.items())
            and all(work.node is None or work.node.locks for work in works.values())
            and all(one.operation == number for number, work in works.items() for one in work.users)
        )
        if not sound:
            raise InvariantError(f"storage tier: {self.statistics()}, {works}, cached {cached}")
