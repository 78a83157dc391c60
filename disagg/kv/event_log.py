"""Log of KV events: numbered additions and removals of block hashes in a prefix cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from disagg.core.prefixes import Digest, pack_block_hashes

MIN_UNIT_TOKENS = 64
"""Smallest size of a hashed block in tokens. Common prefixes shorter than this do not affect a router's choice of a
group."""
MAX_BLOCK_HASHES = 1 << 16
"""Largest number of block hashes of one cache, so that a full digest has at most 512 KiB."""


def unit_tokens_for(pages: int, page_size: int) -> int:
    """Returns the size of a hashed block in tokens, a multiple of `page_size`.

    The block is large enough that `pages` pages have at most `MAX_BLOCK_HASHES` block hashes.
    """
    unit_pages = max(1, MIN_UNIT_TOKENS // page_size)
    while pages // unit_pages > MAX_BLOCK_HASHES:
        unit_pages *= 2
    return unit_pages * page_size


def net_changes(newest_first: Iterable[int]) -> tuple[list[int], list[int]]:
    """Returns the added and the removed numbers: the latest change of each number counts.

    A change is a number that was added, or the complement `~number` of a removed one.
    """
    latest: dict[int, bool] = {}
    for change in newest_first:
        latest.setdefault(change if change >= 0 else ~change, change >= 0)
    added = [number for number, came in latest.items() if came]
    return added, [number for number, came in latest.items() if not came]


class KVEventLog:
    """Block hashes of the cached prefixes, with the latest changes in order. Not thread-safe."""

    def __init__(self, unit_tokens: int, kept: int = MAX_BLOCK_HASHES) -> None:
        """`kept`: number of stored changes. A digest that would need older changes has the full content."""
        self.unit_tokens = unit_tokens
        self.held: set[int] = set()
        self._changes: deque[int] = deque(maxlen=kept)  # added hash, or ~hash of a removed one
        self.version = 0
        """Number of changes so far."""

    def add(self, block_hashes: Iterable[int]) -> None:
        """Adds block hashes, shorter prefixes first."""
        for block_hash in block_hashes:
            self.held.add(block_hash)
            self._changes.append(block_hash)
            self.version += 1

    def remove(self, block_hashes: Iterable[int]) -> None:
        """Removes block hashes, longer prefixes first."""
        for block_hash in block_hashes:
            self.held.discard(block_hash)
            self._changes.append(~block_hash)
            self.version += 1

    def digest(self, since: int | None = None) -> Digest:
        """Returns the changes since version `since`; the full content for None.

        The digest also has the full content if `since` is too old, or if the changes outnumber the block hashes.
        """
        missed = None if since is None else self.version - since
        if missed is None or not 0 <= missed <= min(len(self._changes), len(self.held)):
            return Digest(None, self.version, self.unit_tokens, pack_block_hashes(list(self.held)), b"")
        added, removed = net_changes(islice(reversed(self._changes), missed))
        return Digest(
            since, self.version, self.unit_tokens, pack_block_hashes(added), pack_block_hashes(removed)
        )
