"""A quantized weight matrix in memory, and its conversion to floats.

Every format of checkpoints is converted to this one layout when it is loaded: values in words (`quantized_words`),
and scales of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.quantized_words import (
    MIN_PERIOD_WORDS,
    minus_zero,
    pack_words,
    period_words,
    row_words,
    scale_of,
    unpack_words,
    value_of,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of activations."""
POWERS = torch.float8_e8m0fnu
"""Type of scales that are powers of two."""
SCALES = (*FLOATS, POWERS)
"""Types of scales."""
FP4 = torch.float4_e2m1fn_x2
"""Type of 4-bit floats, e2m1."""
ELEMENTS = (torch.float8_e4m3fn, torch.int8, torch.uint8, FP4)
"""Types of `QuantizedWeight.elements`; uint8 are integers of 4 bits."""
MIDDLE = 8
"""Zero point of 4-bit values without zero points of their own."""
MIN_BLOCK_COLUMNS = MIN_PERIOD_WORDS
"""Smallest number of columns that share a scale."""
LEAST_COLUMNS = 16
"""Smallest number of rows of the weight in a tile of a product."""
MOST_ROW_BLOCKS = 2
"""Largest number of tiles of a product along the rows of the activations, if programs share sums."""
_BLOCK_ROWS = 16
_MOST_TILES = 4096
"""Largest number of tiles of a product with sums that programs share; more tiles fill every GPU."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix `[n, k]` with elements `value * scale`, or `(value - zero) * scale` for integers of 4 bits.

    Products of one weight must be on one stream at a time: programs of a launch share counters.
    """

    words: torch.Tensor
    """int32 `[n, words of a row]`, contiguous, packed by `pack_words`."""
    elements: torch.dtype
    """Type of the values: one of `ELEMENTS`."""
    columns: int
    """k. Words may have more values, which are ignored."""
    scales: torch.Tensor
    """One of `SCALES`, `[ceil(n / block[0]), ceil(k / block[1])]`, contiguous."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    zeros: torch.Tensor | None = None
    """uint8 with the shape of `scales`, contiguous: zero points of integers of 4 bits. None: all are 8."""
    shares_sums: bool = True
    """Whether several programs of a product may share the sums of a tile; False for weights of experts."""
    arrived: torch.Tensor = field(init=False, repr=False, compare=False)
    """int32: number of programs of each tile that have written their part; all zero between launches. Empty if
    programs share no sums."""

    def __post_init__(self) -> None:
        # Allocated once, because recorded launches keep the address.
        tiles = MOST_ROW_BLOCKS * triton.cdiv(self.words.shape[0], LEAST_COLUMNS)
        count = min(_MOST_TILES, tiles) if self.shares_sums else 0
        counters = torch.zeros(count, dtype=torch.int32, device=self.words.device)
        object.__setattr__(self, "arrived", counters)

    @classmethod
    def of(
        cls,
        values: torch.Tensor,
        scales: torch.Tensor,
        block: tuple[int, int],
        zeros: torch.Tensor | None = None,
        *,
        elements: torch.dtype | None = None,
    ) -> QuantizedWeight:
        """Packs `values` `[n, k]`, float8_e4m3fn, int8, or uint8 below 16. Raises ValueError as `check` does.

        - elements: `FP4` if uint8 are the bits of floats.
        """
        if values.dtype not in ELEMENTS[:-1] or values.dim() != 2:
            raise ValueError(f"values must be float8_e4m3fn, int8 or uint8 [n, k]; got {describe(values)}")
        elements, columns = elements or values.dtype, values.shape[1]
        bits = bits_of(elements)
        words = pack_words(values.view(torch.uint8), period_words(columns, block[1], bits), bits)
        found = cls(words, elements, columns, scales, block, zeros)
        found.check()
        return found

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        elements: torch.dtype,
        scales: torch.Tensor,
        block: tuple[int, int],
        zeros: torch.Tensor | None = None,
    ) -> QuantizedWeight:
        """Returns a weight of `shape` with uninitialized values, on the device of `scales`."""
        bits = bits_of(elements)
        count = row_words(shape[1], period_words(shape[1], block[1], bits), bits)
        words = torch.empty(shape[0], count, dtype=torch.int32, device=scales.device)
        return cls(words, elements, shape[1], scales, block, zeros)

    @property
    def bits(self) -> int:
        """Bits of a value: 8 or 4."""
        return bits_of(self.elements)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix, `(n, k)`."""
        return self.words.shape[0], self.columns

    @property
    def period(self) -> int:
        """Words of a period."""
        return period_words(self.columns, self.block[1], self.bits)

    @property
    def has_blocks(self) -> bool:
        """Whether a row has several scales."""
        return self.block[1] < self.columns

    def check(self) -> None:
        """Raises ValueError unless the tensors have the types and shapes that the fields name."""
        if why := misfit(self.shape, self.block):
            raise ValueError(why)
        count = row_words(self.columns, self.period, self.bits)
        words = self.words
        if words.dtype != torch.int32 or words.shape[1:] != (count,) or not words.is_contiguous():
            raise ValueError(f"words must be contiguous int32 [n, {count}]; got {describe(words)}")
        expected = scales_shape(self.shape, self.block)
        fits = tuple(self.scales.shape) == expected and self.scales.is_contiguous()
        if not fits or self.scales.dtype not in SCALES:
            raise ValueError(
                f"scales must be contiguous floats {list(expected)}; got {describe(self.scales)}"
            )
        if (zeros := self.zeros) is not None and not (
            self.elements == torch.uint8 and zeros.dtype == torch.uint8 and tuple(zeros.shape) == expected
        ):
            raise ValueError(f"zeros must be uint8 {list(expected)} of 4-bit integers; got {describe(zeros)}")

    @classmethod
    def stacked(cls, parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Returns the rows of `parts`, one after another; a single part is returned itself. All parts have the same
        columns and types of values.

        If the parts' blocks of rows do not meet at their ends, the result has smaller blocks with repeated scales.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        rows = 0
        step = 0
        for part in parts:
            whole = part.block[0] >= part.shape[0]
            step = gcd(step, rows, part.shape[0] if whole else part.block[0])
            rows += part.shape[0]
        finer = [part.with_block_rows(step) for part in parts]
        has_zeros = first.zeros is not None
        return cls(
            torch.cat([one.words for one in finer]),
            first.elements,
            first.columns,
            torch.cat([one.scales for one in finer]),
            (step, first.block[1]),
            torch.cat([one.zeros for one in finer if one.zeros is not None]) if has_zeros else None,
        )

    def row_part(self, start: int, stop: int) -> QuantizedWeight:
        """Returns some rows, which begin with a block, as views."""
        scales = slice(start // self.block[0], -(-stop // self.block[0]))
        zeros = None if self.zeros is None else self.zeros[scales]
        return replace(self, words=self.words[start:stop], scales=self.scales[scales], zeros=zeros)

    def with_block_rows(self, rows: int) -> QuantizedWeight:
        """Returns the same matrix with `rows` rows per scale, which must divide the block or the whole matrix."""
        n, old = self.shape[0], min(self.block[0], self.shape[0])
        count = -(-n // rows)
        repeated = [
            None if one is None else one.repeat_interleave(-(-old // rows), 0)[:count].contiguous()
            for one in (self.scales, self.zeros)
        ]
        assert repeated[0] is not None
        return replace(self, scales=repeated[0], block=(rows, self.block[1]), zeros=repeated[1])


def scales_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Returns the shape of the scales of a matrix of `shape`."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def bits_of(elements: torch.dtype) -> int:
    """Returns the bits of a value."""
    return 4 if elements in (torch.uint8, FP4) else 8


def misfit(shape: tuple[int, int], block: tuple[int, int]) -> str:
    """Returns the reason why the kernels do not support a matrix of `shape`; empty if they do."""
    columns, each = shape[1], min(block[1], shape[1])
    if each < columns and each % MIN_BLOCK_COLUMNS:
        return f"{each} columns share a scale; a multiple of {MIN_BLOCK_COLUMNS} is supported"
    return ""


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrix as `dtype` (float32, bfloat16 or float16), each element rounded once.

    On CUDA: one launch on the current stream, no synchronization. Raises ConfigError for `DISAGG_KERNELS`.
    """
    if backend(weight.words.device) != "triton":
        return dequantized_reference(weight, dtype)
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.words.device)
    if out.numel() == 0:
        return out
    count = weight.words.shape[1]
    with on_device(out):
        dequantize_kernel[(-(-n // _BLOCK_ROWS), count // weight.period)](
            weight.words,
            raw_scales(weight),
            weight.zeros,
            out,
            n,
            k,
            count,
            weight.block[0],
            weight.scales.shape[1],
            **constants_of(weight),
            ROWS=_BLOCK_ROWS,
        )
    return out


def dequantized_reference(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Computes `dequantized` in plain torch, on any device."""
    values = unpack_words(weight.words, weight.columns, weight.period, weight.bits)
    if weight.elements == FP4:
        # The bits of e2m1 are those of a float16 with another exponent.
        size = ((values & 7).to(torch.int16) << 9).view(torch.float16).to(torch.float32) * 2.0**14
        wide = torch.where(values > 7, -size, size)
    else:
        wide = values.view(weight.elements).to(torch.float32)
    if weight.elements == torch.uint8:
        wide = wide - (MIDDLE if weight.zeros is None else _spread(weight.zeros, weight))
    return (wide * _spread(weight.scales, weight)).to(dtype)


def raw_scales(weight: QuantizedWeight) -> torch.Tensor:
    """Returns the scales in a type that kernels read: powers of two as uint8."""
    return weight.scales.view(torch.uint8) if weight.scales.dtype == POWERS else weight.scales


def _spread(numbers: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Returns one number for each element of the matrix; along a dimension with one block, the size may be 1."""
    found = numbers.to(torch.float32)
    for dim, (size, each) in enumerate(zip(weight.shape, weight.block, strict=True)):
        if found.shape[dim] > 1:
            found = found.repeat_interleave(each, dim).narrow(dim, 0, size)
    return found


def constants_of(weight: QuantizedWeight) -> dict[str, Any]:
    """Returns the constants of the kernels that follow from the weight's layout."""
    values, each = 32 // weight.bits, weight.block[1]
    period = weight.period * values
    per = 1  # values of a word with one scale
    if not weight.has_blocks or each % period == 0:
        per = values
    elif period % each == 0:
        per = each // weight.period
    return {
        "BITS": weight.bits,
        "FLOAT": weight.elements in (torch.float8_e4m3fn, FP4),
        "PERIOD": weight.period,
        "BLOCK": each if weight.has_blocks else 0,
        "PER": per,
        "WHOLE": weight.columns % period == 0,
    }


@triton.jit  # type: ignore[untyped-decorator]
def numbers_of(  # type: ignore[no-untyped-def]
    numbers,  # scales or zero points
    of_row,
    column,
    stride,
    VALUES: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    PERIOD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PER: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
):
    """Returns the scales, or zero points, of the words at `column`: one for each group of `PER` values of a word."""
    found = ()
    for group in tl.static_range(VALUES // PER):
        if BLOCK == 0:
            place = of_row
        elif WHOLE:
            place = of_row + (column + group * PER * PERIOD) // BLOCK
        else:  # values without a column have no scale
            place = of_row + tl.minimum((column + group * PER * PERIOD) // BLOCK, stride - 1)
        found = found + (tl.load(numbers + place),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit  # type: ignore[untyped-decorator]
def dequantize_kernel(  # type: ignore[no-untyped-def]
    # tensors
    words,  # int32 [n, row_words]
    scales,
    zeros,  # uint8 or None
    out,  # [n, k]
    # sizes
    n,
    k,
    row_words,
    block_rows,
    scale_stride,
    # meta
    BITS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    FLOAT: tl.constexpr,  # noqa: N803 - whether values are floats
    PERIOD: tl.constexpr,  # noqa: N803 - words of a period
    BLOCK: tl.constexpr,  # noqa: N803 - columns that share a scale; 0: all
    PER: tl.constexpr,  # noqa: N803 - values of a word that share a scale
    WHOLE: tl.constexpr,  # noqa: N803 - whether each value has a column
    ROWS: tl.constexpr,  # noqa: N803
):
    VALUES: tl.constexpr = 32 // BITS  # noqa: N806
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, PERIOD)[None, :]
    here = (row < n)[:, None]
    column = tl.program_id(1) * PERIOD * VALUES
    # Rows beyond the end read another row, and are not stored.
    of_row = (row % n) // block_rows * scale_stride
    some_scales = numbers_of(scales, of_row, column, scale_stride, VALUES, PERIOD, BLOCK, PER, WHOLE)
    if zeros is not None:
        some_zeros = numbers_of(zeros, of_row, column, scale_stride, VALUES, PERIOD, BLOCK, PER, WHOLE)
    at = (row % n).to(tl.int64)[:, None] * row_words + tl.program_id(1) * PERIOD + element
    some_words = tl.load(words + at)
    target = out + row.to(tl.int64)[:, None] * k
    for number in tl.static_range(VALUES):
        added = None
        if BITS == 4 and not FLOAT:
            zero = 8 if zeros is None else some_zeros[number // PER][:, None]
            added = minus_zero(tl.zeros([ROWS, PERIOD], tl.int32) + zero, tl.float32)
        value = value_of(some_words, added, number, BITS, FLOAT, tl.float32)
        value = value * scale_of(some_scales[number // PER])[:, None]
        place = column + number * PERIOD + element
        mask = here if WHOLE else here & (place < k)
        tl.store(target + place, value.to(out.dtype.element_ty), mask=mask)
