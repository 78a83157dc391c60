"""A quantized weight matrix in memory, and its conversion to floats.

Every format of checkpoints is converted to this one layout when it is loaded. In 16-bit products, the bits of a
value become a float by integer operations on two values at a time. All conversions are exact: bfloat16 and float16
represent all values of the 8-bit types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention.common import INT8_TO_FLOAT16, on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import INTERPRETED, backend

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of activations and of scales."""
VALUES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
"""Types of `QuantizedWeight.values`; uint8 holds two 4-bit values."""
MIDDLE = 8
"""Zero point of 4-bit values without zero points of their own."""
MAX_CHUNK = 128
"""Largest number of columns that are packed together."""
MIN_CHUNK = 32
"""Smallest number of 4-bit columns that are packed together; a packed weight has a multiple of it."""
MIN_BLOCK_COLUMNS = 16
"""Smallest number of columns that share a scale, because a tensor core instruction sums as many."""
_BLOCK_ROWS, _BLOCK_COLUMNS = 16, 128
_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no assembly and cannot multiply bfloat16


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix `[n, k]` with elements `value * scale`, or `(value - zero) * scale` for 4-bit values."""

    values: torch.Tensor
    """float8_e4m3fn or int8 `[n, k]`; or uint8 `[n, k / 2]`, packed by `pack_nibbles`. Contiguous."""
    scales: torch.Tensor
    """Float `[ceil(n / block[0]), ceil(k / block[1])]`, contiguous."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    zeros: torch.Tensor | None = None
    """uint8 with the shape of `scales`, contiguous: zero points of 4-bit values. None: all are 8."""

    @property
    def packed(self) -> bool:
        """Whether a byte holds two values."""
        return self.values.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix, `(n, k)`."""
        rows, columns = self.values.shape
        return rows, 2 * columns if self.packed else columns

    @property
    def chunk(self) -> int:
        """Number of columns that the kernels load together. Columns of a chunk have one scale per row."""
        return chunk_of(self.shape[1], self.block[1], packed=self.packed)

    def check(self) -> None:
        """Raises ValueError unless the tensors have the types and shapes that the fields name."""
        if self.values.dtype not in VALUES or self.values.dim() != 2 or not self.values.is_contiguous():
            raise ValueError(
                f"values must be contiguous float8_e4m3fn, int8 or uint8 [n, k]; got {describe(self.values)}"
            )
        expected = scales_shape(self.shape, self.block)
        fits = tuple(self.scales.shape) == expected and self.scales.is_contiguous()
        if not fits or self.scales.dtype not in FLOATS:
            raise ValueError(
                f"scales must be contiguous floats {list(expected)}; got {describe(self.scales)}"
            )
        if (zeros := self.zeros) is not None and not (
            self.packed and zeros.dtype == torch.uint8 and tuple(zeros.shape) == expected
        ):
            raise ValueError(f"zeros must be uint8 {list(expected)} of 4-bit values; got {describe(zeros)}")
        if why := misfit(self.shape, self.block, packed=self.packed):
            raise ValueError(why)

    @classmethod
    def stacked(cls, parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Returns the rows of `parts`, one after another. All parts have the same columns and types of values.

        If the parts' blocks of rows do not meet at their ends, the result has smaller blocks with repeated scales.
        """
        first = parts[0]
        rows = 0
        step = 0
        for part in parts:
            whole = part.block[0] >= part.shape[0]
            step = gcd(step, rows, part.shape[0] if whole else part.block[0])
            rows += part.shape[0]
        finer = [part.with_block_rows(step) for part in parts]
        has_zeros = first.zeros is not None
        return cls(
            torch.cat([one.values for one in finer]),
            torch.cat([one.scales for one in finer]),
            (step, first.block[1]),
            torch.cat([one.zeros for one in finer if one.zeros is not None]) if has_zeros else None,
        )

    def row_part(self, start: int, stop: int) -> QuantizedWeight:
        """Returns some rows, which begin with a block, as views."""
        scales = slice(start // self.block[0], -(-stop // self.block[0]))
        zeros = None if self.zeros is None else self.zeros[scales]
        return QuantizedWeight(self.values[start:stop], self.scales[scales], self.block, zeros)

    def with_block_rows(self, rows: int) -> QuantizedWeight:
        """Returns the same matrix with `rows` rows per scale, which must divide the block or the whole matrix."""
        n, old = self.shape[0], min(self.block[0], self.shape[0])
        count = -(-n // rows)
        repeated = [
            None if one is None else one.repeat_interleave(-(-old // rows), 0)[:count].contiguous()
            for one in (self.scales, self.zeros)
        ]
        assert repeated[0] is not None
        return QuantizedWeight(self.values, repeated[0], (rows, self.block[1]), repeated[1])


def scales_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Returns the shape of the scales of a matrix of `shape`."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def chunk_of(columns: int, block_columns: int, *, packed: bool) -> int:
    """Returns the number of columns that kernels load together: a power of two up to `MAX_CHUNK` that divides the
    columns of a scale. It also divides all columns of a packed weight."""
    divides_all = gcd(columns, MAX_CHUNK)
    if block_columns < columns:
        return gcd(block_columns, divides_all if packed else MAX_CHUNK)
    return divides_all if divides_all >= MIN_CHUNK else MAX_CHUNK


def misfit(shape: tuple[int, int], block: tuple[int, int], *, packed: bool) -> str:
    """Returns the reason why the kernels do not support a matrix of `shape`; empty if they do."""
    columns, each = shape[1], min(block[1], shape[1])
    if each < columns and each % MIN_BLOCK_COLUMNS:
        return f"{each} columns share a scale; a multiple of {MIN_BLOCK_COLUMNS} is supported"
    if packed and (columns % MIN_CHUNK or each % MIN_CHUNK):
        return (
            f"{columns} columns of 4-bit values in groups of {each}; multiples of {MIN_CHUNK} are supported"
        )
    return ""


def pack_nibbles(values: torch.Tensor, chunk: int) -> torch.Tensor:
    """Packs uint8 values below 16, `[n, k]`, to uint8 `[n, k / 2]`.

    A byte holds two columns of the same chunk that are half a chunk apart, the first one in its low bits. A kernel
    that loads a chunk thus has two tiles of adjacent columns, without shuffling values.
    """
    n, k = values.shape
    low, high = values.view(n, k // chunk, 2, chunk // 2).unbind(2)
    return (low | (high << 4)).reshape(n, k // 2).contiguous()


def unpack_nibbles(packed: torch.Tensor, chunk: int) -> torch.Tensor:
    """Returns the values given to `pack_nibbles`."""
    n, half = packed.shape
    parts = packed.view(n, 2 * half // chunk, 1, chunk // 2)
    return torch.cat((parts & 15, parts >> 4), 2).reshape(n, 2 * half)


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrix as `dtype` (float32, bfloat16 or float16), each element rounded once.

    On CUDA: one launch on the current stream, no synchronization. Raises ConfigError for `DISAGG_KERNELS`.
    """
    if backend(weight.values.device) != "triton":
        return dequantized_reference(weight, dtype)
    (n, k), (block_rows, block_columns), chunk = weight.shape, weight.block, weight.chunk
    out = torch.empty(n, k, dtype=dtype, device=weight.values.device)
    if out.numel() == 0:
        return out
    grid = (-(-n // _BLOCK_ROWS), -(-k // chunk))
    with on_device(out):
        dequantize_kernel[grid](
            bits_of(weight),
            weight.scales,
            weight.zeros,
            out,
            n,
            k,
            block_rows,
            block_columns,
            weight.scales.shape[1],
            **kinds_of(weight),
            ROWS=_BLOCK_ROWS,
            CHUNK=chunk,
        )
    return out


def dequantized_reference(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Computes `dequantized` in plain torch, on any device."""
    values = unpack_nibbles(weight.values, weight.chunk) if weight.packed else weight.values
    wide = values.to(torch.float32)
    if weight.packed:
        wide = wide - (MIDDLE if weight.zeros is None else _spread(weight.zeros, weight))
    return (wide * _spread(weight.scales, weight)).to(dtype)


def _spread(numbers: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Returns one number for each element of the matrix; along a dimension with one block, the size may be 1."""
    found = numbers.to(torch.float32)
    for dim, (size, each) in enumerate(zip(weight.shape, weight.block, strict=True)):
        if found.shape[dim] > 1:
            found = found.repeat_interleave(each, dim).narrow(dim, 0, size)
    return found


def bits_of(weight: QuantizedWeight) -> torch.Tensor:
    """Returns the bytes of the values, as the kernels take them."""
    return weight.values.view(torch.uint8)


def kinds_of(weight: QuantizedWeight) -> dict[str, Any]:
    """Returns the constants of the kernels that name the type of the values."""
    return {"FP8": weight.values.dtype == torch.float8_e4m3fn, "PACKED": weight.packed}


_FP8_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 low, high, rest, factor, none;
    mov.b32 factor, 0x7b807b80;
    mov.b32 none, 0x80008000;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 rest, low, 0x7f007f00;
    shr.b32 rest, rest, 4;
    lop3.b32 low, low, 0x80008000, rest, 0xea;
    and.b32 rest, high, 0x7f007f00;
    shr.b32 rest, rest, 4;
    lop3.b32 high, high, 0x80008000, rest, 0xea;
    fma.rn.bf16x2 $0, low, factor, none;
    fma.rn.bf16x2 $1, high, factor, none;
    }""")
_FP8_TO_FLOAT16 = tl.constexpr("""{
    .reg .b32 low, high, rest, factor;
    mov.b32 factor, 0x5c005c00;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 rest, low, 0x7f007f00;
    shr.b32 rest, rest, 1;
    lop3.b32 low, low, 0x80008000, rest, 0xea;
    and.b32 rest, high, 0x7f007f00;
    shr.b32 rest, rest, 1;
    lop3.b32 high, high, 0x80008000, rest, 0xea;
    mul.f16x2 $0, low, factor;
    mul.f16x2 $1, high, factor;
    }""")
_INT8_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 low, high, base, less, minus;
    mov.b32 base, 0x43004300;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 low, $2, 0, 0x4140;
    prmt.b32 high, $2, 0, 0x4342;
    lop3.b32 less, low, 0x00800080, base, 0xea;
    lop3.b32 low, low, 0x007f007f, base, 0xea;
    fma.rn.bf16x2 $0, less, minus, low;
    lop3.b32 less, high, 0x00800080, base, 0xea;
    lop3.b32 high, high, 0x007f007f, base, 0xea;
    fma.rn.bf16x2 $1, less, minus, high;
    }""")
_NIBBLES_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 low, high, base, one, minus;
    mov.b32 base, 0x43004300;
    mov.b32 one, 0x3f803f80;
    mov.b32 minus, 0xc300c300;
    prmt.b32 low, $2, base, 0x5150;
    prmt.b32 high, $2, base, 0x5352;
    fma.rn.bf16x2 $0, low, one, minus;
    fma.rn.bf16x2 $1, high, one, minus;
    }""")
_NIBBLES_TO_FLOAT16 = tl.constexpr("""{
    .reg .b32 base, less;
    mov.b32 base, 0x64646464;
    mov.b32 less, 0x64006400;
    prmt.b32 $0, $2, base, 0x4140;
    prmt.b32 $1, $2, base, 0x4342;
    sub.f16x2 $0, $0, less;
    sub.f16x2 $1, $1, less;
    }""")


@triton.jit  # type: ignore[untyped-decorator]
def _assembled(bits, CODE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts bytes to `DTYPE` by assembly code for four bytes: `$2` has the bytes, `$0` and `$1` get two results
    each."""
    return tl.inline_asm_elementwise(CODE, "=&r,=&r,r", [bits], dtype=DTYPE.value, is_pure=True, pack=4)


@triton.jit  # type: ignore[untyped-decorator]
def from_fp8(bits, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts bytes of float8_e4m3fn to `DTYPE`, exactly. NaNs become 480.

    Sign, exponent and mantissa are moved to their places in the wider type. The result has the exponent's bias of the
    narrow type, subnormal numbers included, and is corrected by one multiplication with a power of two.
    """
    if _PLAIN or tl.float32 == DTYPE:
        wide = bits.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        found = half.to(tl.float32) * 256.0
    elif tl.bfloat16 == DTYPE:
        found = _assembled(bits, _FP8_TO_BFLOAT16, DTYPE)
    else:
        found = _assembled(bits, _FP8_TO_FLOAT16, DTYPE)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def from_int8(bits, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts bytes of int8 to `DTYPE`, exactly.

    The bits become the low bits of a float's mantissa, next to a large power of two, which is then subtracted.
    bfloat16 has 7 bits for them: the sign bit turns the subtracted 128 into 256.
    """
    if _PLAIN or tl.float32 == DTYPE:
        found = bits.to(tl.int8, bitcast=True).to(tl.float32)
    elif tl.bfloat16 == DTYPE:
        found = _assembled(bits, _INT8_TO_BFLOAT16, DTYPE)
    else:
        found = _assembled(bits, INT8_TO_FLOAT16, DTYPE)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def from_nibbles(bits, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts bytes below 16 to `DTYPE`, exactly, in the way of `from_int8`."""
    if _PLAIN or tl.float32 == DTYPE:
        found = bits.to(tl.float32)
    elif tl.bfloat16 == DTYPE:
        found = _assembled(bits, _NIBBLES_TO_BFLOAT16, DTYPE)
    else:
        found = _assembled(bits, _NIBBLES_TO_FLOAT16, DTYPE)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def from_bytes(bits, FP8: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts bytes of 8-bit values to `DTYPE`; float32 in the interpreter."""
    return from_fp8(bits, DTYPE) if FP8 else from_int8(bits, DTYPE)


@triton.jit  # type: ignore[untyped-decorator]
def dequantize_kernel(  # type: ignore[no-untyped-def]
    # tensors
    values,  # uint8 [n, k] or [n, k / 2]
    scales,
    zeros,  # uint8 or None
    out,  # [n, k]
    # sizes
    n,
    k,
    block_rows,
    block_columns,
    scale_stride,
    # meta
    FP8: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    PACKED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * CHUNK
    here = row < n
    place = (row // block_rows).to(tl.int64) * scale_stride + first // block_columns
    scale = tl.load(scales + place, mask=here, other=0.0).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[:, None] * k + first
    if PACKED:
        half = tl.arange(0, CHUNK // 2)[None, :]
        byte = values + row.to(tl.int64)[:, None] * (k // 2) + first // 2 + half
        bits = tl.load(byte, mask=here[:, None], other=0)
        zero = 8.0 if zeros is None else tl.load(zeros + place, mask=here, other=0).to(tl.float32)[:, None]
        low, high = ((bits & 15).to(tl.float32) - zero) * scale, ((bits >> 4).to(tl.float32) - zero) * scale
        tl.store(target + half, low.to(out.dtype.element_ty), mask=here[:, None])
        tl.store(target + CHUNK // 2 + half, high.to(out.dtype.element_ty), mask=here[:, None])
    else:
        column = tl.arange(0, CHUNK)[None, :]
        inside = here[:, None] & (first + column < k)
        bits = tl.load(values + row.to(tl.int64)[:, None] * k + first + column, mask=inside, other=0)
        wide = from_bytes(bits, FP8, tl.float32) * scale
        tl.store(target + column, wide.to(out.dtype.element_ty), mask=inside)
