"""Sums over the last dimension, in which the bits of a row's sum do not depend on the other rows.

A program sums one row, in blocks whose size depends only on the row's length. In contrast, a library's reduction
divides a row among a number of threads that depends on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.pairwise import pairwise_sum
from kernels.layers.rms_norm import DTYPES

_MAX_BLOCK = 4096
_WARP_ELEMENTS = 256


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the last dimension of `x` (float32, bfloat16 or float16 `[..., n]`), float32 `[...]`.

    On CUDA: one launch on the current stream, no synchronization. Without Triton, `kernels.layers.pairwise` sums.
    Raises ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    if x.dim() < 1 or x.dtype not in DTYPES:
        raise ValueError(f"x must be float32, bfloat16 or float16 [..., n]; got {describe(x)}")
    if backend(x.device) != "triton":
        return row_sum_reference(x)
    x = x.contiguous()
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    n = x.shape[-1]
    if n == 0:
        return out.zero_()
    if out.numel():
        block = min(triton.next_power_of_2(n), _MAX_BLOCK)
        with on_device(x):
            _sum_kernel[(out.numel(),)](
                x,
                out,
                n,
                BLOCK=block,
                num_warps=max(1, min(16, block // _WARP_ELEMENTS)),
                enable_fp_fusion=False,
            )
    return out


def row_sum_reference(x: torch.Tensor) -> torch.Tensor:
    """Computes `row_sum` in plain torch, on any device. Zeros appended to a row do not change the result."""
    return pairwise_sum(x.float().movedim(-1, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        sums += tl.load(x + row * n + first + element, mask=first + element < n, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(sums, 0))
