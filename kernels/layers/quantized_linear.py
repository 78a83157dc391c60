"""The product of activations with a quantized weight: `x @ weight.T + bias`. Activations are not quantized.

For few rows, a kernel reads quantized values, converts them in registers, multiplies with float32 sums, and scales
the sums of each block. For many rows, another kernel converts the whole weight to the type of the activations, into
memory that is free after the product, and the library multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention.common import dot, multiprocessors, on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.quantized_weight import (
    FLOATS,
    QuantizedWeight,
    bits_of,
    dequantized,
    from_bytes,
    from_nibbles,
    kinds_of,
)

KERNEL_ROWS = 256
"""Largest number of rows that the kernel multiplies; more rows are multiplied by the library."""
_FLOAT32_KERNEL_ROWS = 32
"""As `KERNEL_ROWS`, for float32, which tensor cores do not multiply exactly."""
_STAGES_BYTES = 96 << 10
"""Shared memory for loads in flight; two programs fit on a multiprocessor of an H100, one on that of any GPU."""
_MIN_STEPS = 4
"""Smallest number of chunks that a program sums."""
_SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class QuantizedTile:
    """Sizes of a program of the product."""

    rows: int
    """Rows of the activations."""
    columns: int
    """Rows of the weight, which are columns of the result."""
    splits: int
    """Number of programs that share the sums of a tile."""
    warps: int = 4
    stages: int = 4


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns `x @ weight.T + bias`, `[..., n]` of the type of x.

    - x: float32, bfloat16 or float16 `[..., k]`.
    - bias: contiguous `[n]` of the same type, or None.

    On CUDA: one to three launches on the current stream, no synchronization. Raises ValueError (arguments) and
    ConfigError (`DISAGG_KERNELS`).
    """
    n, k = weight.shape
    if x.dtype not in FLOATS or x.shape[-1:] != (k,):
        raise ValueError(f"x must be float32, bfloat16 or float16 [.., {k}]; got {describe(x)}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous {x.dtype} [{n}]; got {describe(bias)}")
    rows = x.numel() // k
    most = _FLOAT32_KERNEL_ROWS if x.dtype == torch.float32 else KERNEL_ROWS
    if rows > most or backend(x.device) != "triton":
        return torch.nn.functional.linear(x, dequantized(weight, x.dtype), bias)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = tile_of(rows, n, -(-k // weight.chunk), weight.chunk, x.dtype, x.device)
        with on_device(x):
            multiply(x.reshape(rows, k).contiguous(), weight, bias, out, tile)
    return out.view(*x.shape[:-1], n)


def quantized_linear_reference(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes the exact result of `quantized_linear` in float64, on any device."""
    wide = dequantized(weight, torch.float32).double()
    return torch.nn.functional.linear(x.double(), wide, None if bias is None else bias.double())


@lru_cache(maxsize=4096)
def tile_of(
    m: int, n: int, steps: int, chunk: int, dtype: torch.dtype, device: torch.device
) -> QuantizedTile:
    """Returns the tile for `m` rows of activations and `n` rows of a weight with `steps` chunks of columns."""
    rows = next(size for size in (16, 32, 64, 128) if m <= size or size == 128)
    programs, row_blocks = multiprocessors(device), -(-m // rows)
    wide = rows >= 64 and row_blocks * -(-n // 128) >= programs
    columns = 32 if dtype == torch.float32 else 128 if wide else 64
    blocks, splits = row_blocks * -(-n // columns), 1
    while blocks * splits < programs and steps >= 2 * splits * _MIN_STEPS:
        splits *= 2
    stage_bytes = chunk * (columns + rows * dtype.itemsize)
    stages = max(2, min(5, _STAGES_BYTES // stage_bytes))
    return QuantizedTile(rows, columns, splits, 8 if rows * columns >= 8192 else 4, stages)


def multiply(
    rows: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: QuantizedTile,
) -> None:
    """Computes `out`, `[m, n]`, from contiguous `rows`, `[m, k]`, with the kernel, without checking arguments."""
    (m, k), n, splits = rows.shape, out.shape[1], tile.splits
    parts = out if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=out.device)
    (block_rows, block_columns), chunk = weight.block, weight.chunk
    grid = (-(-m // tile.rows), -(-n // tile.columns), splits)
    quantized_linear_kernel[grid](
        rows,
        bits_of(weight),
        weight.scales,
        weight.zeros,
        bias if splits == 1 else None,
        parts,
        m,
        n,
        k,
        block_rows,
        block_columns,
        weight.scales.shape[1],
        **kinds_of(weight),
        WHOLE=k % chunk == 0,
        BLOCKS=block_columns < k,
        SPLITS=splits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        CHUNK=chunk,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        sum_parts_kernel[(-(-m * n // _SUM_BLOCK),)](
            parts, bias, out, m * n, n, SPLITS=splits, BLOCK=_SUM_BLOCK
        )


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def quantized_linear_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,  # [m, k]
    values,  # uint8 [n, k] or [n, k / 2]
    scales,
    zeros,  # uint8 or None
    bias,  # [n] or None
    out,  # [m, n], or float32 [SPLITS, m, n]
    # sizes
    m,
    n,
    k,
    block_rows,
    block_columns,
    scale_stride,
    # meta
    FP8: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    PACKED: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803 - whether chunks divide k
    BLOCKS: tl.constexpr,  # noqa: N803 - whether a row has several scales
    SPLITS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
):
    DTYPE: tl.constexpr = x.dtype.element_ty  # noqa: N806
    BYTES: tl.constexpr = CHUNK // 2 if PACKED else CHUNK  # noqa: N806
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    element = tl.arange(0, BYTES)
    # Indices beyond the ends load another row or column, so the loop needs no mask; their results are not stored.
    x_row = x + (row % m).to(tl.int64) * k
    w_row = values + (column % n).to(tl.int64) * (k // 2 if PACKED else k)
    of_row = (column % n) // block_rows * scale_stride
    each = tl.cdiv(tl.cdiv(k, CHUNK), SPLITS) * CHUNK
    start = split * each
    stop = tl.minimum(start + each, k)
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in range(start, stop, CHUNK):
        before = tl.zeros([COLUMNS, ROWS], tl.float32) if BLOCKS else sums
        if PACKED:
            bits = tl.load(w_row[:, None] + first // 2 + element[None, :])
            x_at = x_row[:, None] + first + element[None, :]
            low, high = from_nibbles(bits & 15, DTYPE), from_nibbles(bits >> 4, DTYPE)
            if zeros is None:
                low, high = low - 8.0, high - 8.0
            else:
                zero = from_nibbles(tl.load(zeros + of_row + first // block_columns), tl.float32)
                low, high = low - zero.to(low.dtype)[:, None], high - zero.to(low.dtype)[:, None]
            part = dot(low, tl.trans(tl.load(x_at)), before)
            part = dot(high, tl.trans(tl.load(x_at + BYTES)), part)
        else:
            if WHOLE:
                bits = tl.load(w_row[:, None] + first + element[None, :])
                some_x = tl.load(x_row[:, None] + first + element[None, :])
            else:  # zeros do not change the sum
                inside = (first + element < k)[None, :]
                bits = tl.load(w_row[:, None] + first + element[None, :], mask=inside, other=0)
                some_x = tl.load(x_row[:, None] + first + element[None, :], mask=inside, other=0.0)
            some_w = from_bytes(bits, FP8, DTYPE)
            part = dot(some_w, tl.trans(some_x), before)
        if BLOCKS:
            scale = tl.load(scales + of_row + first // block_columns).to(tl.float32)
            sums += part * scale[:, None]
        else:
            sums = part
    if not BLOCKS:
        sums *= tl.load(scales + of_row).to(tl.float32)[:, None]
    sums = tl.trans(sums)
    if bias is not None:
        sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = out + (split.to(tl.int64) * m + row[:, None]) * n + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def sum_parts_kernel(  # type: ignore[no-untyped-def]
    parts,  # float32 [SPLITS, size]
    bias,  # [n] or None
    out,  # [size]
    size,
    n,
    SPLITS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    BLOCK: tl.constexpr,  # noqa: N803
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + tl.cast(split, tl.int64) * size + place, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
