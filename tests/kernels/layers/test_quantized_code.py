"""The compiled products read weights 16 bytes at a time, use no conversion instructions, and let no product run on
while the next step writes to its registers."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_code import asynchronous_bytes, compiled
from slow_parameters import sampled
from tensor_core_code import loops_of, overwritten_operands

from kernels.layers.quantized_linear import quantized_linear_kernel
from kernels.layers.quantized_weight import dequantize_kernel

CONVERSION = r"cvt\.\w*\.?(bf16|f16|f32)\.(s8|u8|s16|u16|s32|u32)|e4m3"
PER = {"fp8": 2, "int8": 4, "int4": 2}
"""Values of a word that share a scale, with blocks of 128 columns; int8 has one scale in each row."""


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def product_of(
    kind: str,
    dtype: torch.dtype,
    *,
    rows: int,
    swapped: bool = False,
    zeros: bool = False,
    block: tuple[int, int] | None = None,
) -> Any:
    """A compiled product of up to `rows` rows, with scales of blocks except for int8.

    - block: rows and columns of a block, by default those that are usual for `kind` and `zeros`.
    """
    usual = 128 if kind == "fp8" else 1, 0 if kind == "int8" or zeros else 128
    block_rows, block_columns = block or usual
    bits = 4 if kind == "int4" else 8
    arguments = {
        "x": dtype,
        "words": torch.int32,
        "scales": torch.float32,
        "zeros": torch.uint8 if zeros else None,
        "bias": None,
        "out": dtype,
        "parts": None,
        "arrived": torch.int32,
        "m": rows - 1,
        "n": 4096,
        "k": 4096,
        "row_words": 4096 * bits // 32,
        "block_rows": block_rows,
        "scale_stride": 1 if kind == "int8" else 32,
        "BITS": bits,
        "FLOAT": kind == "fp8",
        "PERIOD": 64,
        "BLOCK": block_columns,
        "PER": PER[kind] if block_columns or not zeros else 8,
        "WHOLE": True,
        "SHARED": block_rows == 128,
        "SPLITS": 1,
        "ROWS": rows,
        "COLUMNS": 64,
        "WORDS": 64,
        "SWAPPED": swapped,
    }
    return compiled(quantized_linear_kernel, arguments, num_warps=4, num_stages=3)


def ptx_of(kind: str, dtype: torch.dtype, *, rows: int, swapped: bool = False, zeros: bool = False) -> str:
    """The code of `product_of`."""
    return str(product_of(kind, dtype, rows=rows, swapped=swapped, zeros=zeros).asm["ptx"])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    sampled(
        itertools.product(["fp8", "int8", "int4"], [torch.bfloat16, torch.float16]),
        # The next test converts all kinds to bfloat16.
        lambda kind, dtype: kind == "fp8" or dtype is torch.float16,
    ),
)
def test_few_rows(kind: str, dtype: torch.dtype) -> None:
    ptx = ptx_of(kind, dtype, rows=16, swapped=kind != "int4")
    assert asynchronous_bytes(ptx) >= {16}  # the copies of scales are narrow
    assert "mma" in ptx
    assert "ld.shared.b8" not in ptx
    assert not re.search(CONVERSION, ptx)


@pytest.mark.parametrize(("kind", "zeros"), [("fp8", False), ("int8", False), ("int4", True)])
def test_each_step_waits_for_its_products(kind: str, zeros: bool) -> None:
    """With one scale in a row, sums pass from step to step without another use that would wait."""
    ptx = ptx_of(kind, torch.bfloat16, rows=64, zeros=zeros)
    (loop,) = [one for one in loops_of(ptx) if "wgmma.mma_async" in one]
    after = loop[loop.rindex("wgmma.mma_async") :]
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+0;", after)
    assert asynchronous_bytes(ptx) >= {16}
    assert not re.search(CONVERSION, loop)
    assert not overwritten_operands(ptx)
    assert overwritten_operands(re.sub(r"wgmma\.wait_group\S*\s+0;", "", ptx)), "without waits they are found"


@pytest.mark.parametrize("block", [(128, 128), (1, 128)])
def test_zero_points_need_no_more_memory(block: tuple[int, int]) -> None:
    """Three stages of a product of 64 rows fill the shared memory of a Hopper GPU to 1 %."""
    with_zeros, without = (
        product_of("int4", torch.bfloat16, rows=64, zeros=zeros, block=block).metadata.shared
        for zeros in (True, False)
    )
    assert with_zeros == without <= 227 << 10


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_dequantize(kind: str) -> None:
    bits = 4 if kind == "int4" else 8
    arguments = {
        "words": torch.int32,
        "scales": torch.float32,
        "zeros": None,
        "out": torch.bfloat16,
        "n": 4096,
        "k": 4096,
        "row_words": 4096 * bits // 32,
        "block_rows": 128,
        "scale_stride": 32,
        "BITS": bits,
        "FLOAT": kind == "fp8",
        "PERIOD": 64,
        "BLOCK": 128,
        "PER": 2,
        "WHOLE": True,
        "ROWS": 16,
    }
    ptx = compiled(dequantize_kernel, arguments, num_warps=4).asm["ptx"]
    assert set(re.findall(r"st\.global[.\w]*", ptx)) == {"st.global.v4.b32"}
    assert "ld.global.v4.b32" in ptx
    assert "st.shared" not in ptx
