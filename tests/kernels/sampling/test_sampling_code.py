"""The compiled kernels compute products, sums and quotients as torch does, and hide the loads' latency."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from attention_code import asynchronous_bytes, compiled

from kernels.sampling.draw import BLOCK, LANES, LIST, WARPS, draw_kernel
from kernels.sampling.penalties import count_kernel, penalise_kernel
from kernels.sampling.token_mask import forbid_kernel


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def operations(ptx: str, kind: str) -> set[str]:
    return set(re.findall(rf"\b{kind}\.[.\w]*", ptx))


def test_draws() -> None:
    floats = dict.fromkeys(("logits", "scales", "tails", "gaps"), torch.float32)
    whole = dict.fromkeys(("top_k", "seeds", "positions", "tokens"), torch.int64)
    sizes = {
        "found": torch.float32,
        "vocab": 128256,
        "BITS": 44,
        "LANES": LANES,
        "BLOCK": BLOCK,
        "LIST": LIST,
    }
    ptx = compiled(draw_kernel, {**floats, **whole, **sizes}, num_warps=WARPS, fp_fusion=False).asm["ptx"]
    assert not operations(ptx, "fma")
    floating = {name for name in operations(ptx, "mul") if name.endswith(("f32", "f64"))}
    assert floating == {"mul.rn.f32", "mul.rn.f64"}
    assert "ftz" not in ptx
    assert "local" not in ptx, "no registers in memory"
    assert asynchronous_bytes(ptx), "blocks are loaded ahead"


def test_penalties() -> None:
    pointers = {"logits": torch.float32, "rows": torch.int64, "addresses": torch.int64}
    arguments = {**pointers, "factors": torch.float32, "vocab": 128256, "BLOCK": 1024}
    ptx = compiled(penalise_kernel, arguments, num_warps=4, fp_fusion=False).asm["ptx"]
    assert not operations(ptx, "fma")
    assert operations(ptx, "div") == {"div.rn.f32"}
    assert operations(ptx, "st") == {"st.global.v4.b32"}
    arguments = dict.fromkeys(("tokens", "rows", "addresses"), torch.int64)
    assert "st.global.b32" in compiled(count_kernel, arguments, num_warps=1).asm["ptx"]


def test_masks() -> None:
    arguments = {"logits": torch.float32, "rows": torch.int64, "masks": torch.int32, "vocab": 128256}
    ptx = compiled(forbid_kernel, {**arguments, "words": 4008, "BLOCK": 1024}, num_warps=4).asm["ptx"]
    assert operations(ptx, "st")
    assert all(name.startswith("st.global") for name in operations(ptx, "st"))
