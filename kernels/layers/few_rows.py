"""Matrix products of few rows, for decode steps. Their time is the time to read the weight from memory once.

The kernel computes the transposed product, so that columns of the result fill the 64 rows of a tensor core
instruction. Where cuBLAS splits a sum over several programs, it adds the parts in a second launch; here, the last
program of a column block adds them (Stream-K's fixup: Osama et al., 2023), always in the same order. Gate and up
projections of a gated MLP can be multiplied in the same launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.common import dot, on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.silu_mul import gated, silu_mul_reference
from kernels.overlap import overlap, wait_for_previous

LEAST_ROWS, MOST_ROWS = 2, 64
"""Numbers of rows for which the kernel is used. A product of one row has a kernel of its own (`one_row`)."""
DTYPES = (torch.bfloat16, torch.float16)
_CAPABILITY = (9, 0)
"""The GPU generation on which the tiles were measured."""
_COLUMNS = range(2048, 8193)
"""Columns of plain products for which the kernel is faster than cuBLAS. With more columns, cuBLAS splits no sums;
fewer were not measured."""
_LONG_SUM, _LONG_SUM_OF_FEW = 8192, 4096
"""Elements of a sum from which the kernel is faster than cuBLAS for more than 32 rows too; the second number is for
weights of up to `_FEW_COLUMNS` columns."""
_FEW_COLUMNS, _FEW_SPLIT_ROWS = 2048, 32
"""Columns up to which four programs share a sum, and rows from which this was measured to be faster than two."""
_STEP = 128
"""Largest number of elements that a tile sums in one step."""
_LEAST_COLUMNS = 32
"""Smallest number of columns of a tile."""
_ALIGNMENT_BYTES = 16
_LINE_BYTES = tl.constexpr(128)
"""Bytes that a request to the L2 cache loads."""


@dataclass(frozen=True, slots=True)
class FewRowsTile:
    """Tile sizes of a program."""

    columns: int
    """Columns of the result. A gated program reads as many columns of the gate and of the up projection."""
    summed: int
    """Elements of the summed dimension in one step; they divide this dimension."""
    splits: int = 1
    """Number of programs that share the summed dimension."""
    warps: int = 4
    stages: int = 4
    ahead: int = 0
    """Steps whose part of the weight is loaded into the L2 cache while the previous kernel ends."""


def tile_of(rows: int, columns: int, gated: bool) -> FewRowsTile:
    """Returns the fastest tile for a product of `rows` and `columns`, measured on an H200 with weights of an 8B Llama
    and a Granite 4 of 3B."""
    if gated:
        return FewRowsTile(64, 128, stages=3) if rows <= 16 else FewRowsTile(64, 64, stages=4)
    if columns <= _FEW_COLUMNS and rows > _FEW_SPLIT_ROWS:
        # Fewer columns are fewer programs: more of them share a sum, so that they fill the multiprocessors.
        return FewRowsTile(64, 128, splits=4, stages=5, ahead=4)
    return FewRowsTile(64, 128, splits=2, stages=5)


def is_for_hopper(weight: torch.Tensor) -> bool:
    """Returns whether `weight` has the type and the layout that the kernels of few rows and of one row need, on a GPU
    of the generation on which they were measured."""
    plain = weight.dim() == 2 and weight.is_contiguous() and weight.dtype in DTYPES and weight.is_cuda
    if not plain or torch.cuda.get_device_capability(weight.device) != _CAPABILITY:
        return False
    return weight.data_ptr() % _ALIGNMENT_BYTES == 0 and backend(weight.device) == "triton"


def most_rows_of(weight: torch.Tensor, *, gated: bool = False) -> int:
    """Returns the largest number of rows for which the kernel was measured to be faster than cuBLAS, for a weight of
    this size and type on this device; 0: none.
    """
    if not is_for_hopper(weight) or weight.shape[1] % _STEP or not (gated or weight.shape[0] in _COLUMNS):
        return 0
    long = _LONG_SUM_OF_FEW if weight.shape[0] <= _FEW_COLUMNS else _LONG_SUM
    return MOST_ROWS if gated or weight.shape[1] >= long else MOST_ROWS // 2


def check_weight(weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> None:
    """Raises ValueError unless the kernels can multiply by `weight` and add `bias`; see `FewRowsProduct`."""
    plain = weight.dim() == 2 and weight.is_contiguous() and weight.dtype in DTYPES
    if not plain or weight.shape[0] % (1 + gated):
        raise ValueError(f"weight must be contiguous bfloat16 or float16 [n, k]; got {describe(weight)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(f"bias must be {weight.dtype} [{weight.shape[0]}]; got {describe(bias)}")


class FewRowsProduct:
    """Computes `x @ weight.T + bias` for few rows; with a gated weight, `silu(gate) * up` of the two halves.

    Not thread-safe, and launches must be on one stream at a time: programs of a launch share counters, which the
    object owns. Keeps references to weight and bias, not copies.

    - weight: bfloat16 or float16 `[n, k]`, contiguous; gated: `[2 * n, k]`, gate first.
    - bias: `[n]` (gated: `[2 * n]`) of the same type, contiguous, or None.

    Raises ValueError for other weights.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        check_weight(weight, bias, gated=gated)
        self._weight, self._bias, self._gated = weight, bias, gated
        self._columns, self._summed = weight.shape[0] // (1 + gated), weight.shape[1]
        # Allocated once, because recorded launches keep the address.
        self._arrived = torch.zeros(
            triton.cdiv(self._columns, _LEAST_COLUMNS), dtype=torch.int32, device=weight.device
        )
        """Number of programs of each column block that have written their part; all zero between launches."""

    def __call__(self, x: torch.Tensor, tile: FewRowsTile | None = None) -> torch.Tensor:
        """Returns the product `[..., n]` for `x`, contiguous `[..., k]` of the weight's type, up to `MOST_ROWS` rows.

        Each sum is rounded once, to the weight's type; silu is rounded before it is multiplied, as by `silu_mul`. On
        CUDA: one launch on the current stream, no synchronization. Raises ValueError for other `x` or tiles.
        """
        rows = x.numel() // max(1, self._summed)
        fits = x.shape[-1] == self._summed and x.is_contiguous() and x.dtype == self._weight.dtype
        if not fits or rows > MOST_ROWS:
            raise ValueError(
                f"x must be contiguous {self._weight.dtype} [..., {self._summed}] of up to {MOST_ROWS} rows; "
                f"got {describe(x)}"
            )
        if backend(x.device) != "triton":
            return few_rows_reference(x, self._weight, self._bias, gated=self._gated)
        out = torch.empty(*x.shape[:-1], self._columns, dtype=x.dtype, device=x.device)
        if rows:
            tile = tile or tile_of(rows, self._columns, self._gated)
            if self._summed % tile.summed or tile.columns < _LEAST_COLUMNS:
                raise ValueError(
                    f"{tile} does not fit sums of {self._summed} elements: the elements of a step must divide those "
                    f"of a sum, and a tile needs {_LEAST_COLUMNS} columns or more"
                )
            with on_device(x):
                self._launch(x, out, rows, tile)
        return out

    def _launch(self, x: torch.Tensor, out: torch.Tensor, rows: int, tile: FewRowsTile) -> None:
        blocks = triton.cdiv(self._columns, tile.columns)
        parts = None
        if tile.splits > 1:
            shape = (tile.splits, 1 + self._gated, rows, self._columns)
            parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        few_rows_kernel[(blocks, tile.splits)](
            x,
            self._weight,
            self._bias,
            out,
            parts,
            self._arrived,
            rows,
            self._columns,
            self._summed,
            GATED=self._gated,
            ROWS=max(16, triton.next_power_of_2(rows)),
            COLUMNS=tile.columns,
            SUMMED=tile.summed,
            SPLITS=tile.splits,
            AHEAD=tile.ahead,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **overlap(x.device),
        )


def few_rows_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
) -> torch.Tensor:
    """Computes `FewRowsProduct` in plain torch, on any device."""
    y = torch.nn.functional.linear(x, weight, bias)
    return silu_mul_reference(*y.chunk(2, dim=-1)) if gated else y


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def few_rows_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,  # [rows, summed]
    weight,  # [columns, summed]; gated: [2 * columns, summed]
    bias,  # [columns] or [2 * columns], or None
    out,  # [rows, columns]
    parts,  # float32 [SPLITS, 1 or 2, rows, columns], or None without splits
    arrived,  # int32 [blocks], all zero; the last program of a block sets its counter to zero again
    # sizes
    rows,
    columns,
    summed,
    # meta
    GATED: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SUMMED: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    AHEAD: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    block, split = tl.program_id(0), tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    row, element = tl.arange(0, ROWS), tl.arange(0, SUMMED)
    mask = (column < columns)[:, None] & (row < rows)[None, :]
    steps = tl.cdiv(summed // SUMMED, SPLITS)
    first = split * steps * SUMMED
    last = tl.minimum(first + steps * SUMMED, summed)
    # Indices beyond the ends load another row or column, so the loop needs no mask; their results are not stored.
    some_x = x + (row % rows)[:, None] * summed + element[None, :]
    some_weight = weight + (column % columns).to(tl.int64)[:, None] * summed + element[None, :]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    more = tl.zeros([COLUMNS, ROWS], tl.float32)
    if OVERLAP and AHEAD > 0:  # no kernel writes weights
        _load_ahead(weight, column % columns, first, last, summed, COLUMNS, SUMMED, AHEAD)
        if GATED:
            _load_ahead(weight, columns + column % columns, first, last, summed, COLUMNS, SUMMED, AHEAD)
    wait_for_previous(OVERLAP)
    for start in range(first, last, SUMMED):
        across = tl.trans(tl.load(some_x + start))
        sums = dot(tl.load(some_weight + start), across, sums)
        if GATED:
            more = dot(tl.load(some_weight + columns.to(tl.int64) * summed + start), across, more)
    size = rows * columns
    place = row[None, :] * columns + column[:, None]
    complete = True
    if SPLITS > 1:
        own = parts + split * (1 + GATED) * size + place
        tl.store(own, sums, mask=mask)
        if GATED:
            tl.store(own + size, more, mask=mask)
        tl.debug_barrier()  # all stores of this program precede its arrival
        complete = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1
    if complete:
        if SPLITS > 1:
            tl.store(arrived + block, 0)
            sums = tl.zeros([COLUMNS, ROWS], tl.float32)
            more = tl.zeros([COLUMNS, ROWS], tl.float32)
            for part in tl.static_range(SPLITS):
                other = parts + part * (1 + GATED) * size + place
                sums += tl.load(other, mask=mask, other=0.0)
                if GATED:
                    more += tl.load(other + size, mask=mask, other=0.0)
        if bias is not None:
            sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
            if GATED:
                more += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)[
                    :, None
                ]
        result = sums.to(out.dtype.element_ty)
        if GATED:
            result = gated(result, more.to(out.dtype.element_ty))
        tl.store(out + place, result, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _load_ahead(  # type: ignore[no-untyped-def]
    weight,
    column,  # [COLUMNS]
    first,
    last,
    summed,
    COLUMNS: tl.constexpr,  # noqa: N803
    SUMMED: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
):
    """Loads the weight's elements of the first `STEPS` steps into the L2 cache."""
    lines: tl.constexpr = SUMMED * weight.dtype.element_ty.primitive_bitwidth // 8 // _LINE_BYTES
    line = tl.arange(0, lines) * (SUMMED // lines)
    place = weight + column.to(tl.int64)[:, None] * summed + line[None, :]
    for start in range(first, tl.minimum(first + STEPS * SUMMED, last), SUMMED):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(place + start).to(tl.int64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
