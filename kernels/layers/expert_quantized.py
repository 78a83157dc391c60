"""Matrix products of rows with the quantized weights of their experts.

With few rows for each expert, one launch reads quantized values and converts them in registers, as
`quantized_linear` does. With many rows, the weights of some experts at a time are converted to the type of the
activations, and `expert_matmul` multiplies. No launch needs the host's decision, so both ways can be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.expert_matmul import expert_matmul, expert_tile
from kernels.layers.expert_rows import UNUSED, ExpertRows, expert_rows
from kernels.layers.matmul import GROUP_M, place
from kernels.layers.matmul_tiles import MatmulTile
from kernels.layers.quantized_linear import QuantizedTile, fitted, kernel_rows, summed_words
from kernels.layers.quantized_weight import (
    FLOATS,
    QuantizedWeight,
    constants_of,
    dequantized,
    dequantized_reference,
    raw_scales,
)
from kernels.layers.quantized_words import scale_of

CONVERTED_BYTES = 256 << 20
"""Largest size of converted weights in memory, except that at least one expert's are converted at a time."""
TILES = {
    8: (
        QuantizedTile(16, 64, 64, stages=3, swapped=True),
        QuantizedTile(64, 64, 32),
        QuantizedTile(128, 64, 32, stages=3),
    ),
    4: (QuantizedTile(16, 64, 64), QuantizedTile(64, 64, 64, stages=3)),
}
"""Tiles by the bits of a value, by ascending number of rows; those of `quantized_linear`."""


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of all experts, `[n, k]` each, stacked by rows in one quantized weight `[experts * n, k]`."""

    weight: QuantizedWeight
    """Its blocks of rows divide n."""
    experts: int

    @property
    def outputs(self) -> int:
        """n."""
        return self.weight.shape[0] // self.experts

    @property
    def inputs(self) -> int:
        """k."""
        return self.weight.columns

    def part(self, first: int, last: int) -> ExpertWeights:
        """Returns the experts from number `first` to `last`, exclusive, as views."""
        rows = self.weight.row_part(first * self.outputs, last * self.outputs)
        return ExpertWeights(rows, last - first)

    def check(self) -> None:
        """Raises ValueError unless the tensors have the shapes that the fields name."""
        self.weight.check()
        if self.weight.shape[0] % self.experts or self.outputs % self.weight.block[0]:
            raise ValueError(
                f"blocks of {self.weight.block[0]} rows must divide each of {self.experts} experts; the weight has "
                f"{self.weight.shape[0]} rows"
            )


def quantized_tiles(weights: ExpertWeights, dtype: torch.dtype) -> tuple[QuantizedTile, ...]:
    """Returns the tiles of the kernel for activations of `dtype`, by ascending number of rows.

    Empty for float32; see `quantized_linear.kernel_rows`.
    """
    weight = weights.weight
    return TILES[weight.bits] if kernel_rows(weight, dtype) else ()


def quantized_tile(weights: ExpertWeights, pairs: int, dtype: torch.dtype) -> QuantizedTile | None:
    """Returns the tile for `pairs` rows: blocks of about the mean number of rows of an expert. None: there are too
    many rows for the kernel."""
    for tile in quantized_tiles(weights, dtype):
        if pairs <= tile.rows * weights.experts:
            return tile
    return None


def expert_quantized(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    choices: int,
    bias: torch.Tensor | None = None,
    *,
    tile: QuantizedTile,
) -> torch.Tensor:
    """Returns the product of each pair's row of `x` with its expert's weights: `[pairs, n]` of the type of `x`.

    - x: float32, bfloat16 or float16 `[pairs / choices, k]`, contiguous. Pair `p` has the row `p // choices`.
    - rows: the order of the pairs in blocks of `tile.rows`.
    - bias: `[experts, n]` of the same type, contiguous, or None.

    On CUDA: one launch on the current stream, no synchronization. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    _check(x, weights, rows, bias, tile)
    if backend(x.device) != "triton":
        return expert_quantized_reference(x, weights, rows, choices, bias, tile=tile)
    out = torch.empty(x.shape[0] * choices, weights.outputs, dtype=x.dtype, device=x.device)
    if out.numel():
        with on_device(x):
            run(x, weights, rows, choices, bias, out, tile)
    return out


def expert_quantized_reference(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    choices: int,
    bias: torch.Tensor | None = None,
    *,
    tile: QuantizedTile,
) -> torch.Tensor:
    """Computes `expert_quantized` in plain torch, on any device. Synchronizes."""
    _check(x, weights, rows, bias, tile)
    out = torch.empty(x.shape[0] * choices, weights.outputs, dtype=x.dtype, device=x.device)
    for owner, padded in zip(rows.owners.tolist(), rows.pairs.view(-1, tile.rows), strict=True):
        if owner != UNUSED:
            pairs = padded[padded != UNUSED].long()
            own = None if bias is None else bias[owner]
            weight = dequantized_reference(weights.part(owner, owner + 1).weight, x.dtype)
            out[pairs] = torch.nn.functional.linear(x[pairs // choices], weight, own)
    return out


class ConvertedExperts:
    """Products with weights that are converted for each product, some experts at a time."""

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        """`dtype`: type of the activations."""
        self._weights, self._dtype = weights, dtype
        expert_bytes = weights.outputs * weights.inputs * dtype.itemsize
        self.each = min(weights.experts, max(1, CONVERTED_BYTES // expert_bytes))
        """Number of experts that are converted at a time."""
        starts = range(0, weights.experts, self.each)
        self._parts = [
            (start, weights.part(start, min(weights.experts, start + self.each))) for start in starts
        ]

    def __call__(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        choices: int,
        bias: torch.Tensor | None = None,
        tile: MatmulTile | None = None,
    ) -> torch.Tensor:
        """Returns the product of each pair's row of `x` with its expert's weights: `[pairs, n]` of the type of `x`.

        - x: `[pairs / choices, k]`, of the type of the activations.
        - chosen: numbers of experts, by pair; `[tokens, choices of a token]`, contiguous.
        - bias: `[experts, n]` of the same type, contiguous, or None.
        - tile: derived from the sizes if omitted.
        """
        outputs = self._weights.outputs
        out = torch.empty(chosen.numel(), outputs, dtype=self._dtype, device=x.device)
        tile = tile or expert_tile(chosen.numel(), self._weights.experts, self._dtype)
        for start, part in self._parts:
            inside = (chosen >= start) & (chosen < start + part.experts)
            rows = expert_rows(torch.where(inside, chosen - start, part.experts), part.experts, tile.rows)
            weights = dequantized(part.weight, self._dtype).view(part.experts, outputs, part.inputs)
            own = None if bias is None else bias[start : start + part.experts]
            expert_matmul(x, weights, rows, choices, own, tile=tile, out=out)
        return out


def _check(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    bias: torch.Tensor | None,
    tile: QuantizedTile,
) -> None:
    if x.dtype not in FLOATS or x.dim() != 2 or x.shape[1] != weights.inputs or not x.is_contiguous():
        raise ValueError(
            f"x must be float32, bfloat16 or float16 [rows, {weights.inputs}], contiguous; got {describe(x)}"
        )
    if len(rows.owners) and rows.block_rows != tile.rows:
        raise ValueError(f"rows has blocks of {rows.block_rows} rows; the tile has {tile.rows}")
    shape = (weights.experts, weights.outputs)
    if bias is not None and (bias.shape != shape or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous {x.dtype} {list(shape)}; got {describe(bias)}")


def run(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    choices: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: QuantizedTile,
) -> Any:
    """Launches the kernel without checking arguments; returns Triton's compiled kernel."""
    weight, n = weights.weight, weights.outputs
    tile = fitted(tile, weight.bits, x.device)
    return expert_quantized_kernel[(len(rows.owners) * -(-n // tile.columns),)](
        x,
        weight.words,
        raw_scales(weight),
        weight.zeros,
        rows.pairs,
        rows.owners,
        bias,
        out,
        len(rows.owners),
        n,
        weights.inputs,
        weight.words.shape[1],
        weight.block[0],
        weight.scales.shape[1],
        **constants_of(weight),
        SHARED=weight.block[0] >= n or weight.block[0] % tile.columns == 0,
        CHOICES=choices,
        GROUP_M=GROUP_M,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        WORDS=min(tile.words, weight.period),
        SWAPPED=tile.swapped,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(do_not_specialize=["blocks"])  # type: ignore[untyped-decorator]
def expert_quantized_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,  # [pairs / CHOICES, k]
    words,  # int32 [experts * n, row_words]
    scales,
    zeros,  # uint8 or None
    pairs,
    owners,
    bias,  # [experts, n] or None
    out,  # [pairs, n]
    # sizes
    blocks,
    n,
    k,
    row_words,
    block_rows,  # divides n
    scale_stride,
    # meta
    BITS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    FLOAT: tl.constexpr,  # noqa: N803 - whether values are floats
    PERIOD: tl.constexpr,  # noqa: N803 - words of a period of columns
    BLOCK: tl.constexpr,  # noqa: N803 - columns that share a scale; 0: all
    PER: tl.constexpr,  # noqa: N803 - values of a word that share a scale
    WHOLE: tl.constexpr,  # noqa: N803 - whether each value has a column
    SHARED: tl.constexpr,  # noqa: N803 - whether all columns of a program share scales
    CHOICES: tl.constexpr,  # noqa: N803
    GROUP_M: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803 - words of a step
    SWAPPED: tl.constexpr,  # noqa: N803
):
    DTYPE: tl.constexpr = x.dtype.element_ty  # noqa: N806
    block, column_block = place(tl.program_id(0), blocks * ROWS, n, GROUP_M, ROWS, COLUMNS)
    owner = tl.load(owners + block)
    if owner < 0:
        return
    pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, WORDS)
    x_inside = (pair >= 0)[:, None]
    x_at = x + (tl.maximum(pair, 0) // CHOICES).to(tl.int64)[:, None] * k + element[None, :]
    # Columns beyond the end load another one; their results are not stored.
    line = owner.to(tl.int64) * n + column % n
    w_at = words + line[:, None] * row_words + element[None, :]
    of_column = line // block_rows * scale_stride
    of_block = (owner.to(tl.int64) * n + column_block * COLUMNS) // block_rows * scale_stride
    of_row = of_block if SHARED else of_column
    sums = summed_words(
        x_at, x_inside, w_at, scales, zeros, of_row, of_column, 0, row_words, k, scale_stride,
        BITS, FLOAT, PERIOD, BLOCK, PER, WHOLE, SHARED, ROWS, COLUMNS, WORDS, SWAPPED, DTYPE,
    )  # fmt: skip
    if BLOCK == 0:
        if SHARED:
            sums *= scale_of(tl.load(scales + of_row))
        else:
            sums *= scale_of(tl.load(scales + of_row))[None, :]
    if bias is not None:
        own = bias + owner.to(tl.int64) * n + column
        sums += tl.load(own, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = out + pair[:, None].to(tl.int64) * n + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=x_inside & (column < n)[None, :])
