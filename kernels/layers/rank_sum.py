"""The sum of several ranks' results, in rank order, in one launch.

The terms of an element are added one after the other. The bits of an element therefore depend neither on the number
of elements nor on the element's position in the tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend

_BLOCK = 1024
_WARPS = 4
_WIDE = (torch.float16, torch.bfloat16)
"""Types that are summed in float32 and rounded once."""


def rank_sum(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Computes `out[i] = parts[0, i] + parts[1, i] + ...`, from left to right.

    float16 and bfloat16 are summed in float32 and rounded once.

    `parts`: `[ranks, elements]` and `out`: `[elements]`, contiguous, of one type; integers wrap around. On CUDA: one
    launch on the current stream, no synchronization; may be captured into a graph after one run outside of it. Raises
    ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    _check(parts, out)
    if backend(parts.device) != "triton":
        _sum_torch(parts, out)
    elif out.numel():
        with on_device(parts):
            rank_sum_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
                parts,
                out,
                out.numel(),
                RANKS=parts.shape[0],
                WIDE=parts.dtype in _WIDE,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )


def rank_sum_reference(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Computes `rank_sum` in plain torch, on any device."""
    _check(parts, out)
    _sum_torch(parts, out)


def _sum_torch(parts: torch.Tensor, out: torch.Tensor) -> None:
    if len(parts) == 2:  # this addition of torch is in float32 too, without a temporary tensor
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0].float() if parts.dtype in _WIDE else out.copy_(parts[0])
    for part in parts[1:]:
        total += part.to(total.dtype)  # several times as fast as a sum of mixed types
    if total is not out:
        out.copy_(total)


def _check(parts: torch.Tensor, out: torch.Tensor) -> None:
    if parts.dim() != 2 or not len(parts) or not parts.is_contiguous():
        raise ValueError(f"parts must be contiguous [ranks, elements]; got {describe(parts)}")
    alike = out.shape == parts.shape[1:] and out.dtype == parts.dtype and out.device == parts.device
    if not alike or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {describe(parts[0])}, like a row of parts; got {describe(out)}"
        )


@triton.jit  # type: ignore[untyped-decorator]
def rank_sum_kernel(  # type: ignore[no-untyped-def]
    parts,
    out,
    elements,
    RANKS: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    # int64 before the product: a long prompt's rows have more than 2^31 elements.
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements  # vector accesses if Triton knows that 16 divides `elements`
    total = tl.load(parts + element, mask=mask, other=0)
    if WIDE:
        total = total.to(tl.float32)
    for _ in tl.static_range(1, RANKS):
        parts += elements
        total += tl.load(parts + element, mask=mask, other=0).to(total.dtype)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=mask)
