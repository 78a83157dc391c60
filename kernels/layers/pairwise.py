"""Sums by repeated halving in plain torch, for devices that do not run the Triton kernels.

Each step adds the elements `2^i .. 2^(i+1)` to the elements `0 .. 2^i`, from the largest power of two down to 1. The
bits depend only on the summed elements, not on other rows or on zeros after the last element. Rows of different
lengths may therefore share a padded tensor.
"""

from __future__ import annotations

import torch

MOST_TERMS = 1 << 20
"""Largest number of products in memory at a time: 4 MiB in float32, which fit into CPU caches."""


def pairwise_sum(x: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the first dimension of `x`, float32 `[n, ...]`, as `[...]`."""
    n = x.shape[0]
    if n == 0:
        return x.new_zeros(x.shape[1:])
    half = 1 << max(0, (n - 1).bit_length() - 1)
    if n not in (1, 2 * half):  # only the first step can have halves of different length
        x = torch.cat([x[: n - half] + x[half:], x[n - half : half]])
        half //= 2
    while len(x) > 1:
        x = x[:half] + x[half:]
        half //= 2
    return x[0]


def pairwise_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns `left @ right` for each matrix of a batch, `[batch, m, n]` of left's type, rounded once.

    - left: float32, bfloat16 or float16 `[batch, m, k]`, any strides.
    - right: `[batch, k, n]` of the same type, any strides.
    """
    batch, m, k = left.shape
    if batch * m * k * right.shape[2] > MOST_TERMS and batch * m > 1:
        if batch > 1:
            half = batch // 2
            parts = [(left[:half], right[:half]), (left[half:], right[half:])]
        else:
            parts = [(left[:, : m // 2], right), (left[:, m // 2 :], right)]
        return torch.cat([pairwise_product(*part) for part in parts], dim=0 if batch > 1 else 1)
    terms = left.float().permute(2, 0, 1)[..., None] * right.float().permute(1, 0, 2)[:, :, None, :]
    return pairwise_sum(terms).to(left.dtype)
