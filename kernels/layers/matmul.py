"""Matrix products in which the bits of a row's result do not depend on the other rows.

`out[b, m, n] = sum over k of left[b, m, k] * right[b, k, n]`. The kernels sum in float32 from the first `k` to the
last, never in parts, and the bits depend only on this order. The choice of the tile depends on the number of rows,
but affects only the speed. All tiles give the same bits because of a property of the tensor cores, which
`require_same_bits` checks on the device.

In contrast, libraries use different orders for different numbers of rows (split-K, stream-K). The idea is from
"Defeating Nondeterminism in LLM Inference" (Thinking Machines, 2025), where products use one tile for all sizes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from disagg.core.errors import ConfigError
from kernels.attention.common import dot, multiprocessors, on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.matmul_tiles import MatmulTile, by_descriptor, tile_of, tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP_M = 8
"""Number of adjacent row blocks that are computed together, because they share columns of `right` in the L2 cache."""
_APART = 32
"""Alignment of rows in `matmul_reference`, in elements: 64 bytes for 16-bit types."""
_CHECKED_SHAPE = (300, 272, 1056)
"""Rows, columns and summed elements in the check of all tiles. Most tiles do not divide these sizes, and all tiles
need many steps."""


def matmul(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: MatmulTile | None = None,
) -> torch.Tensor:
    """Returns `left @ right + bias` for each matrix of a batch: `[batch, m, n]` of left's type, rounded once.

    - left: float32, bfloat16 or float16 `[batch, m, k]`, any strides.
    - right: `[batch, k, n]` of the same type, any strides.
    - bias: `[n]` of the same type, contiguous, or None.
    - tile: derived from device and sizes if omitted.

    On CUDA: one launch on the current stream, no synchronization. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    _check(left, right, bias)
    if backend(left.device) != "triton":
        return matmul_reference(left, right, bias)
    batch, m, _ = left.shape
    n = right.shape[2]
    out = torch.empty(batch, m, n, dtype=left.dtype, device=left.device)
    if out.numel() == 0:
        return out
    if tile is None:
        tma = batch == 1 and m > 32 and by_descriptor(left[0]) and by_descriptor(right[0].t())
        tile = tile_of(m, n, left.dtype, left.device, tma)
    with on_device(left):
        if tile.descriptors:
            run_tma(left[0], right[0].t(), bias, out[0], tile)
        else:
            run(left, right, bias, out, tile)
    return out


def grouped_matmul(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies each row of `left` by one of several matrices (experts); returns `[m, n]` of left's type.

    - left: `[m, k]`, a type of `matmul`, any strides. Rows for the same matrix are adjacent.
    - right: `[matrices, k, n]`, any strides.
    - ends: int32 `[matrices]`, ascending: the end of each matrix's rows. Result rows beyond the last end are not
      written.

    On CUDA: one launch on the current stream, no synchronization. Raises as `matmul` does.
    """
    if left.dim() != 2 or ends.dtype != torch.int32 or ends.shape != right.shape[:1]:
        raise ValueError(
            f"left must be [m, k] and ends int32 [{right.shape[0]}]; got {describe(left)} and {describe(ends)}"
        )
    _check(left[None].expand(len(right), -1, -1), right, None)
    if backend(left.device) != "triton":
        return _grouped_reference(left, right, ends)
    out = torch.empty(left.shape[0], right.shape[2], dtype=left.dtype, device=left.device)
    if out.numel():
        tile = tile_of(left.shape[0], right.shape[2], left.dtype, left.device, False)
        with on_device(left):
            run(left[None], right, None, out[None], tile, ends)
    return out


def matmul_reference(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes `matmul` in plain torch, on any device. Slow: each row is a separate product, in separate memory.

    The bits are equal to those of `torch.mm` with one row; the kernel's bits may differ.
    """
    _check(left, right, bias)
    batch, m, k = left.shape
    # The library's choice of a kernel also depends on alignment.
    apart = left.new_empty(batch * m, 1, -(-k // _APART) * _APART)[..., :k]
    apart.copy_(left.reshape(batch * m, 1, k))
    matrices = right.unbind()
    found = [torch.mm(row, matrices[number // m]) for number, row in enumerate(apart.unbind())]
    out = torch.cat([left.new_empty(0, right.shape[2]), *found]).view(batch, m, right.shape[2])
    return out if bias is None else out + bias


def _grouped_reference(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = torch.empty(left.shape[0], right.shape[2], dtype=left.dtype, device=left.device)
    start = 0
    for number, end in enumerate(ends.tolist()):
        out[start:end] = matmul_reference(left[None, start:end], right[None, number])[0]
        start = end
    return out


def require_same_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError unless all tiles give the same bits on `device`. The check launches kernels and waits for
    the device.
    """
    if device.type == "cuda" and backend(device) == "triton" and not _all_tiles_agree(device, dtype):
        raise ConfigError(
            f"model.deterministic = true is not supported on {torch.cuda.get_device_name(device)}: its tensor cores "
            f"sum {dtype} in an order that depends on the tile; set model.deterministic = false"
        )


@lru_cache
def _all_tiles_agree(device: torch.device, dtype: torch.dtype) -> bool:
    m, n, k = _CHECKED_SHAPE
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1, *size, generator=generator).to(device, dtype) for size in ((m, k), (n, k)))
    found = [matmul(left, right.transpose(1, 2), tile=tile) for tile in tiles(dtype, device)]
    return all(torch.equal(one, found[0]) for one in found)


def _check(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> None:
    alike = left.dtype == right.dtype and left.device == right.device
    fits = (
        left.dim() == right.dim() == 3 and left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1]
    )
    if not alike or not fits or left.dtype not in DTYPES:
        raise ValueError(
            "left and right must be float32, bfloat16 or float16 [batch, m, k] and [batch, k, n] of one type; got "
            f"{describe(left)} and {describe(right)}"
        )
    if bias is not None and (
        bias.shape != right.shape[2:] or bias.dtype != left.dtype or not bias.is_contiguous()
    ):
        raise ValueError(f"bias must be contiguous {left.dtype} [{right.shape[2]}]; got {describe(bias)}")


def run(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: MatmulTile,
    ends: torch.Tensor | None = None,
) -> Any:
    """Launches the kernel that loads by pointers, without checking arguments; returns Triton's compiled kernel."""
    m, n = out.shape[1:]
    grid = (-(-m // tile.rows) * -(-n // tile.columns), right.shape[0], 1)
    return _matmul_kernel[grid](
        left,
        right,
        bias,
        out,
        ends,
        m,
        n,
        *left.shape[2:],
        *left.stride(),
        *right.stride(),
        WHOLE=left.shape[2] % tile.summed == 0,
        GROUP_M=GROUP_M,
        TRANSPOSED=tile.transposed,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        SUMMED=tile.summed,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )


def run_tma(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: MatmulTile
) -> Any:
    """Launches the kernel that loads by TMA descriptors, without checking arguments; returns Triton's compiled
    kernel.

    Unlike in `run`, `right` is `[n, k]`.
    """
    m, n = out.shape
    programs = tma_programs(tile, m, n, left.device)
    return _matmul_tma_kernel[(programs, 1, 1)](
        descriptor(left, tile.rows, tile),
        descriptor(right, tile.columns, tile),
        bias,
        out,
        m,
        n,
        left.shape[1],
        programs,
        GROUP_M=GROUP_M,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        SUMMED=tile.summed,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )


def descriptor(x: torch.Tensor, rows: int, tile: MatmulTile) -> Any:
    """Returns a TMA descriptor for bulk copies of blocks `[rows, tile.summed]` of a matrix."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, tile.summed])


def tma_programs(tile: MatmulTile, m: int, n: int, device: torch.device) -> int:
    """Returns the number of programs of the persistent grid of `run_tma`."""
    return min(-(-m // tile.rows) * -(-n // tile.columns), multiprocessors(device))


@triton.jit
def place(block, m, n, GROUP_M, ROWS, COLUMNS):  # type: ignore[no-untyped-def] # noqa: N803
    """Returns the row block and the column block of block number `block`, in an order that favors the L2 cache."""
    row_blocks, column_blocks = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    width = GROUP_M * column_blocks
    first = block // width * GROUP_M
    size = tl.minimum(row_blocks - first, GROUP_M)
    return first + block % width % size, block % width // size


@triton.jit  # type: ignore[untyped-decorator]
def summed_products(  # type: ignore[no-untyped-def]
    x_row,  # addresses [ROWS]
    w_row,  # addresses [COLUMNS]
    k,
    x_stride,
    w_stride,
    WHOLE: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton; whether SUMMED divides k
    TRANSPOSED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SUMMED: tl.constexpr,  # noqa: N803
):
    """Returns the product of each row of x with each row of w, of `k` elements: float32 `[ROWS, COLUMNS]`."""
    element = tl.arange(0, SUMMED)
    x = x_row[:, None] + element[None, :] * x_stride
    w = w_row[:, None] + element[None, :] * w_stride
    sums = tl.zeros([COLUMNS if TRANSPOSED else ROWS, ROWS if TRANSPOSED else COLUMNS], tl.float32)
    for first in range(0, k, SUMMED):
        if WHOLE:
            some_x, some_w = tl.load(x), tl.load(w)
        else:  # zeros do not change the sum
            inside = (first + element < k)[None, :]
            some_x, some_w = tl.load(x, mask=inside, other=0.0), tl.load(w, mask=inside, other=0.0)
        sums = dot(some_w, tl.trans(some_x), sums) if TRANSPOSED else dot(some_x, tl.trans(some_w), sums)
        x += SUMMED * x_stride
        w += SUMMED * w_stride
    return tl.trans(sums) if TRANSPOSED else sums


@triton.jit(do_not_specialize=["m", "n"])  # type: ignore[untyped-decorator]
def _matmul_kernel(  # type: ignore[no-untyped-def]
    # tensors
    left,
    right,
    bias,
    out,
    ends,  # int32 [batch]: batch b has rows [ends[b - 1], ends[b]); None: each batch has m separate rows
    # sizes
    m,
    n,
    k,
    left_batch_stride,
    left_row_stride,
    left_k_stride,
    right_batch_stride,
    right_k_stride,
    right_column_stride,
    # meta
    WHOLE: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    GROUP_M: tl.constexpr,  # noqa: N803
    TRANSPOSED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SUMMED: tl.constexpr,  # noqa: N803
):
    row_block, column_block = place(tl.program_id(0), m, n, GROUP_M, ROWS, COLUMNS)
    batch = tl.program_id(1).to(tl.int64)
    if ends is None:
        left += batch * left_batch_stride
        out += batch * m * n
    else:
        start = tl.load(ends + batch - 1, mask=batch > 0, other=0).to(tl.int64)
        m = (tl.load(ends + batch) - start).to(tl.int32)
        if row_block * ROWS >= m:
            return
        left += start * left_row_stride
        out += start * n
    row = row_block * ROWS + tl.arange(0, ROWS)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    # Indices beyond the ends load another row or column, so the loop needs no mask; their results are not stored.
    x_row = left + (row % m).to(tl.int64) * left_row_stride
    w_row = right + batch * right_batch_stride + (column % n).to(tl.int64) * right_column_stride
    sums = summed_products(
        x_row, w_row, k, left_k_stride, right_k_stride, WHOLE, TRANSPOSED, ROWS, COLUMNS, SUMMED
    )
    if bias is not None:
        sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["m", "n", "k", "programs"])  # type: ignore[untyped-decorator]
def _matmul_tma_kernel(  # type: ignore[no-untyped-def]
    # descriptors and tensors
    left,
    right,
    bias,
    out,
    # sizes
    m,
    n,
    k,
    programs,
    # meta
    GROUP_M: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SUMMED: tl.constexpr,  # noqa: N803
):
    blocks = tl.cdiv(m, ROWS) * tl.cdiv(n, COLUMNS)
    for block in tl.range(tl.program_id(0), blocks, programs, flatten=True):
        row_block, column_block = place(block, m, n, GROUP_M, ROWS, COLUMNS)
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, k, SUMMED):  # the copies give zeros beyond the ends
            some_x = left.load([row_block * ROWS, first])
            some_w = right.load([column_block * COLUMNS, first])
            sums = tl.dot(some_x, tl.trans(some_w), sums)
        row = row_block * ROWS + tl.arange(0, ROWS)
        column = column_block * COLUMNS + tl.arange(0, COLUMNS)
        if bias is not None:
            sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        target = out + row[:, None].to(tl.int64) * n + column[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])
