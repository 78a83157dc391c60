"""Protocols of objects that higher layers pass to lower layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from disagg.core.clock import Clock as Clock

if TYPE_CHECKING:
    import torch


class Collective(Protocol):
    """Collective operations of a tensor-parallel group. Only the compute thread of each rank calls them.

    Implementations: a single rank, threads of one process (tests), shared memory of one host, NCCL.
    """

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def recordable(self) -> bool:
        """Whether `all_reduce` only queues device work, and can therefore be captured in a CUDA graph."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the sum over all ranks, in place; every rank gets the same bits.

        With `model.deterministic` the bits of an element depend on its summands only, not on the tensor's size.
        """

    def barrier(self) -> None:
        """Blocks until every rank has called `barrier`."""

    def close(self) -> None:
        """Frees the collective. A rank that is blocked in a collective operation gets an error."""


LayerHook = Callable[[int], None]
"""Callback with a layer's index within the rank's shard. The compute thread calls it after it has written the layer's
K and V to the pool, and before attention reads them; on a GPU, between the launches of both on the compute stream."""
