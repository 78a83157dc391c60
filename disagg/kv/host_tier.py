"""The second tier of a group's prefix cache: KV pages in host memory.

The leader owns the tier and handles integers only; ranks copy the data. The tier has its own radix tree over blocks
of host memory; each rank holds its own heads of the blocks. The trees of the two tiers are independent: a prefix may
be in one tree or in both. A page in both tiers has the same content in each, because cached pages are never written.

    store    when a prefix enters the first tier (write-through), or is evicted from there (write-back,
             `disagg.kv.write_back`), its pages that the second tier lacks are copied.
             Until every rank has reported the end, the first tier's path is locked, and the blocks are in no tree
    load     when the second tier has a longer prefix of a prompt than the first tier, the pages behind the first
             tier's hit are copied to the request's own pages. Until every rank has reported the end, the second
             tier's path is locked, and the operation has a reference to the request's pages: the request may release
             these pages, but they are not allocated again

If all blocks are locked, the store is skipped. No step and no request waits for a store.

For a hybrid model, a hit of either tier ends at a cached recurrent state. A store therefore includes the states on
the path, and ends at the last state. A load includes the state at its end, in a state slot of the request.

With a third tier (`disagg.kv.storage_tier`), stored pages are also written to a storage, and read back from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.core.config.groups import EvictionName, GroupConfig
from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey, Tier
from disagg.kv.cache_operations import CacheOperation, PoolTransfer
from disagg.kv.event_log import KVEventLog
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix import RadixCache
from disagg.kv.radix_node import Node
from disagg.kv.radix_values import Match, RadixStatistics
from disagg.kv.state_slots import StateSlots
from disagg.kv.storage_tier import Links, StorageTier, StorageTierStatistics
from disagg.kv.token_rate import TokenRate

SPARE_SHARE = 32
"""Divisor of the tier's blocks: when blocks are evicted, up to a thirty-second of them is freed ahead, so that the
blocks of a prompt are in longer runs."""
STORING_SHARE = 4
"""Divisor of the first tier's pages: stores may lock at most a quarter of these pages at one time."""


@dataclass(slots=True, eq=False)
class TierLoad:
    """A load from host memory into a request's pages."""

    pages: int
    state: tuple[int, int] | None = None
    """(tokens, slot) of the recurrent state that the load includes, or None. The request owns the slot."""
    number: int = 0
    """Number of the load's `CacheOperation`."""
    done: bool = False
    """Whether every rank has reported the end of the load."""


@dataclass(frozen=True, slots=True)
class HostTierStatistics:
    """Current content of the tier, and counts since its construction."""

    pages: int
    """Number of host memory blocks, each for one page."""
    used_pages: int
    cache: RadixStatistics
    storing_pages: int
    """Number of pages that running stores copy."""
    loading_pages: int
    """Number of pages that running loads copy."""
    stored_pages: int
    loaded_pages: int
    skipped_pages: int
    """Pages that were not stored for lack of room, because too many stores were under way, or because a running
    request needed the pages at once (write-back)."""
    failed_operations: int
    """Stores that failed on a rank."""
    load_s: float
    """Sum of the durations of all loads, each on the slowest rank."""
    load_tokens_per_s: float
    """Mean rate of recent loads; 0 before the first one."""
    storage: StorageTierStatistics | None = None
    """Counts of the third tier; None without a third tier."""


@dataclass(slots=True, eq=False)
class _StoredState:
    """A recurrent state of a store under way."""

    node: Node
    """Node of the first tier, locked with its state."""
    slot: int
    """Slot of the state in the first tier."""
    tokens: int
    block: int
    """State block of host memory, owned by the operation."""


@dataclass(slots=True, eq=False)
class _Operation:
    """An operation under way."""

    pages: list[int]
    """Pages of the first tier: the sources of a store, or the destinations of a load."""
    blocks: list[int]
    node: Node
    """Locked node: of the first tier for a store, of the second tier for a load."""
    load: TierLoad | None = None
    """The load of a request; None for a store."""
    prefix: PrefixKey | None = None
    """For a store: the key of the whole prefix. The last `len(blocks)` pages of the prefix are stored."""
    states: list[_StoredState] = field(default_factory=list)
    """For a store: the recurrent states to store, shortest prefix first."""
    slot_released: bool = False
    """For a load: whether the request has released the slot of `load.state`; the end of the load then frees it."""
    missing_ranks: set[int] = field(default_factory=set)
    failed: bool = False
    seconds: float = 0.0
    """For a load: the longest duration that a rank has reported."""


class HostTier:
    """Plans stores and loads. Not thread-safe: the leader's lock guards it, as it guards both trees."""

    def __init__(
        self,
        first: RadixCache,
        allocator: TokenToKVPoolAllocator,
        *,
        pages: int,
        ranks: int,
        eviction: EvictionName,
        states: int = 0,
    ) -> None:
        """`first`: tree of the first tier, over the pages of `allocator`. `pages`: number of blocks on each rank.

        `states`: number of state blocks on each rank, for a hybrid model.
        """
        self._first, self._allocator, self._ranks = first, allocator, ranks
        self._page_size = allocator.page_size
        # Page 0 of an allocator is its trash page, so block `i` is page `i + 1`.
        self.blocks = TokenToKVPoolAllocator(pages + 1, allocator.page_size)
        """Allocator of the host memory blocks; only the tier allocates and frees blocks."""
        self._state_blocks = states
        slots = StateSlots(0, states) if first.needs_state else None
        self.index = RadixCache(self.blocks, eviction, states=slots)
        """Radix tree over the blocks and the state blocks."""
        self.storage: StorageTier | None = None
        """The third tier; None without one."""
        self._most_storing = max(1, (allocator.pages - 1) // STORING_SHARE)
        self._under_way: dict[int, _Operation] = {}
        self._planned: list[CacheOperation] = []
        self._storing: set[int] = set()
        """Pages of the first tier that running stores copy."""
        self._storing_states: set[int] = set()
        """State slots of the first tier that running stores copy."""
        self._lost: list[int] = []
        """Blocks of failed stores, which are not used again."""
        self._lost_states = 0
        """Number of state blocks of failed stores."""
        self._number = self._stored = self._loaded = self._skipped = self._failed = 0
        self._load_s, self._load_rate = 0.0, TokenRate()

    def add_storage(self, links: Links, group: GroupConfig, state_tokens: float = 0.0) -> None:
        """Adds a third tier; see `StorageTier`."""
        self.storage = StorageTier(
            self.index,
            self.blocks,
            self.alloc,
            links,
            ranks=self._ranks,
            group=group,
            states=self._state_blocks,
            state_tokens=state_tokens,
        )

    @property
    def kv_events(self) -> dict[Tier, KVEventLog]:
        """KV events of this tier, and of the third tier if there is one."""
        found: dict[Tier, KVEventLog] = {"host": self.index.kv_events}
        if self.storage is not None:
            found["storage"] = self.storage.prefixes.kv_events
        return found

    # --- stores

    def store(self, prefix: PrefixKey, *, again: bool = False) -> bool:
        """Plans a store of the pages and states of a cached prefix that the second tier lacks.

        Returns False if no store is planned: nothing is missing, or there is no room. The store counts as a use of
        the prefix in the second tier. Also plans a write of the pages that only the third tier lacks. `again`: the
        caller will store pages without room later, so they do not count as skipped.
        """
        if self.storage is not None:
            self.storage.write(prefix)
        nodes: list[Node] = []
        if self._first.needs_state:
            nodes = self._first.state_nodes(prefix, uses=False)
            prefix = prefix.shortened(nodes[-1].end * self._page_size if nodes else 0)
        hit, known = self._first.match_kv(prefix, uses=False), self.index.match_kv(prefix)
        start = len(known.pages)
        while start < len(hit.pages) and hit.pages[start] in self._storing:
            start += 1  # an earlier store copies these pages, and is reported first
        pages = hit.pages[start:]
        # Pages of an earlier store may also follow a gap, which an eviction from the second tier has left.
        pages = pages[: next((at for at, page in enumerate(pages) if page in self._storing), len(pages))]
        room = self._most_storing - len(self._storing)
        blocks = self.alloc(min(len(pages), room), known.node) if pages and room > 0 else []
        self._skipped += 0 if again else len(pages) - len(blocks)
        end = (start + len(blocks)) * self._page_size
        states = self._missing_states(prefix, [node for node in nodes if node.end * self._page_size <= end])
        if not blocks and not states:
            return False
        self._order_store(prefix.shortened(end), pages[: len(blocks)], blocks, states)
        return True

    @property
    def stores_full(self) -> bool:
        """Whether stores under way copy as many pages as allowed at one time."""
        return len(self._storing) >= self._most_storing

    @property
    def leaving_pages(self) -> int:
        """Number of pages of the first tier on paths of stores under way, up to the first fork: most of them can be
        evicted without a loss when the stores have ended."""
        return self._first.leaving.pages

    def skip(self, pages: int) -> None:
        """Counts pages that leave the first tier without a store."""
        self._skipped += pages

    def _missing_states(self, prefix: PrefixKey, nodes: Sequence[Node]) -> list[_StoredState]:
        """Allocates a state block for each state of `nodes`, on the path of `prefix`, that the second tier lacks."""
        known = {node.end for node in self.index.state_nodes(prefix)}
        missing = []
        for node in nodes:
            assert node.state is not None, "`state_nodes` have states"
            if node.end in known or node.state in self._storing_states:
                continue
            block = self.index.alloc_state()
            if block is not None:
                if self.storage is not None:
                    self.storage.states.allocated(block)
                missing.append(_StoredState(node, node.state, node.end * self._page_size, block))
        return missing

    def alloc(self, count: int, known: Node) -> list[int]:
        """Allocates up to `count` blocks. If needed, evicts cached blocks, and a few more ahead; none on the path to
        `known`."""
        self.index.lock(known, state=False)
        short = min(count, self.blocks.free_pages + self.index.evictable_pages) - self.blocks.free_pages
        if short > 0:  # and a few blocks more: new blocks are in longer runs then
            self.index.evict(short + self.blocks.pages // SPARE_SHARE)
        self.index.unlock(known, state=False)
        count = min(count, self.blocks.free_pages)
        pages: list[int] = []
        if count:
            self.blocks.alloc_tokens(0, count * self._page_size, pages)
        if self.storage is not None:
            self.storage.pages.allocated(pages)
        return pages

    def _order_store(
        self, prefix: PrefixKey, pages: list[int], blocks: list[int], states: list[_StoredState]
    ) -> None:
        node = self._first.match_kv(prefix, uses=False).node
        self._first.lock(node, state=False)
        self._first.leaving.add(node)
        self._storing.update(pages)
        for one in states:
            self._first.lock(one.node)
        self._storing_states.update(one.slot for one in states)
        self._order(_Operation(pages, blocks, node, prefix=prefix, states=states), store=True)

    # --- loads

    def match(self, prefix: PrefixKey, max_tokens: int) -> Match:
        """Returns the longest prefix of the second tier that a prompt can continue, at most `max_tokens` tokens.

        Valid until the next call that changes the tier. `Match.state` is a state block.
        """
        return self.index.match(prefix, max_tokens)

    def load(self, hit: Match, first_page: int, pages: Sequence[int], slot: int | None = None) -> TierLoad:
        """Plans a load of the pages of `hit` from index `first_page` on into `pages`, which the caller owns.

        `slot`: state slot, owned by the caller, for the state of `hit`; None for a hit without a state. The caller
        must not use KV and state before `TierLoad.done`, except in a step whose plan names the load in
        `StepPlan.awaited_loads`, and in steps after that one.
        """
        blocks = hit.pages[first_page:]
        if len(blocks) != len(pages) or (hit.state is None) != (slot is None):
            raise ValueError(
                f"{len(blocks)} blocks and state {hit.state} cannot be loaded to {len(pages)} pages and slot {slot}"
            )
        self.index.lock(hit.node, state=hit.state is not None)
        self.index.count(hit)
        if self.storage is not None:
            self.storage.pages.loaded(blocks)
        self._allocator.share(pages)
        load = TierLoad(len(pages), None if slot is None else (hit.tokens, slot))
        self._order(_Operation(list(pages), blocks, hit.node, load=load), store=False)
        return load

    def frees_later(self, slot: int) -> bool:
        """Returns whether a running load writes the state slot. If so, the tier frees the slot at the end of the
        load."""
        # Latest load first: an earlier load can have the same slot, if its request passed the slot on before all
        # ranks reported the load.
        for one in reversed(self._under_way.values()):
            if one.load is not None and one.load.state is not None and one.load.state[1] == slot:
                one.slot_released = True
                return True
        return False

    # --- operations

    def take_operations(self) -> list[CacheOperation]:
        """Returns the operations for the next plan; each operation is returned once."""
        planned, self._planned = self._planned, []
        return planned

    def moved(self, number: int, rank: int, error: str = "", seconds: float = 0.0) -> None:
        """Records a rank's report; the last rank's report ends the operation. Repeated reports change nothing.

        `seconds`: duration of a load on the rank.
        """
        operation = self._under_way.get(number)
        if operation is None or rank not in operation.missing_ranks:
            return
        operation.missing_ranks.remove(rank)
        operation.failed |= bool(error)
        operation.seconds = max(operation.seconds, seconds)
        if operation.missing_ranks:
            return
        del self._under_way[number]
        if operation.load is None:
            self._end_store(operation)
        else:
            self._end_load(operation, operation.load)

    def _order(self, operation: _Operation, *, store: bool) -> None:
        self._number += 1
        operation.missing_ranks = set(range(self._ranks))
        self._under_way[self._number] = operation
        if operation.load is not None:
            operation.load.number = self._number
        transfers = []
        if operation.pages:
            transfers.append(PoolTransfer("kv", operation.pages, [block - 1 for block in operation.blocks]))
        states = [(one.slot, one.block) for one in operation.states]
        if operation.load is not None and operation.load.state is not None:
            assert operation.node.state is not None, "the hit's state is locked"
            states = [(operation.load.state[1], operation.node.state)]
        if states:
            transfers.append(PoolTransfer("state", [one for one, _ in states], [one for _, one in states]))
        self._planned.append(CacheOperation(self._number, store, transfers))

    def _end_store(self, operation: _Operation) -> None:
        prefix, blocks = operation.prefix, operation.blocks
        assert prefix is not None, "a store has a prefix"
        self._storing.difference_update(operation.pages)
        self._first.leaving.remove(operation.node)
        self._first.unlock(operation.node, state=False)
        for state in operation.states:
            self._storing_states.remove(state.slot)
            self._first.unlock(state.node)
        start = prefix.tokens // self._page_size - len(blocks)
        known = self.index.match_kv(prefix)
        # Earlier pages of the prefix may have been evicted during the copy: the blocks then fit nowhere in the tree.
        if operation.failed:
            # A rank could not pin the blocks, and would fail again the next time: the blocks are not used again.
            self._failed += 1
            self._lost.extend(blocks)
            self._lost_states += len(operation.states)
            return
        if blocks and len(known.pages) >= start:
            self.index.insert(prefix, [*known.pages[:start], *blocks])
            self._stored += len(blocks)
        if blocks:
            self.blocks.free(blocks)  # blocks in the tree keep the tree's reference
        for state in operation.states:
            self.index.attach_state(prefix, state.tokens, state.block)
        if self.storage is not None:
            self.storage.write(prefix)

    def _end_load(self, operation: _Operation, load: TierLoad) -> None:
        self.index.unlock(operation.node, state=load.state is not None)
        if operation.pages:
            self._allocator.free(operation.pages)
        if operation.slot_released and load.state is not None:
            self._first.free_state(load.state[1])
        self._loaded += len(operation.pages)
        self._load_s += operation.seconds
        self._load_rate.add(len(operation.pages) * self._page_size, operation.seconds)
        load.done = True

    # --- state

    def held_pages(self) -> list[int]:
        """Returns the first tier's pages to which running loads have a reference."""
        return [page for one in self._under_way.values() if one.load is not None for page in one.pages]

    def statistics(self) -> HostTierStatistics:
        """Returns the current counts."""
        return HostTierStatistics(
            pages=self.blocks.pages - 1,
            used_pages=self.blocks.statistics().used_pages,
            cache=self.index.statistics(),
            storing_pages=len(self._storing),
            loading_pages=len(self.held_pages()),
            stored_pages=self._stored,
            loaded_pages=self._loaded,
            skipped_pages=self._skipped,
            failed_operations=self._failed,
            load_s=self._load_s,
            load_tokens_per_s=self._load_rate.tokens_per_s,
            storage=self.storage.statistics() if self.storage is not None else None,
        )

    def check(self) -> None:
        """Raises `InvariantError` unless each block is free, cached, or owned by one operation under way."""
        self.blocks.check()
        self.index.check()
        self._load_rate.check()
        storing = [one for one in self._under_way.values() if one.load is None]
        states = [state for one in storing for state in one.states]
        owned = [*self.index.pages(), *self._lost, *(block for one in storing for block in one.blocks)]
        held_states = len(states) + self._lost_states
        if self.storage is not None:
            self.storage.check()
            owned += self.storage.pages.held
            held_states += self.storage.states.held
        pages = [page for one in storing for page in one.pages]
        sound = (
            len(set(owned)) == len(owned) == self.blocks.statistics().used_pages
            and sorted(pages) == sorted(self._storing)
            and sorted(state.slot for state in states) == sorted(self._storing_states)
            and self.index.statistics().held_states == held_states
            and all(state.node.state == state.slot for state in states)
            and all(self._allocator.readers(page) for page in [*pages, *self.held_pages()])
            and all(one.node.locks for one in self._under_way.values())
        )
        if not sound:
            raise InvariantError(f"host tier: blocks {owned}, storing {self._storing}, {self.statistics()}")
