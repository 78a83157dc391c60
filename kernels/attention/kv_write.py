"""Writes K and V of a step's tokens to their slots in one layer's pool, in one launch. For a quantized pool the
launch also quantizes K and V.

Each head of a token has a separate scale. The scale is the head's largest magnitude divided by the largest quantized
value, rounded up to bfloat16. An element's quantized value is the element divided by the scale. Both int8 and fp8
round to the nearest value, ties to even.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import QUANTIZED, LayerKV, describe, quantized_limit
from kernels.dispatch import backend
from kernels.overlap import overlap, wait_for_previous

SMALLEST = 1e-30
"""Lower bound of a head's magnitude when its scale is computed, so that no scale is zero."""
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a small float32 to an integer
_TILE_ELEMENTS = 2048


def kv_write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, kv: LayerKV) -> None:
    """Writes `k` and `v` to `slots` of `kv`.

    - k, v: float `[tokens, kv_heads, up to kv's head_dim]` of one type, heads contiguous, other strides free. The
      rest of a slot's head is filled with zeros.
    - slots: int32 or int64 `[tokens]`, distinct, each within the pool (not checked).

    Values must be finite. A float type wider than the pool's is rounded; the module's docstring describes
    quantization. On CUDA: one launch on the current stream, no synchronization. Raises ValueError (arguments) and
    ConfigError (`DISAGG_KERNELS`).
    """
    _check(k, v, slots, kv)
    if slots.shape[0] == 0:
        return
    if backend(k.device) != "triton":
        kv_write_reference(k, v, slots, kv)
        return
    tokens, heads, head_dim = slots.shape[0], kv.k.shape[1], kv.k.shape[2]
    block = 1 << (head_dim - 1).bit_length()
    block_rows = max(1, _TILE_ELEMENTS // block)
    with on_device(k):
        write_kernel[(-(-tokens * heads // block_rows), 2)](
            k,
            v,
            slots,
            kv.k,
            kv.v,
            kv.k_scales,
            kv.v_scales,
            tokens,
            *k.stride()[:2],
            *v.stride()[:2],
            HEADS=heads,
            K_DIM=k.shape[2],
            V_DIM=v.shape[2],
            HEAD_DIM=head_dim,
            **kv.strides(),
            LIMIT=quantized_limit(kv.dtype) if kv.dtype in QUANTIZED else 0.0,
            SMALLEST=SMALLEST,
            FP8=kv.fp8,
            BLOCK_ROWS=block_rows,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,  # quantized values equal the reference's, bit for bit
            **overlap(k.device),
        )


def kv_write_reference(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, kv: LayerKV) -> None:
    """Computes `kv_write` in plain torch, on any device."""
    _check(k, v, slots, kv)
    for source, target, scales in ((k, kv.k, kv.k_scales), (v, kv.v, kv.v_scales)):
        if source.shape[2] < target.shape[2]:
            source = torch.nn.functional.pad(source, (0, target.shape[2] - source.shape[2]))
        if scales is None:
            target.index_copy_(0, slots.long(), source.to(target.dtype))
        else:
            quantized, scale = quantize(source, kv.dtype)
            target.index_copy_(0, slots.long(), quantized)
            scales.index_copy_(0, slots.long(), scale)


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `x`, float `[..., head_dim]`, in plain torch. Returns the values (int8, or fp8 as uint8) in the shape
    of `x`, and the scales, bfloat16 `[...]`."""
    x, limit = x.float(), quantized_limit(dtype)
    # Divide by a tensor. On CUDA, torch would replace division by a Python number by multiplication with its rounded
    # inverse.
    scale = x.abs().amax(-1).clamp(min=SMALLEST) / torch.full((), limit, device=x.device)
    # Round up to bfloat16: add the largest value of the missing digits.
    scale = ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    ratio = (x / scale[..., None]).clamp(-limit, limit)
    if dtype == torch.int8:
        return ratio.round().to(torch.int8), scale.bfloat16()
    return ratio.to(dtype).view(torch.uint8), scale.bfloat16()


def dequantize(quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the float32 values that `quantized` and `scale` represent; `dtype` as in `quantize`."""
    whole = quantized if dtype == torch.int8 else quantized.view(dtype)
    return whole.float() * scale.float()[..., None]


def _check(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, kv: LayerKV) -> None:
    kv.check()
    tokens, (_, heads, head_dim) = slots.shape[0], kv.k.shape
    for name, x in (("k", k), ("v", v)):
        fits = x.dim() == 3 and tuple(x.shape[:2]) == (tokens, heads) and x.shape[2] <= head_dim
        if not fits or x.stride(2) != 1 or not x.is_floating_point() or x.dtype != k.dtype:
            raise ValueError(
                f"{name} must be {k.dtype} [{tokens}, {heads}, at most {head_dim}], heads contiguous; "
                f"got {describe(x)}"
            )
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 or int64 [tokens]; got {describe(slots)}")


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"]
)
def write_kernel(  # type: ignore[no-untyped-def]
    # tensors
    k,
    v,
    slots,
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    # sizes
    tokens,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    # meta
    HEADS: tl.constexpr,  # noqa: N803
    K_DIM: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    SLOT_STRIDE: tl.constexpr,  # noqa: N803
    HEAD_STRIDE: tl.constexpr,  # noqa: N803
    SCALE_SLOT_STRIDE: tl.constexpr,  # noqa: N803
    SCALE_HEAD_STRIDE: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = row // HEADS, row % HEADS
    inside = token < tokens
    # int64 before any product: a pool is far larger than 2^31 elements.
    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    place = slot * SLOT_STRIDE + head * HEAD_STRIDE
    scale_place = slot * SCALE_SLOT_STRIDE + head * SCALE_HEAD_STRIDE
    token = token.to(tl.int64)
    if tl.program_id(1) == 0:
        source = token * k_stride + head * k_head_stride
        write_rows(
            k,
            source,
            k_pool,
            place,
            k_scales,
            scale_place,
            inside,
            K_DIM,
            HEAD_DIM,
            LIMIT,
            SMALLEST,
            FP8,
            BLOCK,
        )
    else:
        source = token * v_stride + head * v_head_stride
        write_rows(
            v,
            source,
            v_pool,
            place,
            v_scales,
            scale_place,
            inside,
            V_DIM,
            HEAD_DIM,
            LIMIT,
            SMALLEST,
            FP8,
            BLOCK,
        )


@triton.jit  # type: ignore[untyped-decorator]
def quantize_rows(  # type: ignore[no-untyped-def]
    values,
    LIMIT: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
):
    """Quantizes rows. Returns the values `[rows, elements]`, as integers or as FP8 bits, and the scales, bfloat16
    `[rows]`."""
    found = values.to(tl.float32)
    # Exact division: a faster one could round a tie differently from the reference.
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(found), 1), SMALLEST), LIMIT)
    # Round up to bfloat16: add the largest value of the missing digits.
    scale = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    found = tl.div_rn(found, tl.broadcast_to(scale[:, None], found.shape))
    found = tl.minimum(tl.maximum(found, -LIMIT), LIMIT)
    found = (found + _ROUND) - _ROUND if FP8 is None else found.to(FP8).to(tl.uint8, bitcast=True)
    return found, scale.to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def write_rows(  # type: ignore[no-untyped-def]
    source,
    source_row,
    pool,
    pool_row,
    scales,
    scale_place,
    inside,
    DIM: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    element = tl.arange(0, BLOCK)
    mask = inside[:, None] & (element < DIM)[None, :]
    found = tl.load(source + source_row[:, None] + element[None, :], mask=mask, other=0.0)
    if scales is not None:
        found, scale = quantize_rows(found, LIMIT, SMALLEST, FP8)
        tl.store(scales + scale_place, scale, mask=inside)
    mask = inside[:, None] & (element < HEAD_DIM)[None, :]
    tl.store(pool + pool_row[:, None] + element[None, :], found.to(pool.dtype.element_ty), mask=mask)
