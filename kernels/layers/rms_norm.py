"""RMSNorm in one launch instead of torch's seven, for rows of a hidden state or for heads of a projection.

The mean of squares is computed in float32. Models differ in the order of rounding; see `NORM_WEIGHTS`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.overlap import overlap, wait_for_previous

NormWeight = Literal["rounded_first", "in_float32", "one_plus"]
NORM_WEIGHTS: tuple[NormWeight, ...] = get_args(NormWeight)
"""Ways to apply the weight: to the normed row after rounding (Llama); to the float32 row before rounding (Olmo 2,
gpt-oss); as 1 + weight, to the float32 row before rounding (Gemma)."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_BLOCK = 16384
"""Longest row held in registers; a longer row is read twice."""
_TILE_ELEMENTS = 1024
_WARP_ELEMENTS = 512


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, how: NormWeight) -> torch.Tensor:
    """Returns `x / sqrt(mean(x^2) + eps)` over the last dimension, weighted according to `how`.

    The result is a new tensor with the layout of `x`.

    - x: float32, bfloat16 or float16 `[..., dim]`, any strides. `x` is copied first if the positions of its rows need
      more than two strides (a transposed projection needs two).
    - weight: `[dim]` of the same type, contiguous.

    On CUDA: one launch on the current stream, no synchronization. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    _check(x, weight, how)
    if backend(x.device) != "triton":
        return rms_norm_reference(x, weight, eps, how)
    out = torch.empty_like(x)
    layout = _row_layout(x, out)
    if layout is None:
        x = x.contiguous()
        out = torch.empty_like(x)
        layout = ((x.numel() // x.shape[-1], x.shape[-1], x.shape[-1]), (1, 0, 0))
    if x.numel() == 0:
        return out
    with on_device(x):
        _launch(x, None, weight, None, out, layout, eps, how)
    return out


def add_rms_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    how: NormWeight,
    *,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x + y * factor` and the sum's `rms_norm`, with the same bits as separate operations.

    x and y must have the same shape and type. On CUDA: one launch for contiguous rows of up to `MAX_BLOCK` elements
    (the usual case), otherwise several. Raises ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    dim = x.shape[-1]
    alike = x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous() and y.is_contiguous()
    if not alike or dim > MAX_BLOCK or x.numel() == 0 or backend(x.device) != "triton":
        total = x + (y if factor == 1.0 else y * factor)
        return total, rms_norm(total, weight, eps, how)
    _check(x, weight, how)
    total, out = torch.empty_like(x), torch.empty_like(x)
    rows = ((x.numel() // dim, dim, dim), (1, 0, 0))
    with on_device(x):
        _launch(x, y, weight, total, out, rows, eps, how, factor)
    return total, out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, how: NormWeight) -> torch.Tensor:
    """Computes `rms_norm` in plain torch, on any device, with the operations of transformers' models."""
    _check(x, weight, how)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if how == "rounded_first":
        return weight * normed.to(x.dtype)
    factor = weight.float() if how == "in_float32" else 1.0 + weight.float()
    return (normed * factor).to(x.dtype)


def _launch(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor,
    layout: tuple[tuple[int, int, int], tuple[int, int, int]],
    eps: float,
    how: NormWeight,
    factor: float = 1.0,
) -> None:
    """Launches the kernel. `layout`: see `_row_layout`; `y` and `total` have the layout of `x`."""
    (outer, x_outer, out_outer), (inner, x_inner, out_inner) = layout
    dim = x.shape[-1]
    block = min(triton.next_power_of_2(dim), MAX_BLOCK)
    block_rows = max(1, _TILE_ELEMENTS // block)
    norm_kernel[(triton.cdiv(outer * inner, block_rows),)](
        x,
        y,
        weight,
        total,
        out,
        outer * inner,
        inner,
        x_outer,
        x_inner,
        out_outer,
        out_inner,
        eps,
        factor,
        DIM=dim,
        ROUNDED_FIRST=how == "rounded_first",
        ONE_PLUS=how == "one_plus",
        SCALED=factor != 1.0,
        BLOCK_ROWS=block_rows,
        BLOCK=block,
        num_warps=min(16, max(1, block * block_rows // _WARP_ELEMENTS)),
        enable_fp_fusion=False,  # the same rounding as torch
        **overlap(x.device),
    )


def _check(x: torch.Tensor, weight: torch.Tensor, how: str) -> None:
    if how not in NORM_WEIGHTS:
        raise ValueError(f"how must be one of {', '.join(NORM_WEIGHTS)}; got {how!r}")
    if x.dim() < 1 or x.dtype not in DTYPES or x.shape[-1] < 1:
        raise ValueError(f"x must be float32, bfloat16 or float16 [..., dim]; got {describe(x)}")
    fits = weight.shape == x.shape[-1:] and weight.dtype == x.dtype and weight.device == x.device
    if not fits or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous {x.dtype} [{x.shape[-1]}] on {x.device}; got {describe(weight)} "
            f"on {weight.device}"
        )


def _row_layout(
    x: torch.Tensor, out: torch.Tensor
) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
    """Returns size, stride in `x` and stride in `out` of two dimensions that span all rows; None if two do not
    suffice."""
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        return None
    found: list[tuple[int, int, int]] = []
    for size, stride, out_stride in zip(x.shape[:-1], x.stride()[:-1], out.stride()[:-1], strict=True):
        if size == 1:
            continue
        if found and found[-1][1:] == (size * stride, size * out_stride):
            found[-1] = (found[-1][0] * size, stride, out_stride)
        else:
            found.append((size, stride, out_stride))
    if len(found) > 2:
        return None
    whole = (*found, *[(1, 0, 0)] * (2 - len(found)))
    return whole[0], whole[1]


@triton.jit(do_not_specialize=["rows", "inner"])  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,
    y,  # added to x, or None
    weight,
    total,  # receives the sum
    out,
    # sizes
    rows,
    inner,
    x_outer_stride,
    x_inner_stride,
    out_outer_stride,
    out_inner_stride,
    eps,
    y_factor,
    # meta
    DIM: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    ROUNDED_FIRST: tl.constexpr,  # noqa: N803
    ONE_PLUS: tl.constexpr,  # noqa: N803
    SCALED: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = (row < rows)[:, None]
    # int64 before any product: a long prompt's hidden states have more than 2^31 elements.
    outer, rest = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    source = x + (outer * x_outer_stride + rest * x_inner_stride)[:, None]
    target = out + (outer * out_outer_stride + rest * out_inner_stride)[:, None]
    element = tl.arange(0, BLOCK)[None, :]
    if DIM <= BLOCK:
        mask = inside & (element < DIM)
        found = tl.load(source + element, mask=mask, other=0.0).to(tl.float32)
        if y is not None:
            place = (outer * x_outer_stride + rest * x_inner_stride)[:, None] + element
            more = tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
            if SCALED:
                more = (more * y_factor).to(x.dtype.element_ty).to(tl.float32)
            rounded = (found + more).to(x.dtype.element_ty)
            tl.store(total + place, rounded, mask=mask)
            found = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(found * found, 1) / DIM + eps)
        factor = tl.load(weight + element, mask=element < DIM, other=0.0)
        normed = _weighted(found, scale, factor, ROUNDED_FIRST, ONE_PLUS)
        tl.store(target + element, normed.to(out.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([BLOCK_ROWS], tl.float32)
        for first in range(0, DIM, BLOCK):
            mask = inside & (first + element < DIM)
            found = tl.load(source + first + element, mask=mask, other=0.0).to(tl.float32)
            squares += tl.sum(found * found, 1)
        scale = tl.rsqrt(squares / DIM + eps)
        for first in range(0, DIM, BLOCK):
            mask = inside & (first + element < DIM)
            found = tl.load(source + first + element, mask=mask, other=0.0).to(tl.float32)
            factor = tl.load(weight + first + element, mask=first + element < DIM, other=0.0)
            normed = _weighted(found, scale, factor, ROUNDED_FIRST, ONE_PLUS)
            tl.store(target + first + element, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _weighted(  # type: ignore[no-untyped-def]
    found,  # float32 [rows, elements]
    scale,  # float32 [rows]
    factor,  # [1, elements]
    ROUNDED_FIRST: tl.constexpr,  # noqa: N803
    ONE_PLUS: tl.constexpr,  # noqa: N803
):
    normed = found * scale[:, None]
    if ROUNDED_FIRST:
        normed = normed.to(factor.dtype).to(tl.float32)
    factor = factor.to(tl.float32)
    if ONE_PLUS:
        factor = 1.0 + factor
    return normed * factor
