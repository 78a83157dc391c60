"""Quantized values in words of 32 bits, and their conversion to floats.

Columns are divided into periods. A period of `words` words has `words` columns for each value of a word: value `i` of
word `j` is column `i * words + j`. So value `i` of adjacent words are adjacent columns. A kernel loads words in the
layout of a tensor core's operand and converts value `i` of two words to two adjacent elements of that operand: no
value moves to another thread or another register.

All conversions are exact: bfloat16 and float16 represent all values of the 8-bit types. In 16-bit products, the bits
of a value become a float by integer operations on two values at a time.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.dispatch import INTERPRETED

MAX_PERIOD_WORDS = 64
"""Largest number of words of a period."""
MIN_PERIOD_WORDS = 16
"""Smallest number of words of a period, because a tensor core instruction sums as many columns."""
_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no assembly and cannot multiply bfloat16


@lru_cache
def period_words(columns: int, block_columns: int, bits: int) -> int:
    """Returns the number of words of a period for values of `bits`, of which `block_columns` share a scale.

    Columns of value `i` in a period share a scale, so the words divide `block_columns`, a multiple of
    `MIN_PERIOD_WORDS`. If no period divides all columns, the last one has words without columns.
    """
    for words in (MAX_PERIOD_WORDS, MAX_PERIOD_WORDS // 2):
        if columns % (words * 32 // bits) == 0 and (block_columns >= columns or block_columns % words == 0):
            return words
    return MIN_PERIOD_WORDS


def row_words(columns: int, words: int, bits: int) -> int:
    """Returns the number of words of a row; `words`: those of a period."""
    return -(-columns // (words * 32 // bits)) * words


def pack_words(values: torch.Tensor, words: int, bits: int) -> torch.Tensor:
    """Packs the low `bits` (8 or 4) of uint8 `[n, columns]` to int32 `[n, row_words]`.

    - words: words of a period.
    """
    n, columns = values.shape
    count = row_words(columns, words, bits)
    more = count * 32 // bits - columns
    whole = torch.nn.functional.pad(values, (0, more)) if more else values
    if bits == 4:
        low, high = whole.reshape(n, -1, 4, 2, words).unbind(3)
        whole = low | (high << 4)
    return whole.reshape(n, -1, 4, words).transpose(2, 3).contiguous().view(torch.int32).view(n, count)


def unpack_words(packed: torch.Tensor, columns: int, words: int, bits: int) -> torch.Tensor:
    """Returns the values given to `pack_words`."""
    n = packed.shape[0]
    stored = packed.view(torch.uint8).view(n, -1, words, 4).transpose(2, 3)
    if bits == 4:
        stored = torch.stack((stored & 15, stored >> 4), 3)
    return stored.reshape(n, -1)[:, :columns]


def _codes(bits: int, registers: str, body: str) -> tl.constexpr:
    """Returns assembly code for each value of a word; see `_two_words`.

    - body: converts the values in the low `bits` of each half of `v`, and writes `$0`.
    """

    def code(number: int) -> str:
        byte, rest = divmod(number * bits, 8)
        # Both bytes of a half of `v` become the byte of the word; some conversions use the upper one.
        selected = f"prmt.b32 v, $1, $2, {0x4400 + 0x1111 * byte:#06x};\n"
        shifted = f"shr.b32 v, v, {rest};\n" if rest else ""
        return "{\n.reg .b32 " + registers + ";\n" + selected + shifted + body + "}"

    return tl.constexpr(tuple(tl.constexpr(code(number)) for number in range(32 // bits)))


_FP8_BFLOAT16 = _codes(
    8,
    "v, s, factor, none",
    """mov.b32 factor, 0x7b807b80;
    mov.b32 none, 0x80008000;
    and.b32 s, v, 0x7f007f00;
    shr.b32 s, s, 4;
    lop3.b32 v, v, 0x80008000, s, 0xea;
    fma.rn.bf16x2 $0, v, factor, none;
    """,
)
_FP8_FLOAT16 = _codes(
    8,
    "v, s, factor",
    """mov.b32 factor, 0x5c005c00;
    and.b32 s, v, 0x7f007f00;
    shr.b32 s, s, 1;
    lop3.b32 v, v, 0x80008000, s, 0xea;
    mul.f16x2 $0, v, factor;
    """,
)
_INT8_BFLOAT16 = _codes(
    8,
    "v, less, base, minus",
    """mov.b32 base, 0x43004300;
    mov.b32 minus, 0xbf80bf80;
    lop3.b32 less, v, 0x00800080, base, 0xea;
    lop3.b32 v, v, 0x007f007f, base, 0xea;
    fma.rn.bf16x2 $0, less, minus, v;
    """,
)
_INT8_FLOAT16 = _codes(
    8,
    "v, base",
    """mov.b32 base, 0x64806480;
    lop3.b32 v, v, 0x00ff00ff, base, 0x6a;
    sub.f16x2 $0, v, base;
    """,
)
_INT4_BFLOAT16 = _codes(
    4,
    "v, base, one",
    """mov.b32 base, 0x43004300;
    mov.b32 one, 0x3f803f80;
    lop3.b32 v, v, 0x000f000f, base, 0xea;
    fma.rn.bf16x2 $0, v, one, $3;
    """,
)
_INT4_FLOAT16 = _codes(
    4,
    "v, base",
    """mov.b32 base, 0x64006400;
    lop3.b32 v, v, 0x000f000f, base, 0xea;
    add.f16x2 $0, v, $3;
    """,
)


@triton.jit  # type: ignore[untyped-decorator]
def _two_words(words, CODE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts words by assembly code for two of them: `$1` and `$2` have the words, `$0` gets two results."""
    return tl.inline_asm_elementwise(CODE, "=&r,r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2)


@triton.jit  # type: ignore[untyped-decorator]
def _two_words_and_added(words, added, CODE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """As `_two_words`; `$3` and `$4` have the number that is added to the values of each word, in both halves.

    The code uses `$3` only: both words lie in one row, so the numbers are equal.
    """
    return tl.inline_asm_elementwise(
        CODE, "=&r,r,r,r,r", [words, added], dtype=DTYPE.value, is_pure=True, pack=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def _plainly(bits, FP8: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts 8 bits, in int32, to float32. NaNs become 480.

    Sign, exponent and mantissa are moved to their places in float16. The result has the exponent's bias of the narrow
    type, subnormal numbers included, and is corrected by one multiplication with a power of two.
    """
    if FP8:
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
        found = half.to(tl.float32) * 256.0
    else:
        found = bits.to(tl.int8).to(tl.float32)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def minus_zero(zero, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Returns what `value_of` takes for zero points: the number that is added to a converted 4-bit value.

    That is `-zero`; with assembly twice `-(128 + zero)` (bfloat16) or `-(1024 + zero)` (float16), as bits.
    """
    if _PLAIN or tl.float32 == DTYPE:
        found = -zero.to(tl.float32)
    else:
        base: tl.constexpr = -0x3CFF3D00 if tl.bfloat16 == DTYPE else -0x1BFF1C00
        found = base + zero.to(tl.int32) * 0x10001
    return found


@triton.jit  # type: ignore[untyped-decorator]
def value_of(words, added, NUMBER: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts value `NUMBER` of each word to `DTYPE` (float32 in the interpreter), exactly.

    - added: result of `minus_zero` for each word, if `BITS` is 4.
    """
    if _PLAIN or tl.float32 == DTYPE:
        bits = (words >> (NUMBER * BITS)) & ((1 << BITS) - 1)
        found = bits.to(tl.float32) + added if BITS == 4 else _plainly(bits, FP8)
    elif BITS == 4:
        if tl.bfloat16 == DTYPE:
            found = _two_words_and_added(words, added, _INT4_BFLOAT16[NUMBER], DTYPE)
        else:
            found = _two_words_and_added(words, added, _INT4_FLOAT16[NUMBER], DTYPE)
    elif FP8:
        if tl.bfloat16 == DTYPE:
            found = _two_words(words, _FP8_BFLOAT16[NUMBER], DTYPE)
        else:
            found = _two_words(words, _FP8_FLOAT16[NUMBER], DTYPE)
    elif tl.bfloat16 == DTYPE:
        found = _two_words(words, _INT8_BFLOAT16[NUMBER], DTYPE)
    else:
        found = _two_words(words, _INT8_FLOAT16[NUMBER], DTYPE)
    return found
