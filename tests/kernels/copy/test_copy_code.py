"""The compiled kernels use 16-byte accesses. Compiling for a GPU needs none."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from attention_code import compiled
from slow_parameters import thinned
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.copy.gather import gather_kernel
from kernels.copy.launch import SUMMED_TILE, Tile
from kernels.copy.layers import copy_layers_kernel
from kernels.copy.page_blocks import TILE, block_kernel
from kernels.copy.page_copy import copy_kernel
from kernels.copy.scatter import scatter_kernel

WIDTHS = (
    (("i64", 32, 128, 2), {"v2.b64"}),
    (("i64", 512, 512, 2), {"v2.b64"}),
    (("i64", 96, 96, 2), {"v2.b64"}),  # a row that is no power of two
    (("i64", 3, 9, 1), {"b64"}),
    (("u8", 5, 15, 1), {"b8"}),
)
"""Word, words of a row, of a token and of an access, and the width of the accesses."""
_ACCESS = r"(?:ld|st)\.global(?:\.cs|\.L[12]::\w+)*\.((?:v\d\.)?b\d+)"


def accesses(
    kernel: Any, word: str, row_words: int, token_words: int, vector_words: int, summed: bool
) -> set[str]:
    """Widths of the global accesses in Hopper's PTX, such as `v2.b64`, without the slot look-up (b32)."""
    tile = SUMMED_TILE if summed else Tile()
    block_words, block_tokens = tile.shape(row_words)
    constants: dict[str, int | None] = {} if summed else {"parts": None}
    constants |= {
        "TOKEN_WORDS": token_words,
        "ROW_WORDS": row_words,
        "VECTOR_WORDS": vector_words,
        "PLANE_STEP": 1,
        "UNIT_BYTES": 4,
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_WORDS": block_words,
    }
    pointers = {"pool": f"*{word}", "slots": "*i32", "staged": f"*{word}", "parts": "*i64"}
    firsts = dict.fromkeys(("first_plane", "first_token", "first_unit"), "i32")
    sizes = {"tokens": "i32", "plane_words": "i64", **firsts}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 2)} if vector_words > 1 else {}
    source = ASTSource(
        fn=kernel,
        signature={**pointers, **sizes, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs=aligned,
    )
    options = {"num_warps": tile.warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return set(re.findall(_ACCESS, compiled.asm["ptx"])) - {"b32"}


@pytest.mark.parametrize(
    ("case", "kernel", "summed"), thinned(WIDTHS, [gather_kernel, scatter_kernel], [False, True], by=2)
)
def test_access_width(
    case: tuple[tuple[str, int, int, int], set[str]],
    kernel: Any,
    summed: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    sizes, expected = case
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert accesses(kernel, *sizes, summed) == expected


@pytest.mark.parametrize(
    ("word", "page_words", "vector_words", "expected"),
    [
        (torch.int64, 4096, 2, {"v2.b64"}),
        (torch.int64, 520, 2, {"v2.b64"}),  # 16 tokens of a head of 260 bytes
        (torch.int64, 33, 1, {"b64"}),
        (torch.uint8, 15, 1, {"b8"}),
    ],
)
def test_access_width_of_page_copies(
    word: torch.dtype,
    page_words: int,
    vector_words: int,
    expected: set[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block_words, block_copies = Tile().shape(page_words)
    arguments = {
        "pool": word,
        "sources": torch.int32,
        "destinations": torch.int32,
        "copies": 1,
        "plane_words": 1,
    }
    constants = {"PAGE_WORDS": page_words, "VECTOR_WORDS": vector_words}
    tile = {"BLOCK_COPIES": block_copies, "BLOCK_WORDS": block_words}
    ptx = compiled(copy_kernel, {**arguments, **constants, **tile}, num_warps=Tile().warps).asm["ptx"]
    assert set(re.findall(_ACCESS, ptx)) - {"b32"} == expected


@pytest.mark.parametrize("to_blocks", [1, 0], ids=["store", "load"])
def test_access_width_of_blocks(to_blocks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block_words, block_copies = TILE.shape(4096)
    arguments = {
        "pool": torch.int64,
        "pages": torch.int64,
        "blocks": torch.int64,
        "places": torch.int64,
        "copies": 1,
        "planes": 1,
        "plane_words": 1,
        "block_words": 1,
        "PAGE_WORDS": 4096,
        "VECTOR_WORDS": 2,
        "TO_BLOCKS": to_blocks,
        "BLOCK_COPIES": block_copies,
        "BLOCK_WORDS": block_words,
    }
    ptx = compiled(block_kernel, arguments, num_warps=TILE.warps).asm["ptx"]
    assert set(re.findall(_ACCESS, ptx)) - {"b64"} == {"v2.b64"}


@pytest.mark.parametrize(
    ("strides", "heads", "head_words", "to_pool", "summed"),
    [
        ((2048, 128, 32), 4, 32, 0, False),
        ((2048, 32, 512), 4, 32, 1, True),
        ((2304, 144, 144), 1, 144, 1, False),
    ],
    ids=["gather, nhd", "scatter, hnd, summed", "scatter, latent"],
)
def test_access_width_of_separate_layers(
    strides: tuple[int, int, int],
    heads: int,
    head_words: int,
    to_pool: int,
    summed: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The only narrow accesses are one look-up of the plane's address, and the partial sum."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile = SUMMED_TILE if summed else Tile()
    block_words, block_tokens = tile.shape(heads * head_words)
    arguments = {
        "first": torch.int64,
        "table": torch.int64,
        "slots": torch.int32,
        "staged": torch.int64,
        "parts": torch.int64 if summed else None,
        **dict.fromkeys(("tokens", "first_plane", "first_token", "first_unit"), 1),
        "TO_POOL": to_pool,
        "BLOCK_SIZE": 16,
        **dict(zip(("BLOCK_STRIDE", "TOKEN_STRIDE", "HEAD_STRIDE"), strides, strict=True)),
        "HEAD_WORDS": head_words,
        "ROW_WORDS": heads * head_words,
        "VECTOR_WORDS": 2,
        "PLANE_STEP": 1,
        "UNIT_BYTES": 4,
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_WORDS": block_words,
    }
    ptx = compiled(copy_layers_kernel, arguments, num_warps=tile.warps, fp_fusion=False).asm["ptx"]
    found = Counter(re.findall(_ACCESS, ptx))
    assert found["v2.b64"] >= 2
    assert found["b64"] == 1
    assert set(found) <= {"v2.b64", "b64", "b32"}
