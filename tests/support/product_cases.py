"""Inputs of the tests of matrix products."""

from __future__ import annotations

import torch


def numbers(*shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns normally distributed numbers of a type on a device, always the same for a shape."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
