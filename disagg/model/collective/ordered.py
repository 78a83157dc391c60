"""An all-reduce over `torch.distributed` whose sums have one order, for `model.deterministic`.

The libraries' own all-reduces choose their algorithm by the tensor's size and cut it into pieces whose sums begin at
different ranks: an element's bits depend on where it lies, and so on what else is in the batch. Here each element's
terms are added from rank 0 on, whatever the size and whichever of two ways they travel.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.layers.rank_sum import rank_sum

GATHER_BYTES = 512 << 10
"""Tensors of up to this size go to all ranks whole, in one exchange; larger ones in two, with less to send."""


def all_reduce_in_order(group: Any, tensor: torch.Tensor, size: int) -> None:
    """In-place sum over the `size` ranks of `group`, a backend of `torch.distributed`; see `rank_sum`.

    `tensor` is contiguous. Queued as `allreduce` is: with NCCL on the current stream, and it may be recorded. Raises
    what the backend raises.
    """
    assert tensor.is_contiguous(), "what ranks compute for a sum is contiguous"
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
    """uint8 `[bytes]`: what is only moved has a type that every backend moves."""
    return tensor.view(-1).view(torch.uint8)
