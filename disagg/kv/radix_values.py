"""Types that the prefix cache returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from disagg.kv.radix_node import Node


class Match(NamedTuple):
    """The longest cached prefix of a prompt. The cache owns the pages; see `RadixCache`."""

    node: Node
    """Last node of the prefix, for `lock` and `unlock`."""
    pages: list[int]
    tokens: int
    """Number of tokens in `pages`; all pages are full."""
    queried_tokens: int
    """Number of tokens of the prompt."""
    state: int | None = None
    """Slot of the state after `tokens` tokens; None for an empty match and for a match by KV alone."""


@dataclass(frozen=True, slots=True)
class RadixStatistics:
    """Current content of the cache, and counts since its construction."""

    cached_pages: int
    locked_pages: int
    """Cached pages that cannot be evicted now."""
    nodes: int
    """Number of nodes, not counting roots."""
    salts: int
    """Number of salts that have cached pages or locks."""
    hits: int
    """Number of requests passed to `count` that hit at least one page."""
    misses: int
    hit_tokens: int
    queried_tokens: int
    """Prompt tokens of all requests passed to `count`, hits and misses."""
    evicted_pages: int
    cached_states: int
    """Number of nodes that have a state."""
    locked_states: int
    """Cached states that cannot be evicted now."""
    held_states: int
    """Allocated state slots that are attached to no node: their callers own them."""
    free_states: int
    """Free state slots."""
    evicted_states: int
    """States removed to free their slots, or with their pages."""
