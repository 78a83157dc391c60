"""Block hashes of the prefixes that a group's storage probably has, for routers.

The storage evicts pages on its own, and other groups write to it. The hashes are therefore an estimate: the pages
that this group has written or fetched lately, without those that a later search did not find. A wrong estimate costs
time but never yields wrong KV.
"""

from __future__ import annotations

from itertools import islice

from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.kv.event_log import MAX_BLOCK_HASHES, KVEventLog


class StoredPrefixes:
    """The most recently used block hashes of stored prefixes, at most `most`. Not thread-safe.

    Hashes of shorter prefixes count as used later than hashes of longer ones, so the longest part of the oldest
    prefix is dropped first.
    """

    def __init__(self, unit_tokens: int, most: int = MAX_BLOCK_HASHES) -> None:
        """`unit_tokens`: tokens of a hashed block. `most`: largest number of hashes."""
        self.kv_events = KVEventLog(unit_tokens)
        """KV events for routers."""
        self._most = most
        self._used: dict[int, None] = {}
        """Hashes, least recently used first."""

    def add(self, prefix: PrefixKey) -> None:
        """Records that all pages of `prefix` are stored."""
        hashes = prefix.block_hashes(self.kv_events.unit_tokens)[: self._most]
        self.kv_events.add([one for one in hashes if one not in self._used])
        for one in reversed(hashes):
            self._used.pop(one, None)
            self._used[one] = None
        excess = len(self._used) - self._most
        if excess > 0:
            self._drop(list(islice(self._used, excess)))

    def forget(self, prefix: PrefixKey, stored_tokens: int) -> None:
        """Records that the storage has only the first `stored_tokens` tokens of `prefix`."""
        hashes = prefix.block_hashes(self.kv_events.unit_tokens, stored_tokens)
        self._drop([one for one in reversed(hashes) if one in self._used])

    def check(self) -> None:
        """Raises `InvariantError` unless hashes and events agree and the limit holds."""
        if self._used.keys() != self.kv_events.held or len(self._used) > self._most:
            raise InvariantError(
                f"stored prefixes: {len(self._used)} hashes, {len(self.kv_events.held)} held"
            )

    def _drop(self, hashes: list[int]) -> None:
        for one in hashes:
            del self._used[one]
        self.kv_events.remove(hashes)
