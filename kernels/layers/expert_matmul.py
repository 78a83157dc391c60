"""Matrix products of rows with the weights of their experts, in one launch that can be recorded.

A program computes a block of rows of one expert with a block of its columns. With few rows for each expert, as in
decode steps, the time is that to read the weights of the chosen experts once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.expert_rows import UNUSED, ExpertRows
from kernels.layers.matmul import DTYPES, GROUP_M, place, summed_products
from kernels.layers.matmul_tiles import MatmulTile

_FEW_ROWS = (
    MatmulTile(16, 64, 128, stages=5, transposed=True),
    MatmulTile(32, 64, 128, stages=5, transposed=True),
)
_MANY_ROWS = (MatmulTile(64, 128, 64, stages=4), MatmulTile(128, 128, 64, warps=8, stages=4))
_FLOAT32 = (MatmulTile(16, 32, 32, stages=3), MatmulTile(32, 32, 32, stages=3))


def expert_tiles(dtype: torch.dtype) -> tuple[MatmulTile, ...]:
    """Returns the tiles for weights of `dtype`, by ascending number of rows."""
    return _FLOAT32 if dtype == torch.float32 else (*_FEW_ROWS, *_MANY_ROWS)


def expert_tile(pairs: int, experts: int, dtype: torch.dtype) -> MatmulTile:
    """Returns the tile for `pairs` rows of `experts`: blocks of about the mean number of rows of an expert."""
    tiles = expert_tiles(dtype)
    return next((tile for tile in tiles if pairs <= tile.rows * experts), tiles[-1])


def expert_matmul(
    x: torch.Tensor,
    weights: torch.Tensor,
    rows: ExpertRows,
    choices: int,
    bias: torch.Tensor | None = None,
    *,
    tile: MatmulTile,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the product of each pair's row of `x` with its expert's weights: `[pairs, n]` of the type of `x`.

    - x: float32, bfloat16 or float16 `[pairs / choices, k]`, any strides. Pair `p` has the row `p // choices`.
    - weights: `[experts, n, k]` of the same type, any strides.
    - rows: the order of the pairs in blocks of `tile.rows`.
    - bias: `[experts, n]` of the same type, contiguous, or None. The bias is added before the result is rounded.
    - out: memory of the result, contiguous; rows of pairs that are in no block are not written.

    On CUDA: one launch on the current stream, no synchronization. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    _check(x, weights, rows, bias, tile)
    if out is None:
        out = torch.empty(x.shape[0] * choices, weights.shape[1], dtype=x.dtype, device=x.device)
    if backend(x.device) != "triton":
        return expert_matmul_reference(x, weights, rows, choices, bias, tile=tile, out=out)
    if out.numel():
        with on_device(x):
            run(x, weights, rows, choices, bias, out, tile)
    return out


def expert_matmul_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    rows: ExpertRows,
    choices: int,
    bias: torch.Tensor | None = None,
    *,
    tile: MatmulTile,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `expert_matmul` in plain torch, on any device. Synchronizes."""
    _check(x, weights, rows, bias, tile)
    if out is None:
        out = torch.empty(x.shape[0] * choices, weights.shape[1], dtype=x.dtype, device=x.device)
    blocks = zip(rows.owners.tolist(), rows.pairs.view(-1, tile.rows), strict=True)
    for owner, padded in blocks:
        if owner != UNUSED:
            pairs = padded[padded != UNUSED].long()
            own = None if bias is None else bias[owner]
            out[pairs] = torch.nn.functional.linear(x[pairs // choices], weights[owner], own)
    return out


def _check(
    x: torch.Tensor, weights: torch.Tensor, rows: ExpertRows, bias: torch.Tensor | None, tile: MatmulTile
) -> None:
    alike = x.dtype == weights.dtype and x.device == weights.device
    fits = x.dim() == 2 and weights.dim() == 3 and x.shape[1] == weights.shape[2]
    if not alike or not fits or x.dtype not in DTYPES:
        raise ValueError(
            "x and weights must be float32, bfloat16 or float16 [rows, k] and [experts, n, k] of one type; got "
            f"{describe(x)} and {describe(weights)}"
        )
    if len(rows.owners) and rows.block_rows != tile.rows:
        raise ValueError(f"rows has blocks of {rows.block_rows} rows; the tile has {tile.rows}")
    if bias is not None and (
        bias.shape != weights.shape[:2] or bias.dtype != x.dtype or not bias.is_contiguous()
    ):
        raise ValueError(f"bias must be contiguous {x.dtype} {list(weights.shape[:2])}; got {describe(bias)}")


def run(
    x: torch.Tensor,
    weights: torch.Tensor,
    rows: ExpertRows,
    choices: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: MatmulTile,
) -> Any:
    """Launches the kernel without checking arguments; returns Triton's compiled kernel."""
    n = weights.shape[1]
    return expert_matmul_kernel[(len(rows.owners) * -(-n // tile.columns),)](
        x,
        weights,
        rows.pairs,
        rows.owners,
        bias,
        out,
        len(rows.owners),
        n,
        weights.shape[2],
        *x.stride(),
        *weights.stride(),
        WHOLE=weights.shape[2] % tile.summed == 0,
        CHOICES=choices,
        GROUP_M=GROUP_M,
        TRANSPOSED=tile.transposed,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        SUMMED=tile.summed,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["blocks"])  # type: ignore[untyped-decorator]
def expert_matmul_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,
    weights,
    pairs,
    owners,
    bias,
    out,
    # sizes
    blocks,
    n,
    k,
    x_row_stride,
    x_k_stride,
    weights_expert_stride,
    weights_column_stride,
    weights_k_stride,
    # meta
    WHOLE: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    CHOICES: tl.constexpr,  # noqa: N803
    GROUP_M: tl.constexpr,  # noqa: N803
    TRANSPOSED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SUMMED: tl.constexpr,  # noqa: N803
):
    block, column_block = place(tl.program_id(0), blocks * ROWS, n, GROUP_M, ROWS, COLUMNS)
    owner = tl.load(owners + block)
    if owner < 0:
        return
    pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    # Padded rows and columns beyond the end load others, so the loop needs no mask; their results are not stored.
    x_row = x + (tl.maximum(pair, 0) // CHOICES).to(tl.int64) * x_row_stride
    w_row = weights + owner.to(tl.int64) * weights_expert_stride
    w_row += (column % n).to(tl.int64) * weights_column_stride
    sums = summed_products(
        x_row, w_row, k, x_k_stride, weights_k_stride, WHOLE, TRANSPOSED, ROWS, COLUMNS, SUMMED
    )
    if bias is not None:
        own = bias + owner.to(tl.int64) * n + column
        sums += tl.load(own, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = out + pair[:, None].to(tl.int64) * n + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(pair >= 0)[:, None] & (column < n)[None, :])
