"""Copy from a float pool to staging, or directly to a quantized pool, with quantization on the way.

The result has the same bits as the result of `kernels.attention.kv_write`: quantized K, quantized V, and their scales
(`disagg.kv.pool`). Only about half of the bytes cross the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from disagg.core.types import SCALE_BYTES, Span, quantized_row_bytes
from kernels.attention.common import on_device
from kernels.attention.kv_write import SMALLEST, quantize, quantize_rows
from kernels.attention.layer_kv import FP8, QUANTIZED, describe, quantized_limit
from kernels.copy.checksum import NO_SIZES, Check, add_part, row_keys, unit_keys
from kernels.copy.move import check_fence
from kernels.copy.rows import PoolSlice, check_slots, rows_of
from kernels.dispatch import INTERPRETED, backend

_TILE_ELEMENTS = 2048
_COMPILED = tl.constexpr(not INTERPRETED)


def gather_quantized(
    pool: torch.Tensor,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    dtype: torch.dtype,
    out: torch.Tensor,
    check: Check | None = None,
) -> None:
    """Writes the segment (`layers`, `slots`, `heads`) of a float pool to `out`, quantized to `dtype`.

    - pool: float `[layers, 2, slots, heads, head_dim]`, contiguous; head_dim a multiple of 2.
    - slots: int32 or int64 `[tokens]` on the pool's device, each within the pool (not checked).
    - layers, heads: indices local to the pool.
    - dtype: int8, float8_e4m3fn or float8_e5m2.
    - out: uint8 on the pool's device, exactly the bytes of `[layer, token, head, 2 * (head_dim + 2)]`.
    - check: if given, the checksum of the bytes written is computed too (`kernels.copy.checksum`). Without any bytes,
      `check.total` stays unchanged.

    On CUDA: one launch on the current stream, two with `check`, no synchronization. The caller keeps all tensors
    alive and unchanged until an event recorded after this call has completed. Raises ValueError (arguments),
    ConfigError (`DISAGG_KERNELS`).
    """
    source = PoolSlice(pool, slots, layers, heads)
    target = _staged(source, dtype, out)
    if target is None:
        return
    if backend(pool.device) == "triton":
        _launch(source, target, dtype, None, 0, check)
    else:
        _write_torch(source, target, dtype, check)


def gather_quantized_reference(
    pool: torch.Tensor,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    dtype: torch.dtype,
    out: torch.Tensor,
    check: Check | None = None,
) -> None:
    """Computes `gather_quantized` in plain torch, on any device."""
    source = PoolSlice(pool, slots, layers, heads)
    target = _staged(source, dtype, out)
    if target is not None:
        _write_torch(source, target, dtype, check)


def prepare_quantized_move(
    source: PoolSlice,
    target: PoolSlice,
    dtype: torch.dtype,
    fence: torch.Tensor,
    ticket: int,
    check: Check | None = None,
) -> Callable[[], None]:
    """Returns a function that writes the floats of `source` to `target`, quantized to `dtype`.

    Fence and checksum are as in `kernels.copy.move.move`. The target's pool: uint8 `[layers, 1, slots, heads, 2 *
    (head_dim + 2)]`, contiguous. Raises as `move` does.
    """
    _check_source(source, dtype)
    check_fence(fence, source.tensor.device)
    rows_of(target.tensor, target.layers, target.heads)
    check_slots(target.slots, target.tensor)
    wanted = (*_sizes(source), 1, quantized_row_bytes(source.tensor.shape[4]), torch.uint8)
    found = (*_sizes(target), target.tensor.shape[1], target.tensor.shape[4], target.tensor.dtype)
    if wanted != found:
        raise ValueError(
            f"(layers, heads, tokens, planes, bytes of a head, storage) of the target are {found}, not {wanted}"
        )
    if not (source.layers and source.heads and len(source.slots)):
        return lambda: None
    if backend(source.tensor.device) == "triton":
        return partial(_launch, source, target, dtype, fence, ticket, check)
    return partial(_fenced, source, target, dtype, fence, ticket, check)


def _sizes(place: PoolSlice) -> tuple[int, int, int]:
    return len(place.layers), len(place.heads), len(place.slots)


def _check_source(source: PoolSlice, dtype: torch.dtype) -> None:
    rows_of(source.tensor, source.layers, source.heads)
    check_slots(source.slots, source.tensor)
    floats = source.tensor.is_floating_point() and source.tensor.element_size() >= 2
    if not floats or source.tensor.shape[1] != 2:
        raise ValueError(
            "pool must be float32, bfloat16 or float16 [layers, 2, slots, heads, head_dim]; "
            f"got {describe(source.tensor)}"
        )
    if dtype not in QUANTIZED:
        raise ValueError(f"cannot quantize to {dtype}; choose one of {', '.join(map(str, QUANTIZED))}")
    if source.tensor.shape[4] % SCALE_BYTES:
        raise ValueError(f"heads must be a multiple of {SCALE_BYTES} elements; got {source.tensor.shape[4]}")


def _staged(source: PoolSlice, dtype: torch.dtype, out: torch.Tensor) -> PoolSlice | None:
    """Returns staging memory in the form of a pool with one slot per token; None if there is nothing to write."""
    _check_source(source, dtype)
    shape = (
        len(source.layers),
        1,
        len(source.slots),
        len(source.heads),
        quantized_row_bytes(source.tensor.shape[4]),
    )
    nbytes = math.prod(shape)
    if out.dtype != torch.uint8 or out.shape != (nbytes,) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous uint8 [{nbytes}], the segment's bytes; got {describe(out)}")
    if out.device != source.tensor.device:
        raise ValueError(f"out must be on the pool's device {source.tensor.device}; got {out.device}")
    if out.data_ptr() % SCALE_BYTES or out.storage_offset() % SCALE_BYTES:
        raise ValueError(f"out must begin at a multiple of {SCALE_BYTES} bytes: scales are written in it")
    if nbytes == 0:
        return None
    return PoolSlice(out.view(shape), source.slots, Span(0, shape[0]), Span(0, shape[3]))


def _launch(
    source: PoolSlice,
    target: PoolSlice,
    dtype: torch.dtype,
    fence: torch.Tensor | None,
    ticket: int,
    check: Check | None,
) -> None:
    """Launches the kernel. With a fence, the target is a pool and its slots are used. Without a fence, the target is
    staging memory with the tokens in order."""
    tokens, heads, head_dim = len(source.slots), len(source.heads), source.tensor.shape[4]
    block = 1 << (head_dim - 1).bit_length()
    block_rows = max(1, _TILE_ELEMENTS // block)
    values = source.tensor[source.layers.start :, :, :, source.heads.start :]
    quantized = target.tensor[target.layers.start :, :, :, target.heads.start :]
    with on_device(values):
        quantize_kernel[(-(-tokens * heads // block_rows), 2 * len(source.layers))](
            values,
            source.slots,
            quantized.view(torch.int8) if dtype == torch.int8 else quantized,
            quantized.view(torch.bfloat16),
            None if fence is None else target.slots,
            fence,
            None if check is None else check.summer.parts,
            tokens,
            source.tensor.shape[2],
            target.tensor.shape[2],
            ticket,
            *(NO_SIZES if check is None else check.sizes(1, target.head_bytes)),
            HEADS=heads,
            DIM=head_dim,
            SOURCE_TOKEN=values.stride(2),
            TARGET_TOKEN=quantized.stride(2),
            HEAD_BYTES=quantized.stride(3),
            SCALE_BYTES=SCALE_BYTES,
            LIMIT=quantized_limit(dtype),
            SMALLEST=SMALLEST,
            FP8=FP8.get(dtype),
            BLOCK_ROWS=block_rows,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,  # quantized values equal the reference's, bit for bit
        )
    if check is not None:
        check.finish()


def _fenced(
    source: PoolSlice,
    target: PoolSlice,
    dtype: torch.dtype,
    fence: torch.Tensor,
    ticket: int,
    check: Check | None,
) -> None:
    if int(fence[0]) == ticket:
        _write_torch(source, target, dtype, check, target.slots.long())


def _write_torch(
    source: PoolSlice,
    target: PoolSlice,
    dtype: torch.dtype,
    check: Check | None,
    slots: torch.Tensor | None = None,
) -> None:
    values, quantized = (
        place.tensor[place.layers.start : place.layers.stop, :, :, place.heads.start : place.heads.stop]
        for place in (source, target)
    )
    found, scales = quantize(values.index_select(2, source.slots), dtype)
    (k, v), (k_scales, v_scales) = (x.unbind(1) for x in (found.view(torch.uint8), scales))
    own = torch.stack([k_scales, v_scales], -1).view(torch.uint8)
    row = torch.cat([k, v, own], -1)[:, None]
    if slots is None:
        quantized.copy_(row)
    else:
        quantized.index_copy_(2, slots, row)
    if check is not None:
        check.sum_words(row.flatten(3), row.shape[-1])


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens",
        "source_pool_tokens",
        "target_pool_tokens",
        "ticket",
        "first_plane",
        "first_token",
        "first_unit",
    ],
    do_not_specialize_on_alignment=["source_slots", "target_slots", "fence"],
)
def quantize_kernel(  # type: ignore[no-untyped-def]
    # tensors
    source,
    source_slots,
    quantized,
    scales,
    target_slots,
    fence,
    parts,
    # sizes
    tokens,
    source_pool_tokens,
    target_pool_tokens,
    ticket,
    first_plane,
    first_token,
    first_unit,
    # meta: sizes in elements, or in bytes if so named
    HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    SOURCE_TOKEN: tl.constexpr,  # noqa: N803
    TARGET_TOKEN: tl.constexpr,  # noqa: N803
    HEAD_BYTES: tl.constexpr,  # noqa: N803
    SCALE_BYTES: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    # int64 before any product: a pool is far larger than 2^31 elements.
    plane = tl.program_id(1).to(tl.int64)  # plane of the source; the target has K and V in one plane
    side = plane % 2
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = row // HEADS, row % HEADS
    inside = token < tokens
    from_slot = tl.load(source_slots + token, mask=inside, other=0).to(tl.int64)
    to_slot = token
    if fence is not None:
        to_slot = tl.load(target_slots + token, mask=inside, other=0).to(tl.int64)
        # Volatile: reads the current value from the other GPU's memory.
        inside = token < tl.where(tl.load(fence, volatile=True) == ticket, tokens, 0)
    target = (plane // 2 * target_pool_tokens + to_slot) * TARGET_TOKEN + head * HEAD_BYTES
    element = tl.arange(0, BLOCK)
    mask = inside[:, None] & (element < DIM)[None, :]
    place = (plane * source_pool_tokens + from_slot) * SOURCE_TOKEN + head * DIM
    values = tl.load(source + place[:, None] + element[None, :], mask=mask, other=0.0)
    found, scale = quantize_rows(values, LIMIT, SMALLEST, FP8)
    found = found.to(quantized.dtype.element_ty)
    if _COMPILED and parts is not None and FP8 is not None:
        # Pack four values in one register, for both uses below. Otherwise ptxas 12.8 takes some values from a wrong
        # register, or crashes.
        found = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [found], tl.uint8, is_pure=True, pack=4)
    tl.store(scales + (target + 2 * DIM) // SCALE_BYTES + side, scale, mask=inside)
    tl.store(quantized + (target + side * DIM)[:, None] + element[None, :], found, mask=mask)
    if parts is not None:
        keys = row_keys(first_plane + plane // 2 * 2, first_token + token)
        unit = first_unit + head * (HEAD_BYTES // 4)
        byte = side * DIM + element
        value = found.to(tl.int32) & 0xFF
        bits = (value << (byte % 4 * 8)[None, :].to(tl.int32)).to(tl.uint32, bitcast=True)
        unit_key = unit_keys(unit[:, None] + (byte // 4)[None, :])
        terms = tl.where(mask, bits, 0).to(tl.uint64) * (keys[:, None] ^ unit_key)
        # The scales of K and V have two bytes each, together one unit.
        bits = (scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) << (side * 16).to(tl.int32)
        bits = tl.where(inside, bits.to(tl.uint32, bitcast=True), 0)
        of_scales = bits.to(tl.uint64) * (keys ^ unit_keys(unit + DIM // 2))
        part = tl.sum(terms.to(tl.int64, bitcast=True)) + tl.sum(of_scales.to(tl.int64, bitcast=True))
        add_part(parts, part)
