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

For a hybrid model, a hit ends at a recurrent state (`disagg.kv.stored_states`). A write therefore includes the states
of its pages, a find also finds the positions with a state, and a fetch ends with the deepest state that it can reach.

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
from disagg.kv.event_log import MAX_BLOCK_HASHES
from disagg.kv.fetch_patience import LONGEST_S, FetchPatience
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix import RadixCache
from disagg.kv.radix_node import Node
from disagg.kv.radix_values import Match
from disagg.kv.stored_pages import AllocBlocks, StoredPages
from disagg.kv.stored_prefixes import StoredPrefixes
from disagg.kv.stored_states import StateItem, StoredStates
from disagg.kv.token_rate import TokenRate

MOST_PAGES = 4096
"""Largest number of pages of one operation, because a plan contains their links. A longer prefix takes several
operations."""
MOST_ROUNDS = 8
"""Largest number of operations that a prefetch waits for one after another."""

Links = Callable[[PrefixKey], Sequence[bytes]]
"""Function that returns the link of each whole page of a prompt."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """A request's prefetch. It ends when no further pages are found, or with `StorageTier.release`."""

    prefix: PrefixKey
    """Whole pages that the request can use."""
    links: Sequence[bytes]
    """Link of each page of `prefix`."""
    waits: bool
    """Whether the request waits for the end of the prefetch."""
    limit_s: float = LONGEST_S
    """Upper bound of the time limit of each operation under the policy `timeout`."""
    have_pages: int = 0
    """Number of pages that memory can already load at the start of the prefetch."""
    operation: int | None = None
    """Number of the operation under way; None before the first one, and after the last one."""
    follows: bool = False
    """Whether another request's prefetch planned the operation, and this prefetch joined it. The operation may cover
    fewer pages than this prefetch needs, so a further operation may follow."""
    rounds: int = 0
    """Number of operations so far."""
    retried: bool = False
    """Whether a further operation was planned because a recurrent state did not land."""

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
    written_states: int
    """Recurrent states that all ranks have stored, including states that were stored before."""
    fetched_states: int
    """Recurrent states that entered the second tier from the storage."""
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
    known: int = 0
    """For a find: number of leading pages that memory has. Only their states are searched."""
    blocks: list[int] = field(default_factory=list)
    """For a fetch: blocks that the operation owns, except the first `inserted`. For a write: blocks of the tree."""
    node: Node | None = None
    """Locked node of the second tier; None for a find."""
    users: list[Prefetch] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    """Number of leading items that each rank has finished: pages, then states."""
    states: list[StateItem] = field(default_factory=list)
    """For a write or a fetch: recurrent states; at most one for a fetch."""
    found: set[int] | None = None
    """For a find: indices in `links` of the pages behind which every rank so far has found a state."""
    cut: bool = False
    """For find and fetch: whether the prompt has more pages than an operation covers."""
    missing_ranks: set[int] = field(default_factory=set)
    inserted: int = 0
    """For a fetch: number of leading blocks that have entered the second tier, or were freed because their pages had
    entered before."""
    failed: bool = False
    seconds: float = 0.0
    """For a fetch: the longest time that a rank has reported."""

    @property
    def items(self) -> int:
        """Number of items that each rank works on, one after another."""
        return len(self.links) - self.known + len(self.states)

    @property
    def sought(self) -> list[bytes]:
        """Links whose pages or states a find or a fetch covers."""
        return [*self.links, *(item.link for item in self.states)]


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
        states: int = 0,
        state_tokens: float = 0.0,
    ) -> None:
        """`index`: tree of the second tier, over `blocks`. `group`: configuration with the limits of prefetches.

        `states`: number of state blocks of the second tier. `state_tokens`: number of tokens whose KV has as many
        bytes as a recurrent state, on a rank.
        """
        self._index, self._links = index, links
        self._ranks, self._group, self._page_size = ranks, group, blocks.page_size
        self.state_tokens = state_tokens
        """Tokens whose KV has as many bytes as a recurrent state."""
        self._under_way: dict[int, _StorageWork] = {}
        self._sought: dict[bytes, int] = {}
        """Number of the operation (find or fetch) that covers each link."""
        self._planned: list[StorageOperation] = []
        self._unwanted: list[int] = []
        most = MAX_BLOCK_HASHES if group.storage else 0
        self.prefixes = StoredPrefixes(index.kv_events.unit_tokens, most)
        """Prefixes that the storage probably has, for routers; empty if the third tier is other groups' memory only,
        because they send events of their own."""
        self.pages = StoredPages(blocks, alloc)
        """Pages in the storage."""
        self.states = StoredStates(index, states, blocks.page_size)
        """Recurrent states in the storage."""
        self.patience = FetchPatience(group.prefetch)
        """Whether requests wait for their prefetches."""
        self._number, self._fetch_s, self._fetch_rate = 0, 0.0, TokenRate()

    # --- writes

    def write(self, prefix: PrefixKey) -> None:
        """Plans a write of the pages and states of `prefix` in the second tier that are not stored yet."""
        known = self._index.match_kv(prefix)
        self.prefixes.add(self.states.usable(prefix, self.pages.leading(known.pages)))
        waiting, reach = self.pages.lacking(known.pages, MOST_PAGES)
        nodes = self.states.lacking(prefix, reach)
        ends = [at + 1 for at in waiting[-1:]] + [node.end for node in nodes]
        if not ends:
            return
        prefix = prefix.shortened(max(ends) * self._page_size)
        links = self._links(prefix)
        blocks = [known.pages[at] for at in waiting]
        self._index.lock(known.node, state=False)
        self.pages.begin_write(blocks)
        work = _StorageWork("write", prefix, [links[at] for at in waiting], blocks=blocks, node=known.node)
        work.states = self.states.begin_write(nodes, links)
        self._order(work, LONGEST_S)

    # --- prefetches

    def prefetch(self, prefix: PrefixKey, have_tokens: int) -> Prefetch | None:
        """Begins to fetch the pages of `prefix` that the second tier lacks; returns None if nothing is fetched.

        `prefix`: the part of a prompt that a request can use. `have_tokens`: tokens of `prefix` cached in memory.
        """
        prefix = prefix.shortened(prefix.tokens // self._page_size * self._page_size)
        if prefix.tokens - have_tokens < max(1, self._group.prefetch_min_tokens):
            return None
        waits, limit_s = self.patience.of(prefix.tokens - have_tokens)
        one = Prefetch(prefix, self._links(prefix), waits, limit_s, have_tokens // self._page_size)
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
        first, least = start, start
        if self.states.needed:  # the storage may have states of pages that memory has without a state
            least = self._least_pages(prefetch.prefix, [prefetch])
            first = min(start, least)
        links = prefetch.links[first : first + MOST_PAGES]
        if first + len(links) <= least or prefetch.rounds == MOST_ROUNDS:
            return
        prefetch.rounds += 1
        known = min(start - first, len(links))
        joined = self._sought.get(links[min(known, len(links) - 1)])  # the last link if memory has all pages
        prefetch.follows = joined is not None
        if joined is not None:
            prefetch.operation = joined
            self._under_way[joined].users.append(prefetch)
        elif not self.pages.room:
            self.pages.skip(len(links) - known)
        else:
            prefix = prefetch.prefix.shortened((first + len(links)) * self._page_size)
            work = _StorageWork("find", prefix, links, first, known, users=[prefetch])
            work.cut = len(links) == MOST_PAGES
            self._seek(work)

    def _least_pages(self, prefix: PrefixKey, users: Sequence[Prefetch]) -> int:
        """Returns the number of pages that memory can load already: a fetched state must cover more."""
        have = min((one.have_pages for one in users), default=0)
        return max(self.states.cached_pages(prefix), have)

    def _seek(self, work: _StorageWork) -> None:
        """Plans a find or a fetch, and sets it as the operation of the prefetches that use it."""
        number = self._order(work, self._limit_s(work))
        self._sought.update(dict.fromkeys(work.sought, number))
        for one in work.users:
            one.operation = number

    def _limit_s(self, work: _StorageWork) -> float:
        """Returns the time limit of a find or a fetch. A find reads no state, and has none in `work`."""
        group = self._group
        if group.prefetch != "timeout":
            return LONGEST_S
        tokens = len(work.links) * self._page_size + len(work.states) * self.state_tokens
        limit_s = group.prefetch_base_s + group.prefetch_s_per_1k_tokens * tokens / 1024
        return min(limit_s, max(one.limit_s for one in work.users))

    # --- operations

    def take_operations(self) -> list[StorageOperation]:
        """Returns the operations for the next plan; each operation is returned once."""
        planned, self._planned = self._planned, []
        return planned

    def take_unwanted(self) -> list[int]:
        """Returns the fetches that ranks must end now, each once. Call `take_operations` first: a fetch may end
        before it is in a plan, and then both are in one plan."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def moved(self, report: StorageReport) -> None:
        """Records a rank's report; the last rank's last report ends the operation. Later reports change nothing."""
        number, rank = report.operation, report.rank
        work = self._under_way.get(number)
        if work is None or rank not in work.missing_ranks:
            return
        work.finished[rank] = max(work.finished[rank], min(report.items, work.items))
        work.failed |= bool(report.error)
        work.seconds = max(work.seconds, report.seconds)
        if work.kind == "fetch":
            self._insert(work)
        if report.done:
            work.missing_ranks.remove(rank)
            states = set(report.states)
            work.found = states if work.found is None else work.found & states
        if work.missing_ranks:
            return
        del self._under_way[number]
        if work.kind == "write":
            self._end_write(work)
            return
        for link in work.sought:
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
        state_links = [*work.links[: work.known], *(item.link for item in work.states)]
        state_blocks = [item.block for item in work.states]
        links = list(work.links[work.known :])
        self._planned.append(
            StorageOperation(self._number, work.kind, links, blocks, limit_s, state_links, state_blocks)
        )
        return self._number

    def _end_write(self, work: _StorageWork) -> None:
        assert work.node is not None, "a write locks its pages"
        self._index.unlock(work.node, state=False)
        finished = min(work.finished) if not work.failed else 0
        stored = finished >= len(work.blocks)
        self.pages.end_write(work.blocks, stored=stored)
        self.states.end_write(work.states, stored=not work.failed and finished == work.items)
        if stored:
            self.prefixes.add(self.states.usable(work.prefix, work.prefix.tokens // self._page_size))

    def _end_find(self, work: _StorageWork) -> None:
        """Plans the fetch of the found pages, from the first page that the second tier still lacks."""
        known = self._index.match_kv(work.prefix)
        stop = work.first + work.known + min(work.finished)
        ends = [stop]
        if self.states.needed:
            least = self._least_pages(work.prefix, work.users)
            ends = [end for end in self._state_ends(work) if end > least]
            stop = max(ends, default=least)
        self.prefixes.forget(work.prefix, stop * self._page_size)
        # Pages before the searched ones may have been evicted since the find; the operation has no links of these.
        reached = len(known.pages) >= work.first + work.known
        if ends and reached and work.users and not work.failed:
            blocks, states = self._room_for(work, known, ends)
            if blocks or states:
                self._fetch(work, known, blocks, states)
                return
        for one in work.users:
            one.operation = None
        for one in work.users:
            # A state behind pages that only the other prompt has may be stored.
            if one.follows and self.states.needed and not work.failed and one.links[-1] not in work.links:
                self._begin(one)

    def _state_ends(self, work: _StorageWork) -> list[int]:
        """Returns after how many pages every rank has found a state, in any order."""
        stop = work.known + min(work.finished)
        return [work.first + at + 1 for at in work.found or () if 0 <= at < stop]

    def _room_for(
        self, work: _StorageWork, known: Match, ends: Sequence[int]
    ) -> tuple[list[int], list[StateItem]]:
        """Allocates blocks for the pages behind `known` up to the last of `ends`, as far as there is room.

        For a hybrid model, the fetch has to end at one of `ends`, with a block for its state. Otherwise the pages
        would be of no use, and both results are empty.
        """
        start = len(known.pages)
        count, room = max(0, max(ends) - start), self.pages.room if self.states.has_room else 0
        self.pages.skip(max(0, count - room))
        count = min(count, room)
        if not self.states.needed:
            return self.pages.alloc(count, known.node), []
        count = max((end - start for end in ends if end - start <= count), default=0)
        blocks = self.pages.alloc(count, known.node)
        end = max((end for end in ends if end <= start + len(blocks)), default=0)
        block = self.states.alloc() if end else None
        keep = max(0, end - start) if block is not None else 0
        self.pages.release(blocks[keep:], failed=False)
        if block is None:
            return [], []
        return blocks[:keep], [StateItem(end, work.links[end - 1 - work.first], block)]

    def _fetch(self, work: _StorageWork, known: Match, blocks: list[int], states: list[StateItem]) -> None:
        """Plans the fetch that follows a find. `known`: pages of the second tier before `blocks`."""
        start = len(known.pages)
        self._index.lock(known.node, state=False)
        links = work.links[start - work.first :][: len(blocks)]
        prefix = work.prefix.shortened((start + len(blocks)) * self._page_size)
        fetch = _StorageWork("fetch", prefix, links, start, blocks=blocks, node=known.node, users=work.users)
        fetch.states, fetch.cut = states, work.cut and (bool(states) or len(links) == MOST_PAGES)
        self._seek(fetch)

    def _insert(self, work: _StorageWork) -> None:
        """Inserts into the second tier the pages and the state that every rank has fetched."""
        finished = min(work.finished)
        count = min(finished, len(work.blocks))
        if work.failed:
            return
        if count > work.inserted:
            self._insert_pages(work, count)
        for item in work.states:
            if finished == work.items and not item.attached:
                self.states.attach(work.prefix, item)
                self.prefixes.add(work.prefix.shortened(item.end * self._page_size))

    def _insert_pages(self, work: _StorageWork, count: int) -> None:
        assert work.node is not None, "a fetch locks the pages before its own"
        prefix = work.prefix.shortened((work.first + count) * self._page_size)
        known = self._index.match_kv(prefix).pages
        # A store may have inserted some of the pages during the fetch: the fetch's blocks of these pages are freed.
        added = work.blocks[len(known) - work.first : count]
        node = self._index.insert(prefix, [*known, *added])
        self._index.lock(node, state=False)
        self._index.unlock(work.node, state=False)
        work.node = node
        self.pages.attach(work.blocks[work.inserted : count], added)
        if not self.states.needed:
            self.prefixes.add(prefix)
        work.inserted = count

    def _end_fetch(self, work: _StorageWork) -> None:
        assert work.node is not None, "a fetch locks the pages before its own"
        self._index.unlock(work.node, state=False)
        self.pages.release(work.blocks[work.inserted :], failed=work.failed)
        self._fetch_s += work.seconds
        tokens = min(min(work.finished), len(work.links)) * self._page_size
        self._fetch_rate.add(tokens, work.seconds)
        self.patience.fetched(tokens, work.seconds)
        missed = [item for item in work.states if not item.attached]
        for item in missed:
            self.states.release(item, failed=work.failed)
        for one in work.users:
            one.operation = None
        landed = work.inserted or len(missed) < len(work.states)
        for one in work.users:
            # Without the state, the pages are of no use: a further operation fetches a state before the missing item.
            again = bool(missed) and not work.failed and not one.retried
            if again or (landed and (one.follows or work.cut)):
                one.retried |= again
                self._begin(one)

    # --- state

    def statistics(self) -> StorageTierStatistics:
        """Returns the current counts."""
        return StorageTierStatistics(
            writing_pages=self.pages.writing,
            fetching_pages=self.pages.fetching,
            written_pages=self.pages.written,
            fetched_pages=self.pages.fetched,
            written_states=self.states.written,
            fetched_states=self.states.fetched,
            skipped_pages=self.pages.skipped,
            failed_pages=self.pages.failed,
            used_pages=self.pages.used,
            fetch_s=self._fetch_s,
            fetch_tokens_per_s=self._fetch_rate.tokens_per_s,
        )

    def check(self) -> None:
        """Raises `InvariantError` unless operations, blocks, locks and users agree."""
        self.prefixes.check()
        self._fetch_rate.check()
        self.patience.check()
        works = self._under_way
        writes = [work for work in works.values() if work.kind == "write"]
        fetches = [work for work in works.values() if work.kind == "fetch"]
        cached = set(self._index.pages())
        self.pages.check(
            [block for work in writes for block in work.blocks],
            [block for work in fetches for block in work.blocks[work.inserted :]],
            cached,
        )
        self.states.check(
            [item for work in writes for item in work.states],
            [item for work in fetches for item in work.states],
        )
        sound = (
            all(link in works[number].sought for link, number in self._sought.items())
            and all(work.node is None or work.node.locks for work in works.values())
            and all(one.operation == number for number, work in works.items() for one in work.users)
        )
        if not sound:
            raise InvariantError(f"storage tier: {self.statistics()}, {works}, cached {cached}")
