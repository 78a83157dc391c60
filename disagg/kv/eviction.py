"""Eviction order of the leaves of the prefix tree."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from disagg.core.config.groups import EvictionName
from disagg.kv.radix_node import Node

ORDERS: dict[EvictionName, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.used,),
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: (node.born,),
}
"""Sort key of a node, by policy. The node with the lowest key is evicted first; keys never decrease."""


class LeafQueue:
    """A lazy heap of evictable nodes: O(log n) per push; a prefix cache hit does not touch the heap.

    An entry has the sort key that its node had at the push. Keys only rise, so an outdated entry reaches the top too
    early and is pushed again with the current key. An entry at the top whose node is not evictable is dropped.
    """

    def __init__(self, policy: EvictionName) -> None:
        self._order = ORDERS[policy]
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._serial = itertools.count()

    def push(self, node: Node) -> None:
        """Adds an evictable node unless it has an entry already."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (self._order(node), next(self._serial), node))

    def first(self) -> Node | None:
        """Returns the node to evict from next, or None. The node keeps its entry while it is evictable."""
        while self._heap:
            order, serial, node = self._heap[0]
            if not node.evictable:
                heapq.heappop(self._heap)
                node.queued = False
            elif order != self._order(node):
                heapq.heapreplace(self._heap, (self._order(node), serial, node))
            else:
                return node
        return None

    def sound(self, leaves: list[Node]) -> bool:
        """Returns whether each evictable node has one entry, whose sort key is at most the node's.

        `leaves`: all evictable nodes.
        """
        queued = [node for _, _, node in self._heap]
        early = all(order <= self._order(node) for order, _, node in self._heap)
        once = len({id(node) for node in queued}) == len(queued) and all(node.queued for node in queued)
        return early and once and {id(leaf) for leaf in leaves} <= {id(node) for node in queued}
