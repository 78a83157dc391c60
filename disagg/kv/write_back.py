"""Write-back: pages of the pool are copied to host memory when they are evicted, instead of when they are cached.

Eviction goes through the leaves of the first tier in the order of the eviction policy:

    clean leaf   the second tier has its pages: they are freed at once
    dirty leaf   a store of its path is planned, which locks the path. The caller waits; after the store the leaf is
                 clean. The compute stream never waits

Pages of a dirty leaf are freed without a copy, and counted as skipped, if host memory has no block for them, or if
the caller cannot wait: a running request grows. To make this rare, a share of the pool is freed ahead of its use.

Pages of a hybrid model that follow the last state of their path serve no match, and are never copied.
"""

from __future__ import annotations

from disagg.core.prefixes import PrefixKey
from disagg.kv.free_pages import AHEAD_SHARE
from disagg.kv.host_tier import HostTier
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix import RadixCache
from disagg.kv.radix_node import Node


class WriteBack:
    """Evicts pages of the first tier. Not thread-safe: the leader's lock guards it, as it guards both trees."""

    def __init__(self, first: RadixCache, allocator: TokenToKVPoolAllocator, host: HostTier) -> None:
        """`first`: tree of the first tier, over the pages of `allocator`; `host`: the second tier."""
        self._first, self._allocator, self._host = first, allocator, host
        self._ahead_pages = (allocator.pages - 1) // AHEAD_SHARE

    def make_room(self, pages: int, *, waits: bool) -> bool:
        """Evicts cached pages until `pages` pages are free; returns whether they are free now.

        `waits`: whether the caller can wait. False is then returned while stores are under way, and the caller tries
        again when a store has ended. Changes both tiers: a match that is not locked becomes invalid.
        """
        while (short := pages - self._allocator.free_pages) > 0:
            if waits and short <= self._host.leaving_pages:
                return False
            leaf = self._first.oldest_leaf()
            if leaf is None:
                return False
            if self._is_clean(leaf):
                self._first.evict_from(leaf, short)
            elif not waits:
                self._drop(leaf, short)
            elif not self._host.store(_path(leaf), again=True):
                if self._host.stores_full:
                    return False
                self._drop(leaf, short)
        return True

    def free_ahead(self) -> None:
        """Evicts pages, or plans their stores, until a share of the pool is free."""
        self.make_room(self._ahead_pages, waits=True)

    def _is_clean(self, leaf: Node) -> bool:
        """Returns whether the leaf's pages can be freed without a loss."""
        if self._first.needs_state and leaf.state is None:
            return True
        path = _path(leaf)
        return self._host.match(path, path.tokens).tokens == path.tokens

    def _drop(self, leaf: Node, pages: int) -> None:
        self._host.skip(min(pages, len(leaf.pages)))
        self._first.evict_from(leaf, pages)


def _path(leaf: Node) -> PrefixKey:
    return PrefixKey(leaf.path_bytes(), leaf.salt)
