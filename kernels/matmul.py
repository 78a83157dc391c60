"""Matrix products in which a row's result has the same bits whatever other rows there are.

`y[b, m, n] = sum over k of x[b, m, k] * w[b, n, k]`, summed in float32 from the first `k` to the last, never in parts:
that order is all that the bits depend on. Tiles differ by the number of rows, for speed alone; that they agree bit for
bit is a property of the tensor cores that `require_same_bits` checks on the device at hand. A library's products choose
other orders for other numbers of rows (split-K, stream-K). Idea: "Defeating Nondeterminism in LLM Inference" (Thinking
Machines, 2025), whose products have one tile for all sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from disagg.core.errors import ConfigError
from kernels.attention import dot, multiprocessors, on_device
from kernels.dispatch import backend
from kernels.layer_kv import told

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TMA_CAPABILITY = (9, 0)
_GROUP_M = 8
"""Row blocks that are computed beside each other, so that they share columns of `w` in the cache."""
_CHECKED_SHAPE = (300, 272, 1056)
"""Rows, columns and summed elements of the check: no multiples of most tiles, and many steps of each."""


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """What a program computes, and how. No choice changes the result's bits."""

    rows: int
    columns: int
    summed: int
    """Elements of the summed dimension in one step."""
    warps: int = 4
    stages: int = 4
    swapped: bool = False
    """`w` is the left operand of the tensor cores' instruction, which has 64 rows: for few rows of `x`."""
    descriptors: bool = False
    """Operands come by bulk tensor copies (TMA), in a persistent grid."""


_FEW_ROWS = {
    16: MatmulTile(16, 64, 128, stages=5, swapped=True),
    32: MatmulTile(32, 64, 128, stages=5, swapped=True),
}
_FLOAT32 = MatmulTile(32, 32, 32, stages=3)
TILES_16_BITS = (
    *_FEW_ROWS.values(),
    MatmulTile(64, 32, 128, stages=5),
    MatmulTile(64, 128, 128, stages=3),
    MatmulTile(128, 64, 64, stages=4),
    MatmulTile(128, 128, 64, warps=8, stages=4),
)
TILES_TMA = (
    MatmulTile(64, 64, 64, stages=4, descriptors=True),
    MatmulTile(128, 64, 64, stages=4, descriptors=True),
    MatmulTile(128, 128, 64, warps=8, stages=4, descriptors=True),
    MatmulTile(128, 256, 64, warps=8, stages=3, descriptors=True),
)


def tile_of(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, tma: bool) -> MatmulTile:
    """The quickest tile, by measurements on Hopper; `tma`: whether the operands can come by bulk tensor copies."""
    if dtype == torch.float32:
        return _FLOAT32
    if rows <= 32:
        return _FEW_ROWS[16 if rows <= 16 else 32]
    there = multiprocessors(device)
    if rows <= 64:
        few = columns < 64 * there
        return TILES_16_BITS[2] if few else TILES_16_BITS[3]
    if not tma:
        return TILES_16_BITS[5]
    for tile in reversed(TILES_TMA[1:]):
        if -(-rows // tile.rows) * -(-columns // tile.columns) >= there // 2:
            return tile
    return TILES_TMA[0]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, `[..., n]` of x's type, rounded once.

    - x: float32, bfloat16 or float16 `[..., k]`.
    - weight: `[n, k]` of the same type.
    - bias: `[n]` of the same type, or None.

    On CUDA: one launch on the current stream, no synchronization. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be [..., k] and weight [n, k]; got {told(x)} and {told(weight)}")
    rows = x.reshape(-1, x.shape[-1])
    found = matmul(rows[None], weight[None].transpose(1, 2), bias)
    return found.view(*x.shape[:-1], weight.shape[0])


def matmul(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None, *, tile: MatmulTile | None = None
) -> torch.Tensor:
    """`left @ right + bias` for each of a batch, `[batch, m, n]` of left's type, rounded once.

    - left: float32, bfloat16 or float16 `[batch, m, k]`, any strides.
    - right: `[batch, k, n]` of the same type, any strides.
    - bias: `[n]` of the same type, contiguous, or None.
    - tile: chosen by device and sizes when left out.

    On CUDA: one launch on the current stream, no synchronization. Raises as `linear` does.
    """
    _check(left, right, bias)
    if backend(left.device) != "triton":
        return matmul_reference(left, right, bias)
    batch, m, k = left.shape
    n = right.shape[2]
    out = torch.empty(batch, m, n, dtype=left.dtype, device=left.device)
    if out.numel() == 0:
        return out
    if tile is None:
        tma = batch == 1 and m > 64 and _by_descriptor(left[0]) and _by_descriptor(right[0].t())
        tile = tile_of(m, n, left.dtype, left.device, tma=tma)
    with on_device(left):
        if tile.descriptors:
            _run_tma(left[0], right[0].t(), bias, out[0], tile)
        else:
            _run(left, right, bias, out, tile)
    return out


def matmul_reference(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same property in plain torch, on any device: each row is a product of its own, in memory of its own.

    Slow. Bits are those of `torch.mm` with one row, not those of the kernel.
    """
    _check(left, right, bias)
    batch, m, _ = left.shape
    out = torch.empty(batch, m, right.shape[2], dtype=left.dtype, device=left.device)
    for number in range(batch):
        for row in range(m):
            one = left[number, row].clone()[None]  # alignment decides between a library's loops too
            found = torch.mm(one, right[number])
            out[number, row] = found[0] if bias is None else found[0] + bias
    return out


def require_same_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError unless all tiles give the same bits on `device`. Waits for the device; some launches."""
    if backend(device) != "triton" or device.type != "cuda":
        return
    if not _all_tiles_agree(device, dtype):
        raise ConfigError(
            f"model.deterministic = true cannot be on {torch.cuda.get_device_name(device)}: its tensor cores sum "
            f"{dtype} in an order that depends on the tile; leave model.deterministic off"
        )


@lru_cache
def _all_tiles_agree(device: torch.device, dtype: torch.dtype) -> bool:
    m, n, k = _CHECKED_SHAPE
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1, *size, generator=generator).to(device, dtype) for size in ((m, k), (n, k)))
    first: torch.Tensor | None = None
    for tile in tiles(dtype, device):
        found = matmul(left, right.transpose(1, 2), tile=tile)
        if first is None:
            first = found
        elif not torch.equal(found, first):
            return False
    return True


def tiles(dtype: torch.dtype, device: torch.device) -> Iterator[MatmulTile]:
    """All that `tile_of` may choose on `device`."""
    if dtype == torch.float32:
        yield _FLOAT32
        return
    yield from TILES_16_BITS
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TMA_CAPABILITY:
        yield from TILES_TMA


def _check(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> None:
    alike = left.dtype == right.dtype and left.device == right.device
    fits = left.dim() == right.dim() == 3 and left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1]
    if not alike or not fits or left.dtype not in DTYPES:
        raise ValueError(
            "left and right must be float32, bfloat16 or float16 [batch, m, k] and [batch, k, n] of one type; got "
            f"{told(left)} and {told(right)}"
        )
    if bias is not None and (
        bias.shape != right.shape[2:] or bias.dtype != left.dtype or not bias.is_contiguous()
    ):
        raise ValueError(f"bias must be contiguous {left.dtype} [{right.shape[2]}]; got {told(bias)}")


def _by_descriptor(x: torch.Tensor) -> bool:
    """Whether bulk tensor copies can read it: 16 bits, rows contiguous, 16-byte aligned."""
    capable = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= _TMA_CAPABILITY
    plain = x.element_size() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    return capable and plain and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


@dataclass(frozen=True, slots=True)
class _Compiled:
    """Compiled kernels by what Triton compiles apart for: its own search for them takes 17 us a launch."""

    kernels: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def run(
        self, kernel: Any, grid: tuple[int, ...], key: tuple[Any, ...], args: tuple[Any, ...], tile: MatmulTile
    ) -> None:
        found = self.kernels.get(key)
        if found is not None:
            found[grid](*args)
            return
        self.kernels[key] = kernel[grid](
            *args, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True
        )


_compiled = _Compiled()


def _run(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: MatmulTile
) -> None:
    batch, m, k = left.shape
    n = right.shape[2]
    sizes = (m, n, k, *left.stride(), *right.stride())
    whole = k % tile.summed == 0
    grid = (-(-m // tile.rows) * -(-n // tile.columns), batch)
    args = (left, right, bias, out, *sizes, whole, _GROUP_M, tile.swapped, tile.rows, tile.columns, tile.summed)
    if left.device.type != "cuda":
        _matmul_kernel[grid](*args)
        return
    kinds = (
        *((s == 1, s % 16 == 0) for s in (k, *left.stride(), *right.stride())),
        *(max(sizes) > 2**31 - 1 and s > 2**31 - 1 for s in sizes),
        *(t is None or t.data_ptr() % 16 == 0 for t in (left, right, bias, out)),
    )
    key = (left.device, left.dtype, bias is None, tile, whole, kinds)
    _compiled.run(_matmul_kernel, grid, key, args, tile)


def _run_tma(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: MatmulTile
) -> None:
    m, k = left.shape
    n = right.shape[0]
    blocks = -(-m // tile.rows) * -(-n // tile.columns)
    programs = min(blocks, multiprocessors(left.device))
    args = (
        TensorDescriptor(left, [m, k], [left.stride(0), 1], [tile.rows, tile.summed]),
        TensorDescriptor(right, [n, k], [right.stride(0), 1], [tile.columns, tile.summed]),
        bias,
        out,
        m,
        n,
        k,
        programs,
        _GROUP_M,
        tile.rows,
        tile.columns,
        tile.summed,
    )
    aligned = tuple(t is None or t.data_ptr() % 16 == 0 for t in (bias, out))
    _compiled.run(
        _matmul_tma_kernel,
        (programs,),
        (left.device, left.dtype, bias is None, tile, aligned, n % 16 == 0),
        args,
        tile,
    )


@triton.jit
def _place(block, m, n, GROUP_M, ROWS, COLUMNS):  # type: ignore[no-untyped-def] # noqa: N803
    """Row block and column block of a program."""
    row_blocks, column_blocks = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    width = GROUP_M * column_blocks
    first = block // width * GROUP_M
    size = tl.minimum(row_blocks - first, GROUP_M)
    return first + block % width % size, block % width // size


@triton.jit(do_not_specialize=["m", "n"])  # type: ignore[untyped-decorator]
def _matmul_kernel(  # type: ignore[no-untyped-def]
    # tensors
    left,
    right,
    bias,
    out,
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
    SWAPPED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SUMMED: tl.constexpr,  # noqa: N803
):
    row_block, column_block = _place(tl.program_id(0), m, n, GROUP_M, ROWS, COLUMNS)
    batch = tl.program_id(1).to(tl.int64)
    row = row_block * ROWS + tl.arange(0, ROWS)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, SUMMED)
    # What is beyond the ends reads a row or column again: no mask in the loop, and nothing of it is stored.
    x_row = left + batch * left_batch_stride + (row % m).to(tl.int64) * left_row_stride
    w_row = right + batch * right_batch_stride + (column % n).to(tl.int64) * right_column_stride
    x = x_row[:, None] + element[None, :] * left_k_stride
    w = w_row[:, None] + element[None, :] * right_k_stride
    if SWAPPED:
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, k, SUMMED):
        if WHOLE:
            some_x, some_w = tl.load(x), tl.load(w)
        else:  # zeros add nothing, to the last bit
            inside = (first + element < k)[None, :]
            some_x, some_w = tl.load(x, mask=inside, other=0.0), tl.load(w, mask=inside, other=0.0)
        if SWAPPED:
            sums = dot(some_w, tl.trans(some_x), sums)
        else:
            sums = dot(some_x, tl.trans(some_w), sums)
        x += SUMMED * left_k_stride
        w += SUMMED * right_k_stride
    if SWAPPED:
        sums = tl.trans(sums)
    if bias is not None:
        sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = out + (batch * m + row[:, None]) * n + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["m", "k", "programs"])  # type: ignore[untyped-decorator]
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
        row_block, column_block = _place(block, m, n, GROUP_M, ROWS, COLUMNS)
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, k, SUMMED):  # beyond the ends the copies give zeros
            some_x = left.load([row_block * ROWS, first])
            some_w = right.load([column_block * COLUMNS, first])
            sums = tl.dot(some_x, tl.trans(some_w), sums)
        row = row_block * ROWS + tl.arange(0, ROWS)
        column = column_block * COLUMNS + tl.arange(0, COLUMNS)
        if bias is not None:
            sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        target = out + row[:, None].to(tl.int64) * n + column[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])
