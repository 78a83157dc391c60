"""Counts the pages of a prefix tree that can be evicted without a loss when the running stores have ended.

These are the pages on the paths of the stores, from the end of each path up to the first fork. A page above a fork is
not counted, because the other branch must be evicted first. The count is updated with each change of the tree, so
reading it is O(1). An update costs at most as much as a lock of the same path.
"""

from __future__ import annotations

from collections import Counter

from disagg.core.errors import InvariantError
from disagg.kv.radix_node import Node


class LeavingPages:
    """Ends of the running stores in one tree, and the nodes below the first fork of their paths. Not thread-safe.

    The tree's nodes on the paths are locked. The tree reports each split, and each change of a node's children.
    """

    def __init__(self) -> None:
        self._ends: Counter[Node] = Counter()
        """Number of running stores whose path ends at each node."""
        self._leaving: set[Node] = set()
        """Nodes whose pages are counted."""
        self._pages = 0

    @property
    def pages(self) -> int:
        """Number of pages that can be evicted without a loss when the running stores have ended. O(1)."""
        return self._pages

    def add(self, node: Node) -> None:
        """Records a store whose path ends at `node`."""
        self._ends[node] += 1
        self._update(node)

    def remove(self, node: Node) -> None:
        """Records the end of a store of `add`."""
        self._ends[node] -= 1
        if not self._ends[node]:
            del self._ends[node]
        self._update(node)

    def children_changed(self, node: Node) -> None:
        """Records that the number of children of `node` has changed."""
        if self._ends:
            self._update(node)

    def was_split(self, lower: Node) -> None:
        """Records that the first pages of `lower` are now those of its new parent."""
        if lower in self._leaving and lower.parent is not None:
            self._leaving.add(lower.parent)

    def check(self) -> None:
        """Raises `InvariantError` unless the count is that of a walk over all paths."""
        found: set[Node] = set()
        for end in self._ends:
            node: Node | None = end
            while node is not None and len(node.children) <= 1:
                found.add(node)
                node = node.parent
        pages = sum(len(node.pages) for node in found)
        if found != self._leaving or pages != self._pages or min(self._ends.values(), default=1) < 1:
            raise InvariantError(f"leaving pages: {self._pages}, not {pages}, of {len(self._ends)} stores")

    def _update(self, node: Node) -> None:
        """Adds `node` to the counted nodes or removes it; goes on to its ancestors, up to the first unchanged one."""
        above: Node | None = node
        while above is not None and self._leaves(above) != (above in self._leaving):
            if above in self._leaving:
                self._leaving.remove(above)
                self._pages -= len(above.pages)
            else:
                self._leaving.add(above)
                self._pages += len(above.pages)
            above = above.parent

    def _leaves(self, node: Node) -> bool:
        """Returns whether a store's path ends at the node or below it, without a fork at the node or in between."""
        if len(node.children) > 1:
            return False
        return node in self._ends or any(child in self._leaving for child in node.children.values())
