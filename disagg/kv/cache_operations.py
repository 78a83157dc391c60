"""Operations that copy cached KV and states between the tiers of the prefix cache.

The leader plans the operations; each rank copies its own heads and states. An operation copies all parts of a cached
prefix, or none: the pages of the KV pool (with the scales of quantized KV), and the recurrent states of a hybrid
model. SGLang's hierarchical cache controller copies in the same units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

PoolName = Literal["kv", "state"]
"""Pools that an operation reads or writes: pages of the `KVPool`, slots of the `MambaPool`."""


class PoolTransfer(msgspec.Struct, frozen=True, array_like=True):
    """The part of a `CacheOperation` that concerns one pool."""

    pool: PoolName
    device: list[int]
    """Pages of the KV pool, or slots of the state pool, on the device."""
    host: list[int]
    """Host memory block of each entry of `device`; each pool has its own host memory."""


class CacheOperation(msgspec.Struct, frozen=True, array_like=True):
    """A copy of cached KV and states: to host memory if `store` is set, otherwise from host memory to the device."""

    number: int
    """Identifies the operation in the rank's report, `transport.control.messages.CacheMoved`."""
    store: bool
    transfers: list[PoolTransfer]


StorageOperationKind = Literal["find", "fetch", "write"]
"""Kinds of `StorageOperation`."""


class StorageReport(NamedTuple):
    """A rank's report of a `StorageOperation`."""

    operation: int
    """Number of the `StorageOperation`."""
    rank: int
    items: int
    """Number of leading items that the rank has found, fetched or stored so far: pages, then recurrent states."""
    done: bool
    """Whether this is the rank's last report of the operation."""
    error: str = ""
    """Error that makes the operation's blocks unusable; empty without an error. Only the last report has an error."""
    seconds: float = 0.0
    """For a fetch: time that the rank has spent on its reads so far."""
    states: Sequence[int] = ()
    """For a find: the indices in `[*state_links, *links]` of the pages behind which a whole state is stored, as far
    as the pages before it are stored."""


class StorageOperation(msgspec.Struct, frozen=True, array_like=True):
    """A search, read or write in the third tier of the prefix cache.

    `find` and `fetch` concern consecutive pages of one prompt, `write` any pages. For a hybrid model, an operation
    also has recurrent states, each behind the page of its link. Its items are the pages, then the states.

    find     counts how many of the leading pages are stored, and finds the states behind them
    fetch    reads the leading items into blocks of host memory, until an item is missing
    write    stores blocks of host memory
    """

    number: int
    """Identifies the operation in the rank's reports, `transport.control.messages.StorageMoved`."""
    kind: StorageOperationKind
    links: list[bytes]
    """Link of each page (`disagg.storage.keys`), from which each rank computes the keys of its own parts."""
    blocks: list[int]
    """Host memory block of each page; empty for `find`."""
    limit_s: float
    """Time limit of `find` and `fetch`, from the start on the rank. At the limit, the rank ends the operation and
    reports the items that have landed."""
    state_links: list[bytes] = []
    """Links of states. For `find`: links before `links` of pages that memory has, whose states are searched too."""
    state_blocks: list[int] = []
    """Host memory block of each state; empty for `find`."""


class CacheWork(NamedTuple):
    """Work between the cache tiers that one plan orders. Its fields are also fields of `StepPlan`."""

    cache_operations: list[CacheOperation]
    storage_operations: list[StorageOperation]
    unwanted_fetches: list[int]
    """Numbers of earlier fetches that the ranks must end now."""


NO_CACHE_WORK = CacheWork([], [], [])
