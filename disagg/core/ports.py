"""Protocols that let a layer use what a higher layer provides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from disagg.core.clock import Clock as Clock

if TYPE_CHECKING:
    import torch


class Collective(Protocol):
    """What the ranks of one tensor-parallel group do together. Called from each rank's compute thread only.

    Implementations: one rank alone, threads of one process (tests), shared memory of one host, NCCL.
    """

    @property
    def rank(self) -> int:
        """This rank, 0-based."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def recordable(self) -> bool:
        """Whether `all_reduce` may be recorded in a CUDA graph: it is queued on the device, and nothing more."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the sum over all ranks, in place; every rank gets the same bits.

        With `model.deterministic` an element's bits depend on its terms alone, not on the tensor's size.
        """

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def close(self) -> None:
        """Releases what the collective holds; a rank still waiting in it gets an error."""


LayerHook = Callable[[int], None]
"""Called on the compute thread with a layer's index *within the rank's shard* right after that layer's K and
V of the current step were written (on a GPU: queued on the compute stream) to the pool."""
