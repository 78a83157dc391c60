"""The compiled attention kernels copy K and V 16 bytes at a time, convert quantized values once and multiply on
tensor cores.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from attention_code import accesses_before_waiting, asynchronous_bytes, compiled
from slow_parameters import sampled, thinned
from tensor_core_code import overwritten_operands

from disagg.core.types import SCALE_BYTES
from kernels.attention.decode import decode_kernel, tile_of
from kernels.attention.kv_write import write_kernel
from kernels.attention.prefill import (
    SPARE_SHARED_BYTES,
    PrefillTile,
    fixed_tile_of,
    prefill_kernel,
    prefill_tile_of,
    tile_shared_bytes,
)
from kernels.attention.splits import join_kernel
from kernels.copy.quantize import quantize_kernel

HEADS, GROUP, DIM = 8, 4, 128
FIXED_TILE = fixed_tile_of(torch.bfloat16, 8192, 4096, DIM, torch.device("cpu"))
SHARED_BYTES = 232448
"""That a program may have on Hopper."""
PARTIALS = {"partial_values": torch.float32, "partial_levels": torch.float32, "used_splits": torch.int32}


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def pool(dtype: torch.dtype, scaled: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of K and V, and the constants that go with them."""
    scales = torch.bfloat16 if scaled else None
    # As in `MHATokenToKVPool`.
    row, scale = (2 * (DIM + SCALE_BYTES), DIM + SCALE_BYTES) if scaled else (DIM, 0)
    strides = {
        "SLOT_STRIDE": HEADS * row,
        "HEAD_STRIDE": row,
        "SCALE_SLOT_STRIDE": HEADS * scale,
        "SCALE_HEAD_STRIDE": scale,
    }
    return {"k": dtype, "v": dtype, "k_scales": scales, "v_scales": scales}, strides


def layer(window: int | None, softcap: float | None) -> dict[str, Any]:
    strides = {"q_stride": HEADS * GROUP * DIM, "q_head_stride": DIM, "table_stride": 4096}
    return {**strides, "scaling": 0.1, "softcap": softcap, "window": window}


def decode(dtype: torch.dtype, storage: torch.dtype, fp8: Any = None, **more: Any) -> str:
    kv, strides = pool(storage, scaled=storage.itemsize == 1)
    tile = tile_of(dtype, storage.itemsize, DIM)
    arguments = {
        "q": dtype,
        **kv,
        "table": torch.int32,
        "rows": torch.int64,
        "lengths": torch.int64,
        "sinks": more.get("sinks"),
        "out": dtype,
        **PARTIALS,
        **layer(more.get("window"), more.get("softcap")),
        **{"splits": 5, "least_tokens": 4096},
        **{"KV_HEADS": HEADS, "GROUP": GROUP, "PARTS": 1, "K_DIM": DIM, "V_DIM": DIM},
        **strides,
        **{"FP8": fp8, "FIXED": more.get("fixed", False)},
        **{"BLOCK_ROWS": 16, "BLOCK_TOKENS": tile.tokens, "BLOCK_K": DIM, "BLOCK_V": DIM},
    }
    ptx = str(compiled(decode_kernel, arguments, num_warps=tile.warps, num_stages=tile.stages).asm["ptx"])
    assert not accesses_before_waiting(ptx)
    return ptx


@pytest.mark.parametrize("fixed", [False, True])
def test_decode_reads_16_bytes_at_a_time(fixed: bool) -> None:
    ptx = decode(torch.bfloat16, torch.bfloat16, fixed=fixed)
    assert 16 in asynchronous_bytes(ptx)
    assert "mma.sync" in ptx


@pytest.mark.parametrize(
    ("dtype", "storage", "fp8"),
    sampled(
        [
            (dtype, *codes)
            for dtype in (torch.bfloat16, torch.float16)
            for codes in ((torch.int8, None), (torch.uint8, tl.float8e4nv), (torch.uint8, tl.float8e5))
        ],
        lambda dtype, storage, fp8: (dtype is torch.float16) == (fp8 is tl.float8e4nv),
    ),
)
def test_codes_are_converted_before_they_are_shared(
    dtype: torch.dtype, storage: torch.dtype, fp8: Any
) -> None:
    """Else the second product would fetch V byte by byte: twice the instructions, and they are what limits it."""
    ptx = decode(dtype, storage, fp8)
    assert "ldmatrix" in ptx
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx
    assert not re.search(r"ld\.shared\.[bsu]8", ptx)
    assert "cvt.rn.f32.s8" not in ptx


def test_decode_in_float32_is_exact() -> None:
    assert "tf32" not in decode(torch.float32, torch.float32, window=100, softcap=3.0, sinks=torch.float32)


@pytest.mark.parametrize("fixed", [False, True])
def test_the_second_kernel_compiles(fixed: bool) -> None:
    arguments = {
        **PARTIALS,
        **dict.fromkeys(("sinks", "out"), torch.bfloat16),
        "splits": 128,
    }
    constants = {"V_DIM": 96, "FIXED": fixed, "BLOCK_SPLITS": 4 if fixed else 32, "BLOCK_V": 128}
    ptx = compiled(join_kernel, {**arguments, **constants}, num_warps=4).asm["ptx"]
    assert not accesses_before_waiting(ptx)


def prefill(
    storage: torch.dtype, fp8: Any = None, window: int | None = None, tile: PrefillTile | None = None
) -> str:
    """`tile`: of fixed splits."""
    kv, strides = pool(storage, scaled=storage.itemsize == 1)
    fixed = tile is not None
    tile = tile or prefill_tile_of(torch.bfloat16, 8192, DIM, storage.itemsize, shared_bytes=SHARED_BYTES)
    arguments = {
        "q": torch.bfloat16,
        **kv,
        "table": torch.int32,
        **dict.fromkeys(("rows", "firsts", "starts", "counts"), torch.int64),
        "sinks": None,
        "out": torch.bfloat16,
        **PARTIALS,
        "tokens": 100,
        **layer(window, None),
        **{"splits": 8, "least_tokens": 256},
        **{"GROUP": GROUP, "K_DIM": DIM, "V_DIM": DIM},
        **strides,
        **{"FP8": fp8, "FIXED": fixed},
        **{"BLOCK_ROWS": tile.rows, "BLOCK_TOKENS": tile.tokens, "BLOCK_K": DIM, "BLOCK_V": DIM},
    }
    found = compiled(prefill_kernel, arguments, num_warps=tile.warps, num_stages=tile.stages)
    assert found.metadata.shared <= tile_shared_bytes(tile, DIM) + SPARE_SHARED_BYTES <= SHARED_BYTES
    ptx = str(found.asm["ptx"])
    assert not overwritten_operands(ptx)
    return ptx


@pytest.mark.parametrize(
    ("tile", "window"),
    sampled(
        itertools.product([None, FIXED_TILE], [None, 1000]),
        lambda tile, window: (tile is None) == (window is None),
    ),
)
def test_prefill_uses_the_tensor_cores_of_hopper(tile: PrefillTile | None, window: int | None) -> None:
    ptx = prefill(torch.bfloat16, window=window, tile=tile)
    assert "wgmma" in ptx
    assert 16 in asynchronous_bytes(ptx)


@pytest.mark.parametrize(("storage", "fp8"), [(torch.int8, None), (torch.uint8, tl.float8e4nv)])
def test_prefill_multiplies_codes_as_float16(storage: torch.dtype, fp8: Any) -> None:
    ptx = prefill(storage, fp8)
    assert re.search(r"wgmma\S*\.f32\.f16\.f16", ptx)
    assert not re.search(r"ld\.shared\.[bsu]8", ptx)


@pytest.mark.parametrize(
    ("storage", "fp8", "limit"),
    [(torch.bfloat16, None, 0.0), (torch.int8, None, 127.0), (torch.uint8, tl.float8e4nv, 448.0)],
)
def test_kv_write_compiles(storage: torch.dtype, fp8: Any, limit: float) -> None:
    kv, strides = pool(storage, scaled=limit > 0)
    arguments = {
        "k": torch.bfloat16,
        "v": torch.bfloat16,
        "slots": torch.int64,
        "k_pool": kv["k"],
        "v_pool": kv["v"],
        "k_scales": kv["k_scales"],
        "v_scales": kv["v_scales"],
        "tokens": 100,
        **dict.fromkeys(("k_stride", "v_stride"), HEADS * DIM),
        **{"k_head_stride": DIM, "v_head_stride": DIM},
    }
    arguments = {name: arguments[name] for name in write_kernel.arg_names if name in arguments}
    constants = {"HEADS": HEADS, "K_DIM": DIM, "V_DIM": DIM, "HEAD_DIM": DIM, **strides}
    constants |= {"LIMIT": limit, "SMALLEST": 1e-30, "FP8": fp8, "BLOCK_ROWS": 16, "BLOCK": DIM}
    ptx = compiled(write_kernel, {**arguments, **constants}, num_warps=4).asm["ptx"]
    assert not accesses_before_waiting(ptx)
    assert ("div.rn" in ptx) == (limit > 0)


@pytest.mark.parametrize(
    ("codes", "fenced", "summed"),
    thinned(
        [(None, 127.0), (tl.float8e4nv, 448.0), (tl.float8e5, 57344.0)], [False, True], [False, True], by=3
    ),
)
def test_quantizing_on_the_way_reads_16_bytes_at_a_time(
    codes: tuple[Any, float], fenced: bool, summed: bool
) -> None:
    """Of `codes`: the type, and the largest value."""
    fp8, limit = codes
    arguments = {
        "source": torch.bfloat16,
        "source_slots": torch.int32,
        "quantized": torch.int8 if fp8 is None else torch.uint8,
        "scales": torch.bfloat16,
        "target_slots": torch.int32 if fenced else None,
        "fence": torch.int64 if fenced else None,
        "parts": torch.int64 if summed else None,
        **{"tokens": 1001, "source_pool_tokens": 30001, "target_pool_tokens": 1001, "ticket": 7},
        **{"first_plane": 6, "first_token": 77, "first_unit": 3},
    }
    constants = {
        "HEADS": HEADS,
        "DIM": DIM,
        "SOURCE_TOKEN": HEADS * DIM,
        "TARGET_TOKEN": HEADS * 2 * (DIM + 2),
    }
    constants |= {
        "HEAD_BYTES": 2 * (DIM + 2),
        "SCALE_BYTES": 2,
        "LIMIT": limit,
        "SMALLEST": 1e-30,
        "FP8": fp8,
    }
    constants |= {"BLOCK_ROWS": 16, "BLOCK": DIM}
    ptx = compiled(quantize_kernel, {**arguments, **constants}, num_warps=4).asm["ptx"]
    assert re.search(r"ld\.global\.v4\.b32", ptx)
    assert re.search(r"st\.global\.(v\d\.)?b32", ptx)
    assert not re.search(r"st\.global\.b8", ptx)
    assert "div.rn" in ptx
