"""The prefix cache: KV pages of prompt prefixes, found by token ids, shared in place, evicted from the leaves.

A radix tree over whole pages of token ids, as in SGLang's RadixAttention (Zheng et al., 2024); vLLM uses a hash table
of blocks with chained hashes instead. An edge is a run of pages whose tokens are compared by one memory comparison.
The cost of a match therefore grows with the number of forks on its path, not with the number of pages. Hash
collisions cannot occur. Block hashes are kept only for routers (`disagg.core.prefixes`).

For hybrid models a node may also have a *state*: a snapshot of the recurrent layers after the node's last token, in a
slot of `MambaPool`, as in SGLang's Mamba radix cache. A prompt can continue only from a state, so a match then ends
at a node with a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagg.core.config.groups import EvictionName
from disagg.core.errors import InvariantError
from disagg.core.prefixes import Digest, PrefixKey
from disagg.core.tokens import TOKEN_BYTES
from disagg.kv.event_log import KVEventLog, unit_tokens_for
from disagg.kv.eviction import LeafQueue
from disagg.kv.leaving_pages import LeavingPages
from disagg.kv.node_states import NodeStates
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix_node import Node, block_hashes_in, common_pages
from disagg.kv.radix_values import Match, RadixStatistics
from disagg.kv.state_slots import StateSlots


class RadixCache:
    """The radix tree, with a page reference for each cached page. Not thread-safe: the group's scheduler owns it.

    Ownership: `insert` adds the cache's own references to new pages, which eviction drops; the caller's references
    stay with the caller. `match` adds no references. A request that reads matched pages adds its own references
    (`KVSequence`, or the allocator's `share`) and locks the node, so its pages are not evicted. At its end, the
    request unlocks the node and drops its references, each once.

    State slots: the caller of `alloc_state` owns the slot until `attach_state`, which passes it to the cache, or
    `free_state`. Evicting the page at a node's end frees the node's state. With states, pages after the last state of
    their path serve no match, so leaves without a state are evicted before other leaves.

    KV events report pages, not states. A router may therefore overestimate the hit of a group with states, which
    affects only its choice of the group.
    """

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        policy: EvictionName = "lru",
        unit_tokens: int | None = None,
        states: StateSlots | None = None,
        *,
        matches_kv: bool = False,
    ) -> None:
        """`unit_tokens`: tokens of a hashed block, a multiple of the page size; None: see `unit_tokens_for`.

        `states`: slots for the states of a hybrid model; None for a model without states, whose matches need no
        state. `matches_kv`: `match` ignores states, for a group that receives the state of each prompt.
        """
        self._allocator = allocator
        self._page_size = allocator.page_size
        self._page_bytes = allocator.page_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._leaves = LeafQueue(policy)
        self.keeps_states = states is not None
        """Whether nodes may have states."""
        self.needs_state = self.keeps_states and not matches_kv
        """Whether a match ends at a cached state, because the model has recurrent layers."""
        self._states = NodeStates(states or StateSlots(0, 0))
        self.kv_events = KVEventLog(unit_tokens or unit_tokens_for(allocator.pages, allocator.page_size))
        """KV events for routers; only the cache changes them."""
        self.leaving = LeavingPages()
        """Pages on paths of stores; the caller adds and removes the stores."""
        self._unit_pages = self.kv_events.unit_tokens // allocator.page_size
        self._clock = self._cached_pages = self._locked_pages = self._nodes = 0
        self._hits = self._misses = self._hit_tokens = self._queried_tokens = self._evicted_pages = 0

    @property
    def evictable_pages(self) -> int:
        """Number of pages that `evict` can remove. A removed page is free unless a request still references it."""
        return self._cached_pages - self._locked_pages

    def match(self, key: PrefixKey, max_tokens: int | None = None) -> Match:
        """Returns the longest cached prefix in whole pages, at most `max_tokens` tokens.

        With states the match is the longest prefix that ends at a state, even if more KV is cached. A caller that
        needs the logits of the last token passes the prompt's length less one. The match is valid until the next
        `insert`, `evict`, `alloc_state` or `attach_state`, longer if locked.
        """
        if not self.needs_state:
            return self.match_kv(key, max_tokens)
        return self.match_state(key, max_tokens)

    def match_state(self, key: PrefixKey, max_tokens: int | None = None) -> Match:
        """Returns the longest cached prefix that ends at a state; empty without one. Otherwise like `match`."""
        node, pages = self._latest_state(self._root(key), key.data, self._stop(key, max_tokens))
        return Match(node, pages, len(pages) * self._page_size, key.tokens, node.state)

    def match_kv(self, key: PrefixKey, max_tokens: int | None = None, *, uses: bool = True) -> Match:
        """Returns the longest prefix whose KV is cached, with or without a state at its end.

        `uses`: whether the match counts as a use for the eviction policy. Otherwise like `match`.
        """
        node, pages = self._walk(self._root(key), key.data, self._stop(key, max_tokens), uses=uses)
        return Match(node, pages, len(pages) * self._page_size, key.tokens)

    def state_nodes(self, key: PrefixKey, *, uses: bool = True) -> list[Node]:
        """Returns the nodes with a state on the path of the longest cached prefix of `key`, shortest prefix first.

        `uses`: see `match_kv`.
        """
        node: Node | None = self.match_kv(key, uses=uses).node
        found = []
        while node is not None:
            if node.state is not None:
                found.append(node)
            node = node.parent
        return found[::-1]

    def lock(self, node: Node, *, state: bool = True) -> None:
        """Locks all pages from the root to the node's end until `unlock`. O(depth).

        `state`: also locks the node's own state, but not the states of its ancestors.
        """
        if state and self.keeps_states:
            self._states.lock(node)
        above: Node | None = node
        while above is not None:
            if not above.locks:
                self._locked_pages += len(above.pages)
            above.locks += 1
            above = above.parent

    def unlock(self, node: Node, *, state: bool = True) -> None:
        """Reverts one `lock` with the same `state`. Raises ValueError, changing nothing, without such a lock."""
        state = state and self.keeps_states
        if not (node.state_locks if state else node.locks):
            raise ValueError("this node is not locked: lock it first, unlock it once")
        if state:
            self._states.unlock(node)
        above: Node | None = node
        while above is not None:
            above.locks -= 1
            if not above.locks:
                self._locked_pages -= len(above.pages)
                self._loose(above)
            above = above.parent

    def count(self, match: Match) -> None:
        """Counts the match of an admitted request, for the statistics and the lfu policy."""
        self._queried_tokens += match.queried_tokens
        self._hit_tokens += match.tokens
        self._hits += bool(match.tokens)
        self._misses += not match.tokens
        above: Node | None = match.node
        while above is not None:
            above.hits += 1
            above = above.parent

    def insert(self, key: PrefixKey, pages: Sequence[int]) -> Node:
        """Caches the full pages of a prompt whose KV is in `pages`; returns the node, for `lock`.

        Adds a reference to each page that enters the cache. Tokens already cached keep their cached pages. Raises
        ValueError, changing nothing, if `pages` do not match the prompt or an added page is not allocated.
        """
        if len(pages) != key.tokens // self._page_size:
            raise ValueError(
                f"{len(pages)} pages for a prompt of {key.tokens} tokens: give the "
                f"{key.tokens // self._page_size} that it fills"
            )
        root = self._root(key)
        node, _ = self._walk(root, key.data, len(pages) * self._page_bytes)
        added = list(pages[node.end :])
        if not added:
            return node
        self._allocator.share(added)
        self._roots[key.salt] = root
        return self._add_leaf(node, key, added)

    def alloc_state(self) -> int | None:
        """Returns a state slot, which the caller owns until `attach_state` or `free_state`. O(log nodes), amortized.

        If no slot is free, evicts the least recently used state of an inner node, or of a leaf if no inner node has
        an evictable state. The pages of the node stay cached. Returns None if all slots are locked or held by
        callers.
        """
        slot = self._states.alloc()
        if slot is None and (node := self._states.evict()) is not None:
            self._leaves.push(node)
            slot = self._states.alloc()
        return slot

    def free_state(self, slot: int) -> None:
        """Frees a slot of `alloc_state`. Raises ValueError, changing nothing, if the caller does not own it."""
        self._states.release(slot)

    def attach_state(self, key: PrefixKey, tokens: int, slot: int) -> bool:
        """Caches the state in `slot`, taken after the first `tokens` tokens of `key`; the cache then owns the slot.

        If the pages of that prefix are not all cached, or the prefix has a state already, frees the slot and returns
        False; the existing state then counts as used. Raises ValueError, changing nothing, for a slot that the caller
        does not own, or unless `tokens` is a positive multiple of the page size within the prompt.
        """
        if not 0 < tokens <= key.tokens or tokens % self._page_size:
            raise ValueError(
                f"a state after {tokens} of {key.tokens} tokens cannot be cached: its position must be a positive "
                f"multiple of the page size {self._page_size} within the prompt"
            )
        self._states.require_held(slot)
        node, pages = self._walk(self._root(key), key.data, self._stop(key, tokens))
        if len(pages) * self._page_size == tokens:
            if node.state is None:
                self._states.attach(node, slot, self._clock)
                self._leaves.push(node)
                return True
            node.state_used = self._clock
        self._states.release(slot)
        return False

    def evict(self, pages: int) -> int:
        """Evicts cached pages in policy order until `pages` pages have become free; returns the number of freed
        pages.

        The number is below `pages` only if no more pages can be evicted. Evicts a node's last pages first, and no
        more pages than needed.
        """
        freed = 0
        while freed < pages and (leaf := self.oldest_leaf()) is not None:
            freed += self.evict_from(leaf, pages - freed)
        return freed

    def oldest_leaf(self) -> Node | None:
        """Returns the leaf to evict from next, in policy order; None if all leaves are locked."""
        return self._leaves.first()

    def evict_from(self, leaf: Node, pages: int) -> int:
        """Evicts up to `pages` of the last pages of `oldest_leaf`; returns the number of freed pages."""
        return self._cut(leaf, min(pages, len(leaf.pages)))

    def digest(self, since: int | None = None) -> Digest:
        """Returns the KV events since version `since`; see `KVEventLog.digest`."""
        return self.kv_events.digest(since)

    def statistics(self) -> RadixStatistics:
        """Returns the current counts."""
        return RadixStatistics(
            cached_pages=self._cached_pages,
            locked_pages=self._locked_pages,
            nodes=self._nodes,
            salts=len(self._roots),
            hits=self._hits,
            misses=self._misses,
            hit_tokens=self._hit_tokens,
            queried_tokens=self._queried_tokens,
            evicted_pages=self._evicted_pages,
            cached_states=self._states.cached,
            locked_states=self._states.locked,
            held_states=self._states.held,
            free_states=self._states.free,
            evicted_states=self._states.evicted,
        )

    def pages(self) -> list[int]:
        """Returns all cached pages. O(pages), so only for checks."""
        return [page for root in self._roots.values() for node in _below(root) for page in node.pages]

    def check(self) -> None:
        """Raises InvariantError unless tree, counters, eviction queues, block hashes and states agree.

        O(cached tokens).
        """
        nodes = [node for root in self._roots.values() for node in _below(root)]
        block_hashes = [block_hash for node in nodes for block_hash in node.block_hashes]
        broken = [
            name
            for name, sound in {
                "nodes": len(nodes) == self._nodes and all(self._node_sound(node) for node in nodes),
                "roots": all(root.children or root.locks for root in self._roots.values()),
                "pages": sum(len(node.pages) for node in nodes) == self._cached_pages,
                "references": all(self._allocator.readers(page) for node in nodes for page in node.pages),
                "locks": sum(len(node.pages) for node in nodes if node.locks) == self._locked_pages,
                "leaves": self._leaves.sound(nodes),
                "block hashes": len(block_hashes) == len(self.kv_events.held)
                and set(block_hashes) == self.kv_events.held,
            }.items()
            if not sound
        ]
        if broken:
            tree = [(node.salt, node.start, node.pages, node.locks, len(node.children)) for node in nodes]
            raise InvariantError(f"prefix cache: {', '.join(broken)}; {self.statistics()}; {tree}")
        self._states.check(nodes)
        self.leaving.check()

    def _root(self, key: PrefixKey) -> Node:
        """Returns the root of the key's salt; a new root if nothing is cached with that salt."""
        return self._roots.get(key.salt) or Node(None, key.salt)

    def _stop(self, key: PrefixKey, max_tokens: int | None) -> int:
        """Returns the number of bytes of `key.data` that the whole pages within `max_tokens` take."""
        limit = key.tokens if max_tokens is None else min(key.tokens, max_tokens)
        return limit // self._page_size * self._page_bytes

    def _walk(self, node: Node, data: bytes, stop: int, *, uses: bool = True) -> tuple[Node, list[int]]:
        """Descends along the cached prefix of `data[:stop]`, whole pages; splits a node that matches only in part.

        Returns the last node and the pages of the path.
        """
        page_bytes, at = self._page_bytes, 0
        pages: list[int] = []
        self._clock += 1
        while at < stop:
            child = node.children.get(data[at : at + page_bytes])
            if child is None:
                break
            if at + len(child.edge) > stop or not data.startswith(child.edge, at):
                common = common_pages(child.edge, data, at, stop, page_bytes)
                lower, child = child, child.split(common, page_bytes, self._unit_pages)
                self.leaving.was_split(lower)
                self._nodes += 1
            if uses:
                child.used = self._clock
            pages += child.pages
            at += len(child.edge)
            node = child
        return node, pages

    def _latest_state(self, root: Node, data: bytes, stop: int) -> tuple[Node, list[int]]:
        """Descends like `_walk` to the deepest node with a state, or to the root without one; splits no node.

        Marks only that node's state, and the nodes of its path, as used. Returns the node and the pages of the path.
        """
        page_bytes, at = self._page_bytes, 0
        path: list[Node] = []
        useful, node = 0, root
        while at < stop:
            child = node.children.get(data[at : at + page_bytes])
            if child is None or at + len(child.edge) > stop or not data.startswith(child.edge, at):
                break
            path.append(child)
            at += len(child.edge)
            node = child
            if node.state is not None:
                useful = len(path)
        self._clock += 1
        pages: list[int] = []
        for node in path[:useful]:
            node.used = self._clock
            pages += node.pages
        found = path[useful - 1] if useful else root
        found.state_used = self._clock
        return found, pages

    def _add_leaf(self, parent: Node, key: PrefixKey, pages: list[int]) -> Node:
        start, stop = parent.end * self._page_bytes, (parent.end + len(pages)) * self._page_bytes
        leaf = Node(parent, key.salt, key.data[start:stop], pages)
        leaf.used = leaf.born = self._clock
        leaf.block_hashes = key.block_hashes(self.kv_events.unit_tokens, parent.end * self._page_size)
        parent.children[leaf.first_page(self._page_bytes)] = leaf
        self.kv_events.add(leaf.block_hashes)
        self._cached_pages += len(pages)
        self._nodes += 1
        self._leaves.push(leaf)
        self._children_changed(parent)
        return leaf

    def _cut(self, leaf: Node, pages: int) -> int:
        """Evicts the last `pages` pages of a leaf, and its state; returns how many pages became free."""
        if leaf.state is not None:
            self._states.drop(leaf)
        keep = len(leaf.pages) - pages
        first = leaf.first_page(self._page_bytes)
        freed = self._allocator.free(leaf.pages[keep:])
        del leaf.pages[keep:]
        leaf.edge = leaf.edge[: keep * self._page_bytes]
        leaf.end -= pages
        block_hashes = block_hashes_in(leaf, self._unit_pages)
        self.kv_events.remove(reversed(leaf.block_hashes[block_hashes:]))
        del leaf.block_hashes[block_hashes:]
        self._cached_pages -= pages
        self._evicted_pages += pages
        if keep:
            self._leaves.push(leaf)
        else:
            assert leaf.parent is not None, "a root has no pages and is never cut"
            del leaf.parent.children[first]
            self._nodes -= 1
            self._children_changed(leaf.parent)
            self._loose(leaf.parent)
        return freed

    def _children_changed(self, node: Node) -> None:
        """Updates what depends on the number of a node's children."""
        self.leaving.children_changed(node)
        if node.state is not None:
            self._states.children_changed(node)

    def _loose(self, node: Node) -> None:
        """Handles the loss of a lock or a child: queues `node` for eviction if evictable, or drops an unused root."""
        if node.evictable:
            self._leaves.push(node)
        elif not (node.parent or node.locks or node.children) and self._roots.get(node.salt) is node:
            del self._roots[node.salt]

    def _node_sound(self, node: Node) -> bool:
        above, page_bytes = node.parent, self._page_bytes
        key = PrefixKey(node.path_bytes(), node.salt)
        return (
            above is not None
            and above.children.get(node.first_page(page_bytes)) is node
            and len(node.edge) == len(node.pages) * page_bytes > 0
            and node.start == above.end
            and node.locks >= sum(child.locks for child in node.children.values())
            and node.block_hashes == key.block_hashes(self.kv_events.unit_tokens, above.end * self._page_size)
        )


def _below(node: Node) -> Iterator[Node]:
    found = list(node.children.values())
    while found:
        node = found.pop()
        found += node.children.values()
        yield node
