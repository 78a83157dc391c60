"""Copies small tensors from the host to a device, by kernels that do not wait for the copy engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disagg.kv.mapped_memory import as_words, copy_words, fits, mapped_memory


def upload(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Returns `values` as `dtype` `[len(values)]` on `device`, copied without synchronization."""
    return upload_tensor(torch.tensor(values, dtype=dtype), device)


def upload_tensor(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of a contiguous CPU tensor on `device`, made on the current stream without synchronization."""
    if device.type != "cuda":
        return host.to(device)
    if not fits(host):
        # torch keeps the pinned block until the copy is complete
        return host.pin_memory().to(device, non_blocking=True)
    target = torch.empty(host.shape, dtype=host.dtype, device=device)
    upload_into(host, target)
    return target


def upload_into(host: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a contiguous CPU tensor to `target`, of equal shape, on the current stream without synchronization."""
    if not target.is_cuda:
        target.copy_(host)
    elif host.dtype != target.dtype or not target.is_contiguous() or not fits(host):
        target.copy_(host.pin_memory(), non_blocking=True)
    else:
        memory = mapped_memory(target.device)
        chunk = memory.take()
        chunk.host(host).copy_(host)
        copy_words(chunk.words(host), as_words(target))
        chunk.used(target.device)
        memory.put(chunk)
