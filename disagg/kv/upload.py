"""Copies small tensors from the host to a device, by kernels that do not wait for the copy engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from disagg.kv.mapped_memory import as_words, chunk_for, copy_words


def whole_numbers(values: Sequence[int]) -> torch.Tensor:
    """Returns `values` as int64 `[len(values)]` on the CPU; for many values in a third of the time of
    `torch.tensor`."""
    return (
        torch.frombuffer(array("q", values), dtype=torch.int64)
        if values
        else torch.empty(0, dtype=torch.int64)
    )


def upload(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Returns `values` as `dtype` `[len(values)]` on `device`, copied without synchronization."""
    return upload_tensor(torch.tensor(values, dtype=dtype), device)


def upload_tensor(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of a contiguous CPU tensor on `device`, made on the current stream without synchronization."""
    if device.type != "cuda":
        return host.to(device)
    target = torch.empty(host.shape, dtype=host.dtype, device=device)
    upload_into(host, target)
    return target


def upload_into(host: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a contiguous CPU tensor to `target`, contiguous and of equal shape and dtype, on the current stream.

    Without synchronization.
    """
    if not target.is_cuda:
        target.copy_(host)
    elif (chunk := chunk_for(host, target.device)) is None:
        # torch keeps the pinned block until the copy is complete
        target.copy_(host.pin_memory(), non_blocking=True)
    else:
        try:
            chunk.host(host).copy_(host)
            copy_words(chunk.words(host), as_words(target))
            chunk.used(target.device)
        finally:
            chunk.put_back()
