"""Operations between the tiers of the prefix cache. The leader plans them; each rank copies its own heads and states.

An operation moves all parts of a cached prefix, or none: the pages of the KV pool (with the scales of quantized KV),
and the recurrent states of a hybrid model. SGLang's hierarchical cache controller has the same unit.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

PoolName = Literal["kv", "state"]
"""Pools that an operation reads or writes: pages of the `KVPool`, slots of the `MambaPool`."""


class PoolTransfer(msgspec.Struct, frozen=True, array_like=True):
    """The part of an operation that concerns one pool."""

    pool: PoolName
    device: list[int]
    """Pages of the KV pool, or slots of the state pool."""
    host: list[int]
    """Host memory block of each entry of `device`; each pool has its own host memory."""


class CacheOperation(msgspec.Struct, frozen=True, array_like=True):
    """A copy to host memory (`store`), or from host memory to the device."""

    number: int
    """Identifies the operation in the rank's report, `transport.control.messages.CacheMoved`."""
    store: bool
    transfers: list[PoolTransfer]


StorageOperationKind = Literal["find", "fetch", "write"]
"""Kinds of `StorageOperation`."""


class StorageReport(NamedTuple):
    """A rank's report of a `StorageOperation`."""

    operation: int
    """Number of the operation."""
    rank: int
    pages: int
    """Number of leading pages that the rank has found, fetched or stored so far."""
    done: bool
    """Whether this is the rank's last report of the operation."""
    error: str = ""
    """Error after which the operation's blocks cannot be used; only in the last report."""


class StorageOperation(msgspec.Struct, frozen=True, array_like=True):
    """Work with the third tier: consecutive pages of one prompt for `find` and `fetch`, any pages for `write`.

    find     counts how many of the leading pages are stored
    fetch    reads the leading pages into blocks of host memory, until a page is missing
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
    """Time after which a rank ends `find` or `fetch` with what has landed, from the order on."""


class CacheWork(NamedTuple):
    """The work of one plan between the tiers, in fields of `disagg.node.plan.StepPlan`."""

    cache_operations: list[CacheOperation]
    storage_operations: list[StorageOperation]
    unwanted_fetches: list[int]
    """Numbers of earlier fetches that end now."""


NO_CACHE_WORK = CacheWork([], [], [])
