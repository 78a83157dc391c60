"""Which leaf of the prefix tree goes first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from disagg.core.config_tree import EvictionName
from disagg.kv.radix_node import Node

ORDERS: dict[EvictionName, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.used,),
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: (node.born,),
}
"""The leaf with the lowest order goes first: longest unused, least often used, oldest. It never sinks."""


class LeafQueue:
    """A heap of nodes that can be evicted. O(log n) for each change, nothing for a node that is merely used.

    An entry keeps the order that its node had when it was pushed. As orders only rise, one that is not its node's
    order any more comes to the top too early, and is put back then; one whose node is no leaf any more is dropped.
    """

    def __init__(self, policy: EvictionName) -> None:
        self._order = ORDERS[policy]
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._serial = itertools.count()

    def push(self, node: Node) -> None:
        """The node can be evicted now."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (self._order(node), next(self._serial), node))

    def first(self) -> Node | None:
        """The node to evict from; it stays in the queue, and falls out when it is empty."""
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
        """True when each of `leaves`, all that can be evicted, has one entry, and none too late."""
        queued = [node for _, _, node in self._heap]
        early = all(order <= self._order(node) for order, _, node in self._heap)
        once = len({id(node) for node in queued}) == len(queued) and all(node.queued for node in queued)
        return early and once and {id(leaf) for leaf in leaves} <= {id(node) for node in queued}
