"""The compiled products read weights 16 bytes at a time, and use no conversion instructions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from attention_code import asynchronous_bytes, compiled

from kernels.layers.quantized_linear import quantized_linear_kernel
from kernels.layers.quantized_weight import dequantize_kernel


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_product(kind: str, dtype: torch.dtype) -> None:
    arguments = {
        "x": dtype,
        "values": torch.uint8,
        "scales": torch.float32,
        "zeros": None,
        "bias": None,
        "out": dtype,
        "m": 63,
        "n": 4096,
        "k": 4096,
        "block_rows": 128,
        "block_columns": 128,
        "scale_stride": 32,
        "FP8": kind == "fp8",
        "PACKED": kind == "int4",
        "WHOLE": True,
        "BLOCKS": True,
        "SPLITS": 1,
        "ROWS": 64,
        "COLUMNS": 64,
        "CHUNK": 128,
    }
    ptx = compiled(quantized_linear_kernel, arguments, num_warps=4, num_stages=4).asm["ptx"]
    assert asynchronous_bytes(ptx) >= {16}  # the copies of scales are narrow
    assert "mma" in ptx
    assert not re.search(r"cvt\.\w*\.?(bf16|f16|f32)\.(s8|u8|s16|u16|s32|u32)|e4m3", ptx)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_dequantize(kind: str) -> None:
    arguments = {
        "values": torch.uint8,
        "scales": torch.float32,
        "zeros": None,
        "out": torch.bfloat16,
        "n": 4096,
        "k": 4096,
        "block_rows": 128,
        "block_columns": 128,
        "scale_stride": 32,
        "FP8": kind == "fp8",
        "PACKED": kind == "int4",
        "ROWS": 16,
        "CHUNK": 128,
    }
    ptx = compiled(dequantize_kernel, arguments, num_warps=4).asm["ptx"]
    assert set(re.findall(r"st\.global[.\w]*", ptx)) == {"st.global.v4.b32"}
