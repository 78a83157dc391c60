"""The memory of one rank that transfers read and write: the KV pool, and the pool of recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from disagg.kv.mamba_pool import MambaPool
from disagg.kv.pool import KVPool
from kernels.copy.layer_pool import LayerPool, Pool


class CopyPools(Protocol):
    """Memory of one rank that senders and receivers gather from and scatter to."""

    @property
    def buffers(self) -> Sequence[Pool]:
        """A pool `[layers, planes, slots, heads, head_dim]` for each of `KVLayout.all_classes`."""

    @property
    def allocations(self) -> Sequence[Pool]:
        """The allocations that contain `buffers`: tensors that another process can map."""

    @property
    def device(self) -> torch.device:
        """Device of the memory."""


@dataclass(frozen=True, slots=True)
class BorrowedPools:
    """Pools of separate layers that another engine owns, for example vLLM."""

    buffers: tuple[LayerPool, ...]
    """A pool for each of `KVLayout.all_classes`; those of recurrent states hold bytes."""

    @property
    def allocations(self) -> tuple[LayerPool, ...]:
        """The same pools, which no other process can map."""
        return self.buffers

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.buffers[0].device


class TransferPools(NamedTuple):
    """The KV pool and the state pool of one rank, as buffers for the copy kernels."""

    kv: KVPool
    buffers: tuple[torch.Tensor, ...]
    """`[layers, planes, slots, heads, head_dim]` for each of `KVLayout.all_classes`.

    The slots of a recurrent state's buffers are rows of requests; the elements are bytes. There may be gaps between
    these slots."""
    state_buffers: tuple[torch.Tensor, ...] = ()
    """Contiguous memory of the recurrent states, `MambaPool.byte_views`; empty without recurrent layers."""

    @classmethod
    def of(cls, kv: KVPool, states: MambaPool | None) -> TransferPools:
        """Returns the pools of a rank; `states` is None for a model without recurrent layers."""
        own = tuple(part.buffer for part in kv.parts)
        if states is None:
            return cls(kv, own)
        return cls(kv, (*own, *states.class_views()), tuple(states.byte_views()))

    @property
    def kv_buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers of the KV pool."""
        return self.buffers[: len(self.kv.parts)]

    @property
    def allocations(self) -> tuple[torch.Tensor, ...]:
        """The buffers of the KV pool, and the memory of the recurrent states."""
        return (*self.kv_buffers, *self.state_buffers)

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.kv.device
