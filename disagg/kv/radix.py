"""The prefix cache: KV pages of beginnings of prompts, found by their tokens, shared in place, evicted by leaves.

A radix tree over whole pages of token ids, as in SGLang's RadixAttention (Zheng et al., 2024); vLLM keeps a hash
table of blocks with chained hashes instead. Here an edge is a run of pages whose tokens are compared as memory: a
prompt costs a few steps for each fork on its way, not a look-up for each page, and nothing rests on a hash, for
children are found by the tokens of a page themselves. Hashes are kept beside it, for routers (`core/prefixes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.core.config_tree import EvictionName
from disagg.core.errors import InvariantError
from disagg.core.prefixes import Digest, PrefixKey
from disagg.core.tokens import TOKEN_BYTES
from disagg.kv.eviction import LeafQueue
from disagg.kv.journal import MarkJournal, unit_tokens_for
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix_node import Node, common_pages, marks_in


class Match(NamedTuple):
    """The longest cached beginning of a prompt. The pages are the cache's: `RadixCache` says how to keep them."""

    node: Node
    """For `lock` and `unlock`."""
    pages: list[int]
    tokens: int
    """In those pages: all are full."""
    asked_tokens: int
    """Of the prompt."""


@dataclass(frozen=True, slots=True)
class RadixStatistics:
    """The cache as it stands, and counts since it was made."""

    cached_pages: int
    locked_pages: int
    """Of those cached, the ones that cannot be evicted now."""
    nodes: int
    """Roots left out."""
    hits: int
    """Requests, told by `count`, that found a page or more."""
    misses: int
    hit_tokens: int
    asked_tokens: int
    """Of the prompts of hits and misses."""
    evicted_pages: int


class RadixCache:
    """Holds a reference of its own to each page that it caches. Not thread-safe: the group's scheduler owns it.

    Who owns what: `insert` takes references of its own to what it adds, and eviction frees them; the caller's stay
    the caller's. `match` gives none; a request that reads matched pages takes its own (`KVSequence`, or the
    allocator's `share`) and locks the node, so that eviction, which would free nothing there, looks elsewhere. It
    unlocks and frees once.
    """

    def __init__(
        self, allocator: TokenToKVPoolAllocator, policy: EvictionName = "lru", unit_tokens: int | None = None
    ) -> None:
        """`unit_tokens`: tokens between two marks in a digest, whole pages; by the size of the pool when None."""
        self._allocator = allocator
        self._page_size = allocator.page_size
        self._page_bytes = allocator.page_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._leaves = LeafQueue(policy)
        self.journal = MarkJournal(unit_tokens or unit_tokens_for(allocator.pages, allocator.page_size))
        """What routers are told of; to be read only."""
        self._unit_pages = self.journal.unit_tokens // allocator.page_size
        self._clock = self._cached_pages = self._locked_pages = self._nodes = 0
        self._hits = self._misses = self._hit_tokens = self._asked_tokens = self._evicted_pages = 0

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could give up now. They come free where nobody reads them without a lock."""
        return self._cached_pages - self._locked_pages

    def match(self, key: PrefixKey, max_tokens: int | None = None) -> Match:
        """The longest cached beginning in whole pages, of at most `max_tokens` tokens.

        Who needs the logits of the last token passes one token less than the prompt has. Good until the next `insert`
        or `evict`, unless it is locked before.
        """
        limit = key.tokens if max_tokens is None else min(key.tokens, max_tokens)
        root = self._roots.get(key.salt) or Node(None, key.salt)
        node, pages = self._walk(root, key.data, limit // self._page_size * self._page_bytes)
        return Match(node, pages, len(pages) * self._page_size, key.tokens)

    def lock(self, node: Node) -> None:
        """Keeps all pages from the root to the node's end until `unlock`. O(forks on the way)."""
        above: Node | None = node
        while above is not None:
            if not above.locks:
                self._locked_pages += len(above.pages)
            above.locks += 1
            above = above.parent

    def unlock(self, node: Node) -> None:
        """Takes one `lock` back. Raises ValueError, changing nothing, where there is none."""
        if not node.locks:
            raise ValueError("this node is not locked: lock it first, unlock it once")
        above: Node | None = node
        while above is not None:
            above.locks -= 1
            if not above.locks:
                self._locked_pages -= len(above.pages)
                self._loose(above)
            above = above.parent

    def count(self, match: Match) -> None:
        """A request goes on with this match: for the statistics, and for what is used often."""
        self._asked_tokens += match.asked_tokens
        self._hit_tokens += match.tokens
        self._hits += bool(match.tokens)
        self._misses += not match.tokens
        above: Node | None = match.node
        while above is not None:
            above.hits += 1
            above = above.parent

    def insert(self, key: PrefixKey, pages: Sequence[int]) -> Node:
        """Caches a prompt whose KV is in `pages`, one for each whole page of it; returns the node, for `lock`.

        Takes a reference to each page that it adds. What was cached before stays, with its own pages: the caller's
        of the same tokens are not looked at. Raises ValueError, changing nothing, for pages that do not match the
        prompt, and for one to be added that is not handed out.
        """
        if len(pages) != key.tokens // self._page_size:
            raise ValueError(
                f"{len(pages)} pages for a prompt of {key.tokens} tokens: give the "
                f"{key.tokens // self._page_size} that it fills"
            )
        root = self._roots.get(key.salt) or Node(None, key.salt)
        node, _ = self._walk(root, key.data, len(pages) * self._page_bytes)
        added = list(pages[node.end :])
        if not added:
            return node
        self._allocator.share(added)
        self._roots[key.salt] = root
        return self._add_leaf(node, key, added)

    def evict(self, pages: int) -> int:
        """Gives up cached pages, the policy's first choice first, until `pages` came free; returns how many did.

        Fewer only when no other can go. From a run of pages the last ones go, and no more than needed.
        """
        freed = 0
        while freed < pages and (leaf := self._leaves.first()) is not None:
            freed += self._cut(leaf, min(pages - freed, len(leaf.pages)))
        return freed

    def digest(self, since: int | None = None) -> Digest:
        """What changed since that version, for routers; everything when `since` is None or long ago."""
        return self.journal.digest(since)

    def statistics(self) -> RadixStatistics:
        """Counts at this moment."""
        return RadixStatistics(
            cached_pages=self._cached_pages,
            locked_pages=self._locked_pages,
            nodes=self._nodes,
            hits=self._hits,
            misses=self._misses,
            hit_tokens=self._hit_tokens,
            asked_tokens=self._asked_tokens,
            evicted_pages=self._evicted_pages,
        )

    def pages(self) -> list[int]:
        """All that it holds a reference to. O(pages): for checks."""
        return [page for root in self._roots.values() for node in _below(root) for page in node.pages]

    def check(self) -> None:
        """Raises InvariantError unless the tree, its counters, its queue and its marks agree. O(tokens cached)."""
        nodes = [node for root in self._roots.values() for node in _below(root)]
        marks = [mark for node in nodes for mark in node.marks]
        broken = [
            name
            for name, sound in {
                "nodes": len(nodes) == self._nodes and all(self._node_sound(node) for node in nodes),
                "roots": all(root.children or root.locks for root in self._roots.values()),
                "pages": sum(len(node.pages) for node in nodes) == self._cached_pages,
                "references": all(self._allocator.readers(page) for node in nodes for page in node.pages),
                "locks": sum(len(node.pages) for node in nodes if node.locks) == self._locked_pages,
                "leaves": self._leaves.sound([node for node in nodes if node.evictable]),
                "marks": len(marks) == len(self.journal.held) and set(marks) == self.journal.held,
            }.items()
            if not sound
        ]
        if broken:
            tree = [(node.salt, node.start, node.pages, node.locks, len(node.children)) for node in nodes]
            raise InvariantError(f"prefix cache: {', '.join(broken)}; {self.statistics()}; {tree}")

    def _walk(self, node: Node, data: bytes, stop: int) -> tuple[Node, list[int]]:
        """Down the tree along `data[:stop]`, whole pages, as far as it goes; splits the last node where it parts."""
        page_bytes, at = self._page_bytes, 0
        pages: list[int] = []
        self._clock += 1
        while at < stop:
            child = node.children.get(data[at : at + page_bytes])
            if child is None:
                break
            if at + len(child.edge) > stop or not data.startswith(child.edge, at):
                common = common_pages(child.edge, data, at, stop, page_bytes)
                child = child.split(common, page_bytes, self._unit_pages)
                self._nodes += 1
            child.used = self._clock
            pages += child.pages
            at += len(child.edge)
            node = child
        return node, pages

    def _add_leaf(self, parent: Node, key: PrefixKey, pages: list[int]) -> Node:
        start, stop = parent.end * self._page_bytes, (parent.end + len(pages)) * self._page_bytes
        leaf = Node(parent, key.salt, key.data[start:stop], pages)
        leaf.used = leaf.born = self._clock
        leaf.marks = key.marks(self.journal.unit_tokens, parent.end * self._page_size)
        parent.children[leaf.first_page(self._page_bytes)] = leaf
        self.journal.add(leaf.marks)
        self._cached_pages += len(pages)
        self._nodes += 1
        self._leaves.push(leaf)
        return leaf

    def _cut(self, leaf: Node, pages: int) -> int:
        """Gives up the last `pages` pages of a leaf; returns how many came free."""
        keep = len(leaf.pages) - pages
        first = leaf.first_page(self._page_bytes)
        freed = self._allocator.free(leaf.pages[keep:])
        del leaf.pages[keep:]
        leaf.edge = leaf.edge[: keep * self._page_bytes]
        leaf.end -= pages
        marks = marks_in(leaf, self._unit_pages)
        self.journal.remove(reversed(leaf.marks[marks:]))
        del leaf.marks[marks:]
        self._cached_pages -= pages
        self._evicted_pages += pages
        if not keep:
            assert leaf.parent is not None, "a root has no pages and is never cut"
            del leaf.parent.children[first]
            self._nodes -= 1
            self._loose(leaf.parent)
        return freed

    def _loose(self, node: Node) -> None:
        """The last lock or the last child of a node went: it may be evicted now; a root is forgotten."""
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
            and node.marks == key.marks(self.journal.unit_tokens, above.end * self._page_size)
        )


def _below(node: Node) -> Iterator[Node]:
    found = list(node.children.values())
    while found:
        node = found.pop()
        found += node.children.values()
        yield node
