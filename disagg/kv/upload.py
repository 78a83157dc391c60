"""Uploads lists of numbers from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Returns `values` as `dtype` `[len(values)]` on `device`, copied from pinned memory without synchronization."""
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host
    # torch keeps the pinned block until the copy is done
    return host.pin_memory().to(device, non_blocking=True)
