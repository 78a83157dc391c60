"""The compiled small kernels read and write 16 bytes at a time, and rotary products are not fused into their sum."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_code import accesses_before_waiting, compiled

from kernels.layers.few_rows import few_rows_kernel
from kernels.layers.gated_rms_norm import gated_norm_kernel
from kernels.layers.one_row import one_row_kernel, one_row_tile
from kernels.layers.rank_sum import rank_sum_kernel
from kernels.layers.rms_norm import norm_kernel
from kernels.layers.rotary import rotary_kernel
from kernels.layers.silu_mul import silu_mul_kernel


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def code(kernel: Any, tensors: str, numbers: dict[str, Any], constants: dict[str, Any], warps: int) -> str:
    """PTX for bfloat16 `tensors` and `numbers`, every other size a multiple of 16."""
    sizes = [name for name in inspect.signature(kernel.fn).parameters if name.endswith("_stride")]
    given = {**dict.fromkeys(tensors.split(), torch.bfloat16), **dict.fromkeys(sizes, 16), **numbers}
    given |= constants
    arguments = {name: given[name] for name in kernel.arg_names if name != "OVERLAP"}
    ptx: str = compiled(kernel, arguments, num_warps=warps, fp_fusion=False).asm["ptx"]
    early = {"ld.global"} if kernel is one_row_kernel else set()
    assert kernel is rank_sum_kernel or accesses_before_waiting(ptx) <= early
    return ptx


def stores(ptx: str) -> set[str]:
    return set(re.findall(r"st\.global[.\w]*", ptx))


def test_norm_of_hidden_states_and_of_heads() -> None:
    for dim, rows, warps in ((4096, 1, 8), (128, 8, 2)):
        constants: dict[str, Any] = {
            "DIM": dim,
            "ROUNDED_FIRST": True,
            "ONE_PLUS": False,
            "SCALED": False,
            "BLOCK_ROWS": rows,
            "BLOCK": dim,
        }
        numbers = {"rows": 63, "inner": 7, "eps": 1e-5, "y_factor": 1.0}
        alone = constants | dict.fromkeys(("y", "total"), None)
        ptx = code(norm_kernel, "x weight out", numbers, alone, warps)
        assert stores(ptx) == {"st.global.v4.b32"}
        assert "ld.global.v4.b32" in ptx
        ptx = code(norm_kernel, "x y weight total out", numbers, constants, warps)
        assert stores(ptx) == {"st.global.v4.b32"}
        assert "ld.global.v4.b32" in ptx


def test_gated_norm() -> None:
    constants = {"GROUP": 4096, "GATE_FIRST": True, "BLOCK": 4096}
    ptx = code(gated_norm_kernel, "x gate weight out", {"dim": 8192, "eps": 1e-5}, constants, 8)
    assert stores(ptx) == {"st.global.v4.b32"}
    assert "ld.global.v4.b32" in ptx


def test_rotary() -> None:
    numbers = {"tokens": 63, "q_heads": 31, "k_heads": 7, "q_blocks": 5}
    constants = {"HALF": 64, "REST": 0, "BLOCK_HEADS": 8, "BLOCK": 64}
    ptx = code(rotary_kernel, "q k cos sin q_out k_out", numbers, constants, 2)
    assert stores(ptx) == {"st.global.v4.b32"}
    assert "fma" not in ptx


def test_silu_mul() -> None:
    ptx = code(silu_mul_kernel, "gate up out", {"columns": 1600, "blocks": 7}, {"BLOCK": 1024}, 4)
    assert stores(ptx) == {"st.global.v4.b32"}
    assert "ld.global.v4.b32" in ptx


def test_products_of_few_rows() -> None:
    numbers = {"rows": 63, "columns": 4096, "summed": 4096, "parts": torch.float32, "arrived": torch.int32}
    constants = {
        "bias": None,
        "GATED": False,
        "ROWS": 64,
        "COLUMNS": 64,
        "SUMMED": 128,
        "SPLITS": 2,
        "AHEAD": 8,
    }
    ptx = code(few_rows_kernel, "x weight out", numbers, constants, 4)
    assert "wgmma" in ptx
    assert "prefetch.global.L2" in ptx.split("griddepcontrol.wait")[0]


@pytest.mark.parametrize(("summed", "gated"), [(4096, False), (18944, False), (4096, True)])
def test_products_of_one_row(summed: int, gated: bool) -> None:
    tile = one_row_tile(summed, gated)
    constants = {"bias": None, "GATED": gated, "SUMMED": summed, "COLUMNS": tile.columns, "STEP": tile.step}
    ptx = code(one_row_kernel, "x weight out", {"columns": 4097}, constants, tile.warps)
    assert set(re.findall(r"ld\.global[.\w]*", ptx)) == {"ld.global.v4.b32"}
    early = ptx.split("griddepcontrol.wait")[0].count("ld.global.v4.b32")
    part_bytes = 2 * tile.columns * tile.step
    expected = 0 if gated else part_bytes // (16 * 32 * tile.warps)
    assert early == expected, "the weight's first part, nothing of x"


def test_rank_sum() -> None:
    ptx = code(rank_sum_kernel, "parts out", {"elements": 1600}, {"RANKS": 4, "WIDE": True, "BLOCK": 1024}, 4)
    assert stores(ptx) == {"st.global.v4.b32"}
    assert "ld.global.v4.b32" in ptx
