"""The product of activations with a weight of quantized words: `x @ weight.T + bias`. Not used by default yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.common import dot
from kernels.layers.quantized_words import minus_zero, value_of


@dataclass(frozen=True, slots=True)
class WordTile:
    """Sizes of a program."""

    rows: int
    columns: int
    words: int
    """Words of a weight's row in a step; they divide those of a period."""
    splits: int = 1
    warps: int = 4
    stages: int = 4
    swapped: bool = False
    """Whether rows of the activations, not columns, are the rows of a tensor core instruction."""
    scaled: bool = False
    """Whether scales of blocks multiply the values, which are then rounded, instead of the sums."""
    overlapped: bool = False
    """Whether the program may start before the previous launch ends, and then prefetches weights."""


@dataclass(frozen=True)
class WordWeight:
    """A matrix `[n, k]` of 8-bit or 4-bit values in words."""

    words: torch.Tensor
    """int32 `[n, k / values of a word]`."""
    scales: torch.Tensor
    block: tuple[int, int]
    zeros: torch.Tensor | None
    bits: int
    fp8: bool
    period: int
    """Words of a period."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        n, count = self.words.shape
        return n, count * 32 // self.bits


def multiply_words(
    rows: torch.Tensor,
    weight: WordWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: WordTile,
    arrived: torch.Tensor,
) -> None:
    """Computes `out`, `[m, n]`, from contiguous `rows`, `[m, k]`.

    - arrived: int32, zero, one for each block of rows and columns; zero again afterwards.
    """
    (m, k), n, splits = rows.shape, out.shape[1], tile.splits
    block_rows, block_columns = weight.block
    grid = (-(-m // tile.rows), -(-n // tile.columns), splits)
    parts = None
    if splits > 1:
        parts = torch.empty(splits, m, n, dtype=torch.float32, device=out.device)
    one_block = block_rows >= n
    word_linear_kernel[grid](
        rows,
        weight.words,
        weight.scales,
        weight.zeros,
        bias,
        out,
        parts,
        arrived,
        m,
        n,
        k,
        weight.words.shape[1],
        block_rows,
        weight.scales.shape[1],
        BITS=weight.bits,
        FP8=weight.fp8,
        PERIOD=weight.period,
        BLOCK=block_columns if block_columns < k else 0,
        SHARED=not tile.scaled and (one_block or block_rows % tile.columns == 0),
        SPLITS=splits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        WORDS=min(tile.words, weight.period),
        SWAPPED=tile.swapped,
        SCALED=tile.scaled,
        OVERLAPPED=tile.overlapped,
        PREFETCHED=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({"launch_pdl": True} if tile.overlapped else {}),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _loaded(  # type: ignore[no-untyped-def]
    numbers,
    of_row,
    column,
    BLOCK: tl.constexpr,  # noqa: N803
    PERIOD: tl.constexpr,  # noqa: N803
    PER: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
):
    """Returns the scales (or zero points) of the groups of values in a step."""
    found = ()
    for group in tl.static_range(COUNT):
        found = found + (tl.load(numbers + of_row + (column + group * PER * PERIOD) // BLOCK),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _prefetch(addresses):  # type: ignore[no-untyped-def]
    """Moves the cache lines of `addresses` to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [addresses.to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def word_linear_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,  # [m, k]
    words,  # int32 [n, k / VALUES]
    scales,
    zeros,  # uint8 or None
    bias,  # [n] or None
    out,  # [m, n]
    parts,  # float32 [SPLITS, m, n], or None without splits
    arrived,  # int32, one for each block of rows and columns, zero
    # sizes
    m,
    n,
    k,
    row_words,
    block_rows,
    scale_stride,
    # meta
    BITS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    FP8: tl.constexpr,  # noqa: N803
    PERIOD: tl.constexpr,  # noqa: N803 - words of a period of columns
    BLOCK: tl.constexpr,  # noqa: N803 - columns that share a scale; 0: all
    SHARED: tl.constexpr,  # noqa: N803 - whether all columns of a program share scales
    SPLITS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803 - words of a step
    SWAPPED: tl.constexpr,  # noqa: N803
    SCALED: tl.constexpr,  # noqa: N803 - whether scales of blocks multiply values instead of sums
    OVERLAPPED: tl.constexpr,  # noqa: N803 - whether the previous launch may still run
    PREFETCHED: tl.constexpr,  # noqa: N803 - steps whose words are prefetched if OVERLAPPED
):
    DTYPE: tl.constexpr = x.dtype.element_ty  # noqa: N806
    VALUES: tl.constexpr = 32 // BITS  # noqa: N806
    PER: tl.constexpr = VALUES if BLOCK == 0 or BLOCK >= VALUES * PERIOD else BLOCK // PERIOD  # noqa: N806
    COUNT: tl.constexpr = VALUES // PER  # noqa: N806
    row_block, column_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_block * ROWS + tl.arange(0, ROWS)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, WORDS)
    x_inside = (row < m)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * k + element[None, :]
    # Indices beyond the end load another column; its results are not stored.
    w_at = words + (column % n).to(tl.int64)[:, None] * row_words + element[None, :]
    if SHARED:
        of_row = column_block * COLUMNS // block_rows * scale_stride
    else:
        of_row = (column % n) // block_rows * scale_stride
    steps = tl.cdiv(row_words // WORDS, SPLITS)
    first = split * steps * WORDS
    last = tl.minimum(first + steps * WORDS, row_words)
    if OVERLAPPED:
        line = tl.arange(0, triton.next_power_of_2(PREFETCHED * WORDS // 32))
        ahead = (first + line * 32)[None, :]
        _prefetch(words + (column % n).to(tl.int64)[:, None] * row_words + tl.minimum(ahead, row_words - 32))
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([ROWS if SWAPPED else COLUMNS, COLUMNS if SWAPPED else ROWS], tl.float32)
    for word in range(first, last, WORDS):
        if PERIOD == WORDS:
            place = word * VALUES
        else:
            place = tl.multiple_of(word // PERIOD * (PERIOD * VALUES) + word % PERIOD, 16)
        if BLOCK > 0:
            some_scales = _loaded(scales, of_row, place, BLOCK, PERIOD, PER, COUNT)
        if zeros is not None:
            if BLOCK > 0:
                some_zeros = _loaded(zeros, of_row, place, BLOCK, PERIOD, PER, COUNT)
            else:
                some_zeros = (tl.load(zeros + of_row),)
        some_words = tl.load(w_at + word)
        part = sums
        for number in tl.static_range(VALUES):
            if BITS == 4:
                if zeros is None:
                    zero = tl.full([COLUMNS, 1], 8, tl.int32)
                elif SHARED:
                    zero = tl.zeros([COLUMNS, 1], tl.int32) + some_zeros[number // PER].to(tl.int32)
                else:
                    zero = some_zeros[number // PER].to(tl.int32)[:, None]
                added = minus_zero(zero, DTYPE).broadcast_to([COLUMNS, WORDS])
            else:
                added = None
            value = value_of(some_words, added, number, BITS, FP8, DTYPE)
            some_x = tl.load(x_at + (place + number * PERIOD), mask=x_inside, other=0.0)
            if SCALED:
                scale = some_scales[number // PER].to(tl.float32)
                value = value.to(tl.float32) * (scale if SHARED else scale[:, None])
                value = value.to(DTYPE)
            if BLOCK > 0 and not SCALED and number % PER == 0:
                part = tl.zeros_like(sums)
            part = dot(some_x, tl.trans(value), part) if SWAPPED else dot(value, tl.trans(some_x), part)
            if BLOCK > 0 and not SCALED and number % PER == PER - 1:
                scale = some_scales[number // PER].to(tl.float32)
                if SHARED:
                    sums += part * scale
                elif SWAPPED:
                    sums += part * scale[None, :]
                else:
                    sums += part * scale[:, None]
        if BLOCK == 0 or SCALED:
            sums = part
    if not SWAPPED:
        sums = tl.trans(sums)
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
                sums *= tl.load(scales + of_row).to(tl.float32)
            else:
                sums *= tl.load(scales + of_row).to(tl.float32)[None, :]
        if bias is not None:
            sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)
