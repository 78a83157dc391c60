"""Operations between the tiers of the prefix cache. The leader plans them; each rank copies its own heads and states.

An operation moves all parts of a cached prefix, or none: the pages of the KV pool (with the scales of quantized KV),
and the recurrent states of a hybrid model. SGLang's hierarchical cache controller has the same unit.
"""

from __future__ import annotations

from typing import Literal

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
