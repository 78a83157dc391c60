"""The product of activations with a quantized weight: `x @ weight.T + bias`. Activations are not quantized.

For few rows, a kernel reads quantized values, converts them in registers, multiplies with float32 sums, and scales
the sums of each block. With too few tiles to fill the GPU, several programs share the sums of a tile; the last one
adds the parts, always in the same order. For many rows, another kernel converts the whole weight to the type of the
activations, into memory that is free after the product, and the library multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention.common import dot, multiprocessors, on_device, shared_bytes
from kernels.attention.layer_kv import describe
from kernels.dispatch import INTERPRETED, backend
from kernels.layers.quantized_weight import (
    FLOATS,
    LEAST_COLUMNS,
    MOST_ROW_BLOCKS,
    QuantizedWeight,
    constants_of,
    dequantized,
    numbers_of,
    raw_scales,
)
from kernels.layers.quantized_words import minus_zero, scale_of, value_of

KERNEL_ROWS = {8: 256, 4: 128}
"""Largest number of rows that the kernel multiplies, by the bits of a value. More rows are multiplied by the library,
which was measured to be as fast."""
_MIN_COLUMNS = 1024
"""Smallest number of columns of a weight that a program sums."""
_WIDE = 128
"""Rows of the weight of a wide tile."""
_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no assembly


@dataclass(frozen=True, slots=True)
class QuantizedTile:
    """Sizes of a program of the product."""

    rows: int
    """Rows of the activations."""
    columns: int
    """Rows of the weight, which are columns of the result."""
    words: int
    """Words of a weight's row in a step, at most those of a period."""
    splits: int = 1
    """Number of programs that share the sums of a tile."""
    warps: int = 4
    stages: int = 4
    swapped: bool = False
    """Whether rows of the activations, not of the weight, are the rows of a tensor core instruction."""


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns `x @ weight.T + bias`, `[..., n]` of the type of x.

    - x: float32, bfloat16 or float16 `[..., k]`.
    - bias: contiguous `[n]` of the same type, or None.

    On CUDA: one or two launches on the current stream, no synchronization. Raises ValueError (arguments) and
    ConfigError (`DISAGG_KERNELS`).
    """
    n, k = weight.shape
    if x.dtype not in FLOATS or x.shape[-1:] != (k,):
        raise ValueError(f"x must be float32, bfloat16 or float16 [.., {k}]; got {describe(x)}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous {x.dtype} [{n}]; got {describe(bias)}")
    rows = x.numel() // k
    if rows > kernel_rows(weight, x.dtype) or backend(x.device) != "triton":
        return torch.nn.functional.linear(x, dequantized(weight, x.dtype), bias)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = tile_of(rows, (n, k), weight.bits, weight.has_blocks, x.device)
        with on_device(x):
            multiply(x.reshape(rows, k).contiguous(), weight, bias, out, tile)
    return out.view(*x.shape[:-1], n)


def quantized_linear_reference(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes the exact result of `quantized_linear` in float64, on any device."""
    wide = dequantized(weight, torch.float32).double()
    return torch.nn.functional.linear(x.double(), wide, None if bias is None else bias.double())


def kernel_rows(weight: QuantizedWeight, dtype: torch.dtype) -> int:
    """Returns the largest number of rows of `dtype` that the kernel multiplies; 0 for float32, which tensor cores do
    not multiply exactly.
    """
    return 0 if dtype == torch.float32 else KERNEL_ROWS[weight.bits]


def each_way(weight: QuantizedWeight, dtype: torch.dtype) -> list[int]:
    """Returns numbers of rows of `dtype`: one for each tile and number of splits, and one for the library."""
    most = kernel_rows(weight, dtype)
    return [*(rows for rows in (3, 50, 100, 200) if rows <= most), most + 1]


@lru_cache(maxsize=4096)
def tile_of(
    m: int, shape: tuple[int, int], bits: int, has_blocks: bool, device: torch.device
) -> QuantizedTile:
    """Returns the tile for `m` rows of activations and a weight of `shape`, the fastest on an H200 with the weights
    of an 8B Llama.

    - has_blocks: whether a row of the weight has several scales.
    """
    (n, k), processors = shape, multiprocessors(device)
    tile, programs = _tile_of_rows(m, -(-n // _WIDE) >= processors, bits, has_blocks)
    blocks, splits = -(-m // tile.rows) * -(-n // tile.columns), 1
    while 2 * splits * blocks <= programs * processors and k >= 2 * splits * _MIN_COLUMNS:
        splits *= 2
    return fitted(replace(tile, splits=splits), bits, device)


def fitted(tile: QuantizedTile, bits: int, device: torch.device) -> QuantizedTile:
    """Returns `tile` with as many of its stages as the shared memory of `device` has room for.

    - bits: bits of a value.
    """
    stage_bytes = tile.words * (4 * tile.columns + 32 // bits * 2 * tile.rows)
    return replace(tile, stages=min(tile.stages, 1 + shared_bytes(device) // stage_bytes))


def _tile_of_rows(m: int, wide: bool, bits: int, has_blocks: bool) -> tuple[QuantizedTile, int]:
    """Returns a tile, without splits, and the largest number of programs on a multiprocessor with splits.

    - wide: whether the weight has enough rows to fill the device with wide tiles.
    """
    if m <= 16 and bits == 4:
        found = QuantizedTile(16, 64, 64), 2
    elif m <= 16:
        found = QuantizedTile(16, 64, 64, stages=3, swapped=True), 4
    elif m > 64 and bits == 8:
        found = QuantizedTile(128, 64, 32, stages=3), 2
    elif has_blocks and bits == 8:
        found = QuantizedTile(64, _WIDE, 64, warps=8, stages=3), 1
    elif wide:
        found = QuantizedTile(64, _WIDE, 32, warps=8), 1
    elif bits == 4:
        found = QuantizedTile(64, 64, 64, stages=3), 1
    else:
        found = QuantizedTile(64, 64, 32), 2
    return found


def multiply(
    rows: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: QuantizedTile,
) -> None:
    """Computes `out`, `[m, n]`, from contiguous `rows`, `[m, k]`, with the kernel, without checking arguments."""
    (m, k), n, splits = rows.shape, out.shape[1], tile.splits
    grid = (-(-m // tile.rows), -(-n // tile.columns), splits)
    parts = None
    if splits > 1:
        assert grid[0] <= MOST_ROW_BLOCKS, tile
        assert tile.columns >= LEAST_COLUMNS, tile
        assert grid[0] * grid[1] <= len(weight.arrived), (tile, weight.shape)
        parts = torch.empty(splits, m, n, dtype=torch.float32, device=out.device)
    quantized_linear_kernel[grid](
        rows,
        weight.words,
        raw_scales(weight),
        weight.zeros,
        bias,
        out,
        parts,
        weight.arrived,
        m,
        n,
        k,
        weight.words.shape[1],
        weight.block[0],
        weight.scales.shape[1],
        **constants_of(weight),
        SHARED=weight.block[0] >= n or weight.block[0] % tile.columns == 0,
        SPLITS=splits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        WORDS=min(tile.words, weight.period),
        SWAPPED=tile.swapped,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def _waited(sums):  # type: ignore[no-untyped-def]
    """Returns `sums`, after the asynchronous product that computes them.

    Without a use of the sums, Triton lets the last product of a step run while the next step writes other values to
    the registers that this product still reads.
    """
    if _PLAIN:
        found = sums
    else:
        found = tl.inline_asm_elementwise(
            "mov.f32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit  # type: ignore[untyped-decorator]
def summed_words(  # type: ignore[no-untyped-def]
    x_at,  # addresses [ROWS, WORDS] of the rows of activations
    x_inside,  # [ROWS, 1]
    w_at,  # addresses [COLUMNS, WORDS] of the rows of the weight
    scales,
    zeros,
    of_row,  # place of the first scale of each row of the weight, or with `SHARED` of all rows
    of_column,  # place of the first zero point of each row of the weight
    first,  # words of a row, from and to
    last,
    k,
    scale_stride,
    BITS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    FLOAT: tl.constexpr,  # noqa: N803
    PERIOD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PER: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
    SHARED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    SWAPPED: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803 - type of the activations
):
    """Returns the products of rows with rows of a quantized weight, float32 `[ROWS, COLUMNS]`.

    With one scale in a row (`BLOCK` is 0), the sums are not multiplied by it. Other arguments: see
    `quantized_linear_kernel`.
    """
    VALUES: tl.constexpr = 32 // BITS  # noqa: N806
    element = tl.arange(0, WORDS)
    sums = tl.zeros([ROWS if SWAPPED else COLUMNS, COLUMNS if SWAPPED else ROWS], tl.float32)
    for word in range(first, last, WORDS):
        if PERIOD == WORDS:
            place = word * VALUES
        else:
            place = tl.multiple_of(word // PERIOD * (PERIOD * VALUES) + word % PERIOD, 16)
        if BLOCK > 0:
            some_scales = numbers_of(scales, of_row, place, scale_stride, VALUES, PERIOD, BLOCK, PER, WHOLE)
        if zeros is not None:
            # Also shared zero points are loaded for each column: with one number, Triton would convert the words in
            # another layout and move the values to the tensor cores' through shared memory, which is full.
            some_zeros = numbers_of(zeros, of_column, place, scale_stride, VALUES, PERIOD, BLOCK, PER, WHOLE)
        some_words = tl.load(w_at + word)
        part = sums
        for number in tl.static_range(VALUES):
            if BITS == 4 and not FLOAT:
                zero = (
                    tl.full([COLUMNS, 1], 8, tl.int32)
                    if zeros is None
                    else some_zeros[number // PER][:, None]
                )
                added = minus_zero(zero, DTYPE).broadcast_to([COLUMNS, WORDS])
            else:
                added = None
            value = value_of(some_words, added, number, BITS, FLOAT, DTYPE)
            inside = x_inside
            if not WHOLE:  # zeros do not change the sums
                inside = x_inside & (place + number * PERIOD + element < k)[None, :]
            some_x = tl.load(x_at + (place + number * PERIOD), mask=inside, other=0.0)
            if BLOCK > 0 and number % PER == 0:
                part = tl.zeros_like(sums)
            part = dot(some_x, tl.trans(value), part) if SWAPPED else dot(value, tl.trans(some_x), part)
            if BLOCK > 0 and number % PER == PER - 1:
                scale = scale_of(some_scales[number // PER])
                if SHARED:
                    sums += part * scale
                elif SWAPPED:
                    sums += part * scale[None, :]
                else:
                    sums += part * scale[:, None]
        if BLOCK == 0:
            sums = part if SWAPPED else _waited(part)
    if not SWAPPED:
        sums = tl.trans(sums)
    return sums


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def quantized_linear_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,  # [m, k]
    words,  # int32 [n, row_words]
    scales,
    zeros,  # uint8 or None
    bias,  # [n] or None
    out,  # [m, n]
    parts,  # float32 [SPLITS, m, n], or None without splits
    arrived,  # int32, one for each block of rows and columns, zero; zero again afterwards
    # sizes
    m,
    n,
    k,
    row_words,
    block_rows,
    scale_stride,
    # meta
    BITS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    FLOAT: tl.constexpr,  # noqa: N803 - whether values are floats
    PERIOD: tl.constexpr,  # noqa: N803 - words of a period of columns
    BLOCK: tl.constexpr,  # noqa: N803 - columns that share a scale; 0: all
    PER: tl.constexpr,  # noqa: N803 - values of a word that share a scale
    WHOLE: tl.constexpr,  # noqa: N803 - whether each value has a column
    SHARED: tl.constexpr,  # noqa: N803 - whether all columns of a program share scales
    SPLITS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803 - words of a step
    SWAPPED: tl.constexpr,  # noqa: N803
):
    DTYPE: tl.constexpr = x.dtype.element_ty  # noqa: N806
    row_block, column_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_block * ROWS + tl.arange(0, ROWS)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, WORDS)
    x_inside = (row < m)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * k + element[None, :]
    # Indices beyond the end load another column; its results are not stored.
    w_at = words + (column % n).to(tl.int64)[:, None] * row_words + element[None, :]
    of_column = (column % n) // block_rows * scale_stride
    of_row = column_block * COLUMNS // block_rows * scale_stride if SHARED else of_column
    steps = tl.cdiv(row_words // WORDS, SPLITS)
    first = split * steps * WORDS
    last = tl.minimum(first + steps * WORDS, row_words)
    sums = summed_words(
        x_at, x_inside, w_at, scales, zeros, of_row, of_column, first, last, k, scale_stride,
        BITS, FLOAT, PERIOD, BLOCK, PER, WHOLE, SHARED, ROWS, COLUMNS, WORDS, SWAPPED, DTYPE,
    )  # fmt: skip
    target = row.to(tl.int64)[:, None] * n + column[None, :]
    mask = x_inside & (column < n)[None, :]
    complete = True
    if SPLITS > 1:
        size = m.to(tl.int64) * n
        tl.store(parts + split * size + target, sums, mask=mask)
        tl.debug_barrier()  # all stores of this program precede its arrival
        counter = arrived + row_block * tl.num_programs(1) + column_block
        complete = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if complete:
        if SPLITS > 1:
            tl.store(counter, 0)
            sums = tl.zeros([ROWS, COLUMNS], tl.float32)
            for one in tl.static_range(SPLITS):
                sums += tl.load(parts + one * size + target, mask=mask, other=0.0)
        if BLOCK == 0:
            if SHARED:
                sums *= scale_of(tl.load(scales + of_row))
            else:
                sums *= scale_of(tl.load(scales + of_row))[None, :]
        if bias is not None:
            sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)
