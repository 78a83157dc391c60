"""Quantized values in words of 32 bits, and their conversion to floats.

Columns are divided into periods. A period of `words` words has `words` columns for each value of a word: value `i` of
word `j` is column `i * words + j`. So value `i` of adjacent words are adjacent columns. A kernel loads words in the
layout of a tensor core's operand and converts value `i` of two words to two adjacent elements of that operand: no
value moves to another thread or another register.

All conversions are exact: bfloat16 and float16 represent all values of the narrow types. In 16-bit products, the bits
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


def _codes(bits: int, registers: str, body: str, *, upper: bool = False) -> tl.constexpr:
    """Returns assembly code for each value of a word; see `_two_words`.

    - body: converts the values in the low `bits` of each half of `v`, with `upper` in the high ones, and writes `$0`.
      Other bits of `v` are undefined.
    """

    def code(number: int) -> str:
        byte, rest = divmod(number * bits, 8)
        # Both bytes of a half of `v` become the byte of the word; some conversions use the upper one.
        selected = f"prmt.b32 v, $1, $2, {0x4400 + 0x1111 * byte:#06x};\n"
        distance = 8 - bits - rest if upper else rest
        shifted = f"{'shl' if upper else 'shr'}.b32 v, v, {distance};\n" if distance else ""
        return "{\n.reg .b32 " + registers + ";\n" + selected + shifted + body + "}"

    return tl.constexpr(tuple(tl.constexpr(code(number)) for number in range(32 // bits)))


def _float_codes(bits: int, *, bfloat16: bool, magnitude: int, shift: int, factor: int) -> tl.constexpr:
    """Returns assembly code for floats of `bits`, converted to bfloat16 or float16.

    Each half of a register has the sign in the highest bit. Exponent and mantissa move to their places in the 16-bit
    type, and one multiplication corrects the exponent's bias.

    - magnitude: bits of exponent and mantissa in a half.
    - shift: distance by which they move.
    - factor: bits of the factor, a power of two, in the 16-bit type.
    """
    twice = 0x10001
    registers, none, multiply = "v, s, factor", "", "mul.f16x2 $0, v, factor;\n"
    if bfloat16:  # before Hopper, GPUs multiply pairs of bfloat16 only with a sum, here with -0
        registers, none, multiply = (
            f"{registers}, none",
            "mov.b32 none, 0x80008000;\n",
            "fma.rn.bf16x2 $0, v, factor, none;\n",
        )
    body = f"""mov.b32 factor, {factor * twice:#010x};
    {none}and.b32 s, v, {magnitude * twice:#010x};
    shr.b32 s, s, {shift};
    lop3.b32 v, v, 0x80008000, s, 0xea;
    {multiply}"""
    return _codes(bits, registers, body, upper=True)


_FP8_BFLOAT16 = _float_codes(8, bfloat16=True, magnitude=0x7F00, shift=4, factor=0x7B80)
_FP8_FLOAT16 = _float_codes(8, bfloat16=False, magnitude=0x7F00, shift=1, factor=0x5C00)
_FP4_BFLOAT16 = _float_codes(4, bfloat16=True, magnitude=0x7000, shift=6, factor=0x7E80)
_FP4_FLOAT16 = _float_codes(4, bfloat16=False, magnitude=0x7000, shift=3, factor=0x7400)
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
def _plainly(bits, BITS: tl.constexpr, FLOAT: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts 8 bits, or the 4 bits of a float, in int32, to float32. NaNs become 480.

    Sign, exponent and mantissa are moved to their places in float16. The result has the exponent's bias of the narrow
    type, subnormal numbers included, and is corrected by one multiplication with a power of two.
    """
    if FLOAT and BITS == 4:
        half = (((bits & 0x8) << 12) | ((bits & 0x7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
        found = half.to(tl.float32) * 16384.0
    elif FLOAT:
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


@triton.jit
def scale_of(scale):  # type: ignore[no-untyped-def]
    """Returns loaded scales as float32. uint8 are exponents of two with a bias of 127 (e8m0)."""
    if scale.dtype == tl.uint8:
        exponent = scale.to(tl.int32)
        # 2 ** -127 is a subnormal number.
        found = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    else:
        found = scale.to(tl.float32)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def value_of(  # type: ignore[no-untyped-def]
    words,
    added,
    NUMBER: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    FLOAT: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
):
    """Converts value `NUMBER` of each word to `DTYPE` (float32 in the interpreter), exactly.

    - added: result of `minus_zero` for each word, if values are integers of 4 bits.
    - FLOAT: whether values are floats, e4m3 or e2m1, and not integers.
    """
    if _PLAIN or tl.float32 == DTYPE:
        bits = (words >> (NUMBER * BITS)) & ((1 << BITS) - 1)
        found = bits.to(tl.float32) + added if BITS == 4 and not FLOAT else _plainly(bits, BITS, FLOAT)
    elif BITS == 4 and FLOAT:
        if tl.bfloat16 == DTYPE:
            found = _two_words(words, _FP4_BFLOAT16[NUMBER], DTYPE)
        else:
            found = _two_words(words, _FP4_FLOAT16[NUMBER], DTYPE)
    elif BITS == 4:
        if tl.bfloat16 == DTYPE:
            found = _two_words_and_added(words, added, _INT4_BFLOAT16[NUMBER], DTYPE)
        else:
            found = _two_words_and_added(words, added, _INT4_FLOAT16[NUMBER], DTYPE)
    elif FLOAT:
        if tl.bfloat16 == DTYPE:
            found = _two_words(words, _FP8_BFLOAT16[NUMBER], DTYPE)
        else:
            found = _two_words(words, _FP8_FLOAT16[NUMBER], DTYPE)
    elif tl.bfloat16 == DTYPE:
        found = _two_words(words, _INT8_BFLOAT16[NUMBER], DTYPE)
    else:
        found = _two_words(words, _INT8_FLOAT16[NUMBER], DTYPE)
    return found
