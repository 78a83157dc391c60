"""Products of a matrix and a single row, for decode steps of one request.

Each program multiplies whole columns of the result on the arithmetic units, without tensor cores, whose tiles need 8
rows. Inside `overlapping`, the first part of the weight is loaded while the previous kernel ends. Gate and up
projections of a gated MLP can be multiplied in the same launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.few_rows import check_weight, few_rows_reference, is_for_hopper
from kernels.layers.silu_mul import gated
from kernels.overlap import overlap, wait_for_previous

_LEAST_ELEMENTS = 2 << 20
"""Elements of a weight from which the kernel is used; smaller ones were not measured."""
_SUMMED_MULTIPLE = 512
"""Sums have a multiple of this number of elements; others were not measured."""
_MOST_ROWS_OF_WEIGHT = 38 << 10
"""Rows of a weight up to which the kernel is used; 37,888 were measured. More have mostly the projections to a
vocabulary: [128256, 4096] is read by cuBLAS at 4.4 TB/s of an H200 already."""
_STEP, _GATED_STEP = 2048, 4096
"""Elements that a program sums in one step; fewer in short sums and in sums that `_STEP` does not divide."""
_MOST_STEPS = 16
"""Limit of the number of steps, because the loop is unrolled."""
_LONG_SUM = 8192
"""Elements of a sum from which smaller programs are used."""


@dataclass(frozen=True, slots=True)
class OneRowTile:
    """Tile sizes of a program."""

    columns: int
    """Columns of the result. A gated program reads as many columns of the gate and of the up projection."""
    step: int
    """Elements of the summed dimension in one step, a power of two."""
    warps: int


def one_row_tile(summed: int, gated: bool) -> OneRowTile:
    """Returns the tile for sums of `summed` elements, measured on an H200 with weights of models of 0.6B to 8B."""
    if gated:
        step = min(_GATED_STEP, triton.next_power_of_2(summed))
        return OneRowTile(_GATED_STEP // step, step, warps=4)
    if summed >= _LONG_SUM:
        return OneRowTile(2, _STEP, warps=4)
    return OneRowTile(8, _STEP // 2, warps=4) if summed % _STEP else OneRowTile(4, _STEP, warps=8)


def takes_one_row(weight: torch.Tensor) -> bool:
    """Returns whether the kernel is used for a weight of this size and type on this device, gated or plain."""
    if not is_for_hopper(weight) or weight.numel() < _LEAST_ELEMENTS:
        return False
    rows, summed = weight.shape
    measured = summed % _SUMMED_MULTIPLE == 0 and summed <= _STEP * _MOST_STEPS
    return measured and rows <= _MOST_ROWS_OF_WEIGHT


def one_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    tile: OneRowTile | None = None,
) -> torch.Tensor:
    """Returns `x @ weight.T + bias` of a single row as `[..., n]`; with a gated weight, `silu(gate) * up` of the two
    halves.

    - x: contiguous `[..., k]` of the weight's type, one row.
    - weight: bfloat16 or float16 `[n, k]`, contiguous; gated: `[2 * n, k]`, gate first.
    - bias: `[n]` (gated: `[2 * n]`) of the same type, contiguous, or None.

    Sums are in float32, in an order that depends on the tile alone, and are rounded once, to the weight's type; silu
    is rounded before it is multiplied, as by `silu_mul`. On CUDA: one launch on the current stream, no
    synchronization; compiled for each k. Raises ValueError for other tensors.
    """
    check_weight(weight, bias, gated=gated)
    columns, summed = weight.shape[0] // (1 + gated), weight.shape[1]
    fits = x.shape[-1:] == (summed,) and x.numel() == summed
    if not fits or not x.is_contiguous() or x.dtype != weight.dtype:
        raise ValueError(f"x must be one contiguous row {weight.dtype} [..., {summed}]; got {describe(x)}")
    if backend(x.device) != "triton":
        return few_rows_reference(x, weight, bias, gated=gated)
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    tile = tile or one_row_tile(summed, gated)
    with on_device(x):
        one_row_kernel[(triton.cdiv(columns, tile.columns),)](
            x,
            weight,
            bias,
            out,
            columns,
            GATED=gated,
            SUMMED=summed,
            COLUMNS=tile.columns,
            STEP=tile.step,
            num_warps=tile.warps,
            **overlap(x.device),
        )
    return out


@triton.jit(do_not_specialize=["columns"])  # type: ignore[untyped-decorator]
def one_row_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,  # [SUMMED]
    weight,  # [columns, SUMMED]; gated: [2 * columns, SUMMED]
    bias,  # [columns] or [2 * columns], or None
    out,  # [columns]
    # sizes
    columns,
    # meta
    GATED: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    SUMMED: tl.constexpr,  # noqa: N803 - a constant, because the loop is unrolled: loads of all steps start early
    COLUMNS: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, STEP)
    # Columns beyond the last one load another column, so that loads need no mask for them; they are not stored.
    some_weight = weight + (column % columns).to(tl.int64)[:, None] * SUMMED + element[None, :]
    some_more = some_weight + columns.to(tl.int64) * SUMMED
    sums = tl.zeros([COLUMNS, STEP], tl.float32)
    more = tl.zeros([COLUMNS, STEP], tl.float32)
    # No kernel writes weights, so a part is loaded before the wait. Gated products were not faster so.
    if not GATED:
        first = _part(some_weight, element[None, :], SUMMED, STEP)
    wait_for_previous(OVERLAP)
    for start in tl.static_range(0, SUMMED, STEP):
        across = _part(x + start + element, element, SUMMED - start, STEP).to(tl.float32)[None, :]
        if start > 0 or GATED:
            first = _part(some_weight + start, element[None, :], SUMMED - start, STEP)
        sums += first.to(tl.float32) * across
        if GATED:
            up = _part(some_more + start, element[None, :], SUMMED - start, STEP)
            more += up.to(tl.float32) * across
    exact = tl.sum(sums, 1)
    exact_up = tl.sum(more, 1)
    if bias is not None:
        exact += tl.load(bias + column % columns).to(tl.float32)
        if GATED:
            exact_up += tl.load(bias + columns + column % columns).to(tl.float32)
    result = exact.to(out.dtype.element_ty)
    if GATED:
        result = gated(result, exact_up.to(out.dtype.element_ty))
    tl.store(out + column, result, mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _part(place, element, LEFT: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Loads the elements of a step; those beyond the `LEFT` elements that the sum still has are zero."""
    return tl.load(place, mask=element < LEFT, other=0.0) if LEFT < STEP else tl.load(place)
