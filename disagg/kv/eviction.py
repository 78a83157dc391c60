"""Eviction order of the prefix tree: pages from the ends of leaves, and recurrent states of nodes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from disagg.core.config.groups import EvictionName
from disagg.kv.radix_node import Node

Order = tuple[int, ...]

ORDERS: dict[EvictionName, Callable[[Node], Order]] = {
    "lru": lambda node: (node.used,),
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: (node.born,),
}
"""Sort key of a node, by policy. The node with the lowest key is evicted first; keys never decrease."""

_FEW_ENTRIES = 64
"""Smallest number of entries at which a heap is cleaned, that is, at which entries of nodes not ready for eviction
are dropped."""


class NodeQueue:
    """A lazy heap of nodes that are ready for eviction: O(log n) per push; a use of a node does not touch the heap.

    An entry has the sort key that its node had at the push. Keys only rise, so an outdated entry reaches the top too
    early and is pushed again with the current key. An entry at the top whose node is not ready is dropped. Whenever
    the heap has doubled, all entries of nodes that are not ready are dropped, so that they never dominate the heap.
    """

    def __init__(self, order: Callable[[Node], Order], ready: Callable[[Node], bool]) -> None:
        """`order`: sort key of a node; `ready`: whether the node may be evicted from this queue now."""
        self._order, self._ready = order, ready
        self._heap: list[tuple[Order, int, Node]] = []
        self._queued: set[Node] = set()
        self._clean_at = _FEW_ENTRIES
        self._serial = itertools.count()

    def __len__(self) -> int:
        """Returns the number of entries, including those of nodes that are no longer ready."""
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Adds a node that is ready and has no entry yet; otherwise changes nothing."""
        if node in self._queued or not self._ready(node):
            return
        if len(self._heap) >= self._clean_at:
            self._clean()
        self._queued.add(node)
        heapq.heappush(self._heap, (self._order(node), next(self._serial), node))

    def first(self) -> Node | None:
        """Returns the node to evict from next, or None. The node keeps its entry while it is ready."""
        while self._heap:
            order, serial, node = self._heap[0]
            if not self._ready(node):
                heapq.heappop(self._heap)
                self._queued.remove(node)
            elif order != self._order(node):
                heapq.heapreplace(self._heap, (self._order(node), serial, node))
            else:
                return node
        return None

    def sound(self, nodes: Iterable[Node]) -> bool:
        """Returns whether each ready node of `nodes` has one entry, with at most the node's sort key."""
        queued = [node for _, _, node in self._heap]
        early = all(not self._ready(node) or order <= self._order(node) for order, _, node in self._heap)
        once = len(set(queued)) == len(queued) and set(queued) == self._queued
        return early and once and all(node in self._queued for node in nodes if self._ready(node))

    def _clean(self) -> None:
        self._heap = [entry for entry in self._heap if self._ready(entry[2])]
        heapq.heapify(self._heap)
        self._queued = {node for _, _, node in self._heap}
        self._clean_at = max(2 * len(self._heap), _FEW_ENTRIES)


class LeafQueue:
    """Order in which pages are evicted: evictable leaves without a state first, then evictable leaves with a state.

    A match of a hybrid model ends at a state. Pages after the last state of their path therefore serve no match, and
    a leaf without a state has only such pages. In a cache without states, the policy alone decides.
    """

    def __init__(self, policy: EvictionName) -> None:
        order = ORDERS[policy]
        self._without_state = NodeQueue(order, lambda node: node.state is None and node.evictable)
        self._with_state = NodeQueue(order, lambda node: node.state is not None and node.evictable)

    def push(self, node: Node) -> None:
        """Adds a node that is evictable and not queued yet. Call this method also when the node's state changes."""
        (self._without_state if node.state is None else self._with_state).push(node)

    def first(self) -> Node | None:
        """Returns the leaf to evict from next, or None."""
        return self._without_state.first() or self._with_state.first()

    def sound(self, nodes: list[Node]) -> bool:
        """Returns whether each evictable node of `nodes` is queued."""
        return self._without_state.sound(nodes) and self._with_state.sound(nodes)


class StateQueue:
    """Order in which states are evicted: states of inner nodes first, then states of leaves; within both, the least
    recently used first.

    A leaf without its state serves no further match. An inner node without its state still serves matches, because a
    descendant usually has a state.
    """

    def __init__(self) -> None:
        self._inner = NodeQueue(_state_used, lambda node: node.state_evictable and bool(node.children))
        self._leaves = NodeQueue(_state_used, lambda node: node.state_evictable and not node.children)

    def push(self, node: Node) -> None:
        """Adds a node if its state is evictable and not queued yet.

        Call this method when the node gets a state, loses its last lock, gets its first child or loses its last
        child.
        """
        (self._inner if node.children else self._leaves).push(node)

    def first(self) -> Node | None:
        """Returns the node whose state to evict next, or None."""
        return self._inner.first() or self._leaves.first()

    def sound(self, nodes: list[Node]) -> bool:
        """Returns whether each node of `nodes` whose state is evictable is queued."""
        return self._inner.sound(nodes) and self._leaves.sound(nodes)


def _state_used(node: Node) -> Order:
    return (node.state_used,)
