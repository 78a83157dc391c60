"""Collectives of a tensor-parallel group with one rank, or with ranks that are threads of one process (for tests).

Collectives of ranks in separate processes are in `shared.py` and `nccl.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from disagg.core.errors import PeerLostError
from disagg.core.ports import Collective
from kernels.layers.rank_sum import rank_sum

T = TypeVar("T")


def lost_rank(rank: int, size: int, timeout_s: float) -> PeerLostError:
    """Returns the error that rank `rank` of `size` raises for another rank that is lost or late."""
    return PeerLostError(
        f"rank {rank} of {size}: a rank of the group is lost, or did not enter the operation within {timeout_s} s; "
        "start the group again"
    )


class SingleCollective:
    """The collective of a group of one rank. Every operation returns at once."""

    rank = 0
    size = 1
    recordable = True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leaves the tensor unchanged, because the sum over one rank is the tensor itself."""

    def barrier(self) -> None:
        """Returns at once."""

    def close(self) -> None:
        """Does nothing: a group of one rank has no connections."""


class ThreadCollective:
    """Collective of ranks that are threads of one process.

    `rank_sum` adds in rank order, so an element has the same bits on every rank and in a tensor of any size.

    Ranks on CUDA must share one device and one stream, because this class does not synchronize streams.
    """

    recordable = False

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = len(shared.parts)
        self._shared = shared

    @classmethod
    def group(cls, size: int, timeout_s: float = 60.0) -> list[ThreadCollective]:
        """Returns the members of a new group, one for each rank's thread; `timeout_s` limits each wait."""
        shared = _Shared(size, timeout_s)
        return [cls(rank, shared) for rank in range(size)]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums the tensor over the ranks, in place. Raises PeerLostError when a rank closed or timed out."""
        self._shared.parts[self.rank] = tensor
        self._wait(self._shared.summed)
        tensor.copy_(self._shared.total.view_as(tensor))

    def barrier(self) -> None:
        """Returns when every rank has entered. Raises PeerLostError when a rank closed or timed out."""
        self._wait(self._shared.barrier)

    def _wait(self, barrier: threading.Barrier) -> None:
        try:
            barrier.wait()
        except threading.BrokenBarrierError as exc:
            raise lost_rank(self.rank, self.size, self._shared.timeout_s) from exc

    def close(self) -> None:
        """Ends the whole group: ranks that wait in an operation or start one later raise PeerLostError."""
        self._shared.barrier.abort()
        self._shared.summed.abort()


def all_agree(collective: Collective, device: torch.device, mine: bool) -> bool:
    """Returns whether `mine` is True on every rank of the group. All ranks must call this together. Synchronizes."""
    refusals = torch.tensor([not mine], dtype=torch.int64, device=device)
    collective.all_reduce(refusals)
    return not refusals.item()


def least(collective: Collective, device: torch.device, mine: int) -> int:
    """Returns the minimum of `mine` over all ranks of the group. All ranks must call this together. Synchronizes."""
    each = torch.zeros(collective.size, dtype=torch.int64, device=device)
    each[collective.rank] = mine
    collective.all_reduce(each)
    return int(each.min())


def run_ranks(size: int, work: Callable[[ThreadCollective], T], timeout_s: float = 60.0) -> list[T]:
    """Runs `work` on every rank of a group of threads; raises the error of the rank that failed first."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(collective: ThreadCollective) -> None:
        try:
            results[collective.rank] = work(collective)
        except BaseException as exc:  # noqa: BLE001 - raised again below
            errors.append(exc)
            collective.close()

    group = ThreadCollective.group(size, timeout_s=timeout_s)
    threads = [threading.Thread(target=run, args=(one,)) for one in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class _Shared:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.parts = [torch.empty(0)] * size
        self.timeout_s = timeout_s
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.summed = threading.Barrier(size, self._sum, timeout_s)
        """Barrier of `all_reduce`: one thread adds the parts before any rank leaves the barrier."""
        self.total = torch.empty(0)
        """Sum of the latest `all_reduce`. Every rank reads it before it enters the next one."""

    def _sum(self) -> None:
        parts = torch.stack([part.reshape(-1) for part in self.parts])
        total = torch.empty_like(parts[0])
        rank_sum(parts, total)
        self.total = total
