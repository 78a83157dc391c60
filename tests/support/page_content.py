"""Random content of pools, and random numbers of pages and blocks."""

from __future__ import annotations

import random

import torch


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes as a tensor."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def numbers_of(choose: random.Random, most: int, count: int) -> list[int]:
    """Different numbers in runs of random lengths."""
    numbers = list(range(most))
    cut = sorted(choose.sample(range(1, most), 4))
    parts = [numbers[start:end] for start, end in zip([0, *cut], [*cut, most], strict=True)]
    choose.shuffle(parts)
    return [number for part in parts for number in part][:count]
