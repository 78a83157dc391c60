"""Quantized values in words of 32 bits, as the kernel of products reads them, and their conversion to floats.

The values of a word belong to columns that are `place_words` apart, so value `i` of adjacent words are adjacent
columns. A kernel loads words in the layout of a tensor core's operand and converts value `i` of two words to two
adjacent elements of that operand: no value moves to another thread or another register.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dispatch import INTERPRETED
from kernels.layers.quantized_weight import from_bytes

MAX_PERIOD_WORDS = 64
"""Largest number of words that the columns of a period fill."""
MIN_PERIOD_WORDS = 16
"""Smallest number of words of a period, because a tensor core instruction sums as many columns."""
_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter runs no assembly and cannot multiply bfloat16


def period_words(columns: int, block_columns: int, values: int) -> int:
    """Returns the number of words of a period of columns; 0 if no number fits.

    A period of `values` (of a word) times as many columns divides all columns. Columns of value `i` in a period share
    a scale, and scales either divide a period or are divided by it.
    """
    words = MAX_PERIOD_WORDS
    while words >= MIN_PERIOD_WORDS:
        period = words * values
        blocks = block_columns >= columns or (
            block_columns % words == 0 and (period % block_columns == 0 or block_columns % period == 0)
        )
        if columns % period == 0 and blocks:
            return words
        words //= 2
    return 0


def pack_words(values: torch.Tensor, words: int, bits: int) -> torch.Tensor:
    """Packs uint8 `[n, k]` with `bits` (8 or 4) significant bits to int32 `[n, k / values of a word]`.

    Value `i` of word `j` in a period is column `i * words + j` of that period.
    """
    n, k = values.shape
    each = 32 // bits
    parts = values.view(n, k // (words * each), each, words).to(torch.int64)
    shifts = torch.arange(0, 32, bits, device=values.device)[:, None]
    found = (parts << shifts).sum(2)
    return (found - ((found >> 31) << 32)).to(torch.int32).reshape(n, k // each)


def unpack_words(packed: torch.Tensor, words: int, bits: int) -> torch.Tensor:
    """Returns the values given to `pack_words`."""
    n, count = packed.shape
    shifts = torch.arange(0, 32, bits, device=packed.device)[:, None]
    parts = packed.view(n, count // words, 1, words) >> shifts
    return (parts & ((1 << bits) - 1)).to(torch.uint8).reshape(n, count * (32 // bits))


def _assembly(registers: str, body: str) -> tl.constexpr:
    return tl.constexpr("{\n.reg .b32 " + registers + ";\n" + body + "}")


def _selected(byte: int) -> str:
    """Assembly that sets both bytes of each half of `v` to byte `byte` of a word."""
    return f"prmt.b32 v, $1, $2, {0x4400 + 0x1111 * byte:#06x};\n"


def _fp8_bfloat16(byte: int) -> tl.constexpr:
    return _assembly(
        "v, s, factor, none",
        _selected(byte)
        + """mov.b32 factor, 0x7b807b80;
        mov.b32 none, 0x80008000;
        and.b32 s, v, 0x7f007f00;
        shr.b32 s, s, 4;
        lop3.b32 v, v, 0x80008000, s, 0xea;
        fma.rn.bf16x2 $0, v, factor, none;
        """,
    )


def _fp8_float16(byte: int) -> tl.constexpr:
    return _assembly(
        "v, s, factor",
        _selected(byte)
        + """mov.b32 factor, 0x5c005c00;
        and.b32 s, v, 0x7f007f00;
        shr.b32 s, s, 1;
        lop3.b32 v, v, 0x80008000, s, 0xea;
        mul.f16x2 $0, v, factor;
        """,
    )


def _int8_bfloat16(byte: int) -> tl.constexpr:
    return _assembly(
        "v, less, base, minus",
        _selected(byte)
        + """mov.b32 base, 0x43004300;
        mov.b32 minus, 0xbf80bf80;
        lop3.b32 less, v, 0x00800080, base, 0xea;
        lop3.b32 v, v, 0x007f007f, base, 0xea;
        fma.rn.bf16x2 $0, less, minus, v;
        """,
    )


def _int8_float16(byte: int) -> tl.constexpr:
    return _assembly(
        "v, base",
        _selected(byte)
        + """mov.b32 base, 0x64806480;
        lop3.b32 v, v, 0x00ff00ff, base, 0x6a;
        sub.f16x2 $0, v, base;
        """,
    )


def _int4_bfloat16(number: int) -> tl.constexpr:
    return _assembly(
        "v, base, one",
        _selected(number // 2)
        + ("shr.b32 v, v, 4;\n" if number % 2 else "")
        + """mov.b32 base, 0x43004300;
        mov.b32 one, 0x3f803f80;
        lop3.b32 v, v, 0x000f000f, base, 0xea;
        fma.rn.bf16x2 $0, v, one, $3;
        """,
    )


def _int4_float16(number: int) -> tl.constexpr:
    return _assembly(
        "v, base",
        _selected(number // 2)
        + ("shr.b32 v, v, 4;\n" if number % 2 else "")
        + """mov.b32 base, 0x64006400;
        lop3.b32 v, v, 0x000f000f, base, 0xea;
        add.f16x2 $0, v, $3;
        """,
    )


_FP8_BFLOAT16 = tl.constexpr(tuple(map(_fp8_bfloat16, range(4))))
_FP8_FLOAT16 = tl.constexpr(tuple(map(_fp8_float16, range(4))))
_INT8_BFLOAT16 = tl.constexpr(tuple(map(_int8_bfloat16, range(4))))
_INT8_FLOAT16 = tl.constexpr(tuple(map(_int8_float16, range(4))))
_INT4_BFLOAT16 = tl.constexpr(tuple(map(_int4_bfloat16, range(8))))
_INT4_FLOAT16 = tl.constexpr(tuple(map(_int4_float16, range(8))))


@triton.jit  # type: ignore[untyped-decorator]
def _two_words(words, CODE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Converts words by assembly code for two of them: `$1` and `$2` have the words, `$0` gets two results."""
    return tl.inline_asm_elementwise(CODE, "=&r,r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2)


@triton.jit  # type: ignore[untyped-decorator]
def _two_words_and_added(words, added, CODE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """As `_two_words`; `$3` and `$4` have a number to add, twice."""
    return tl.inline_asm_elementwise(
        CODE, "=&r,r,r,r,r", [words, added], dtype=DTYPE.value, is_pure=True, pack=2
    )


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
        found = bits.to(tl.float32) + added if BITS == 4 else from_bytes(bits.to(tl.uint8), FP8, tl.float32)
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
