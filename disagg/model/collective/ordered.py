"""An all-reduce over `torch.distributed` with one summation order, for `model.deterministic`.

The backends' own all-reduces choose an algorithm by the tensor's size, and begin the sum of each piece at a different
rank. An element's bits then depend on its position in the tensor, and so on the rest of the batch. In this module,
each element is summed in the order of ranks, from rank 0 on, for every size and in both algorithms.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.layers.rank_sum import rank_sum

GATHER_BYTES = 512 << 10
"""Size of the largest tensor that uses one all-gather. Larger tensors use an all-to-all and an all-gather, which send
fewer bytes."""


def all_reduce_in_order(group: Any, tensor: torch.Tensor, size: int) -> None:
    """Sums a contiguous `tensor` in place over the `size` ranks of `group`, a backend of `torch.distributed`.

    `rank_sum` defines the order. With NCCL, the operations are queued on the current stream, and CUDA graphs can
    record them, as with `allreduce`. Raises the backend's errors.
    """
    assert tensor.is_contiguous(), "partial results of a rank are contiguous"
    flat = tensor.view(-1)
    if not flat.numel():
        return
    if tensor.nbytes <= GATHER_BYTES:
        parts = flat.new_empty(size, flat.numel())
        _gather(group, parts, flat)
        rank_sum(parts, flat)
        return
    each = -(-flat.numel() // size)
    whole = (
        flat if each * size == flat.numel() else torch.nn.functional.pad(flat, (0, each * size - len(flat)))
    )
    parts = flat.new_empty(size, each)
    group.alltoall_base(_bytes(parts), _bytes(whole), [], []).wait()
    mine = flat.new_empty(each)
    rank_sum(parts, mine)
    _gather(group, whole, mine)
    if whole is not flat:
        flat.copy_(whole[: len(flat)])


def _gather(group: Any, out: torch.Tensor, part: torch.Tensor) -> None:
    group._allgather_base(_bytes(out), _bytes(part)).wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's memory as uint8 `[bytes]`, a type that every backend can send."""
    return tensor.view(-1).view(torch.uint8)
