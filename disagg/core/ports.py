"""Protocols of objects that a higher layer provides to a lower one."""

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
        """This rank, 0-based."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def recordable(self) -> bool:
        """Whether `all_reduce` can be captured in a CUDA graph, because the call only queues device work."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the sum over all ranks, in place; every rank gets the same bits.

        With `model.deterministic` the bits of an element depend on its summands only, not on the tensor's size.
        """

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def close(self) -> None:
        """Frees the collective; a rank blocked in a call gets an error."""


LayerHook = Callable[[int], None]
"""Callback on the compute thread with a layer's index within the rank's shard. The call follows the write of the
layer's K and V to the pool. On a GPU, the call follows the launch of the write on the compute stream."""
