"""The compiled kernels of experts: asynchronous loads of 16 bytes, tensor cores, and tiles that fit shared memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_code import asynchronous_bytes, compiled
from tensor_core_code import loops_of, overwritten_operands
from triton.language import constexpr

from kernels.layers.expert_matmul import expert_matmul_kernel, expert_tile
from kernels.layers.expert_quantized import TILES, expert_quantized_kernel
from kernels.layers.expert_rows import expert_rows_kernel
from kernels.layers.expert_sum import expert_sum_kernel
from kernels.layers.matmul_tiles import MatmulTile
from kernels.layers.quantized_linear import QuantizedTile

SHARED_BYTES = 227 * 1024
"""Shared memory that a program may use on Hopper."""


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def product(tile: MatmulTile, dtype: torch.dtype) -> Any:
    arguments: dict[str, Any] = dict.fromkeys(("x", "weights", "out"), dtype)
    arguments |= {
        "pairs": torch.int32,
        "owners": torch.int32,
        "bias": None,
        "blocks": 7,
        "n": 1536,
        "k": 2048,
    }
    arguments |= {"x_row_stride": 2048, "weights_expert_stride": 1536 * 2048, "weights_column_stride": 2048}
    # Triton makes a constant of a stride of 1.
    arguments |= {"WHOLE": True, "CHOICES": 8, "GROUP_M": 8, "TRANSPOSED": tile.transposed}
    arguments |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "SUMMED": tile.summed}
    ordered = {name: arguments.get(name, constexpr(1)) for name in expert_matmul_kernel.arg_names}
    return compiled(expert_matmul_kernel, ordered, num_warps=tile.warps, num_stages=tile.stages)


@pytest.mark.parametrize("pairs", [512, 4096, 8192, 65536])
def test_products_load_16_bytes_at_a_time(pairs: int) -> None:
    tile = expert_tile(pairs, 128, torch.bfloat16)
    assert tile.rows == min(128, pairs // 128 // 16 * 16 or 16)
    kernel = product(tile, torch.bfloat16)
    assert kernel.metadata.shared <= SHARED_BYTES
    assert asynchronous_bytes(kernel.asm["ptx"]) == {16}
    assert "mma" in kernel.asm["ptx"]


def test_float32_is_not_rounded_to_tf32() -> None:
    kernel = product(expert_tile(512, 128, torch.float32), torch.float32)
    assert kernel.metadata.shared <= SHARED_BYTES
    assert "mma" not in kernel.asm["ptx"]
    assert "fma.rn.f32" in kernel.asm["ptx"]


def test_small_kernels() -> None:
    arguments = {"chosen": torch.int64, "rows": torch.int32, "owners": torch.int32, "pairs": 513, "blocks": 7}
    constants = {"BINS": 128, "BLOCK_ROWS": 16, "LOADED": 512}
    assert "bar.sync" in compiled(expert_rows_kernel, arguments | constants, num_warps=4).asm["ptx"]
    tensors = {"x": torch.bfloat16, "weights": torch.bfloat16, "chosen": torch.int64, "out": torch.bfloat16}
    numbers = {"columns": 2048, "experts": 128, "CHOICES": 8, "BLOCK": 1024}
    ptx = compiled(expert_sum_kernel, {**tensors, **numbers}, num_warps=4, fp_fusion=False).asm["ptx"]
    assert "st.global.v4.b32" in ptx


def quantized_product(kind: str, dtype: torch.dtype, tile: QuantizedTile) -> Any:
    """The kernel of quantized experts: Qwen3 30B A3B in fp8 with blocks of 128, or gpt-oss in MXFP4."""
    is_fp8 = kind == "fp8"
    n, k, period = (1536, 2048, 64) if is_fp8 else (5760, 2880, 16)
    bits, groups = (8, 16) if is_fp8 else (4, 90)
    arguments: dict[str, Any] = {"x": dtype, "words": torch.int32}
    arguments |= {"scales": torch.float32 if is_fp8 else torch.uint8, "zeros": None}
    arguments |= {"pairs": torch.int32, "owners": torch.int32, "bias": None, "out": dtype, "blocks": 7}
    row_words = -(-k // (period * 32 // bits)) * period
    arguments |= {"n": n, "k": k, "row_words": row_words, "scale_stride": groups}
    arguments |= {"block_rows": 128 if is_fp8 else constexpr(1), "BITS": bits, "FLOAT": True}
    arguments |= {"PERIOD": period, "BLOCK": 128 if is_fp8 else 32, "PER": 2, "WHOLE": is_fp8}
    arguments |= {"SHARED": is_fp8, "CHOICES": 8, "GROUP_M": 8, "ROWS": tile.rows, "COLUMNS": tile.columns}
    arguments |= {"WORDS": min(tile.words, period), "SWAPPED": tile.swapped}
    ordered = {name: arguments[name] for name in expert_quantized_kernel.arg_names}
    return compiled(expert_quantized_kernel, ordered, num_warps=tile.warps, num_stages=tile.stages)


@pytest.mark.parametrize(
    ("kind", "number", "dtype"),
    [
        ("fp8", 0, torch.bfloat16),
        pytest.param("fp8", 1, torch.float16, marks=pytest.mark.slow),
        ("fp8", 2, torch.bfloat16),
        ("fp4", 0, torch.bfloat16),
        pytest.param("fp4", 1, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_quantized_products_convert_in_registers(kind: str, number: int, dtype: torch.dtype) -> None:
    kernel = quantized_product(kind, dtype, TILES[8 if kind == "fp8" else 4][number])
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_BYTES
    assert "mma" in ptx
    assert asynchronous_bytes(ptx) >= {16}
    assert not re.search(r"cvt\.\w*\.?(bf16|f16|f32)\.(s8|u8|s16|u16|s32|u32)|e4m3|e2m1", ptx)
    assert not overwritten_operands(ptx)
    (loop,) = [one for one in loops_of(ptx) if "mma" in one]
    assert "st.shared" not in loop, "converted values stay in registers"
