"""A linear layer in which the bits of a row's result do not depend on the other rows, with little host overhead.

A step has hundreds of linear layers, and Triton's lookup of a compiled kernel takes longer than many of these layers
run. Each `Linear` therefore caches the compiled kernel of each tile, and the TMA descriptors, in which only an
address changes.

For many rows, the device's library (cuBLAS) computes blocks of `LIBRARY_ROWS` rows, if the library's result for that
shape has the same bits as the kernel's result. The library is a few per cent faster for many rows, and sums in the
same order for every product of one shape.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.matmul import GROUP_M, descriptor, matmul, run, run_tma, tma_programs
from kernels.layers.matmul_tiles import MatmulTile, by_descriptor, tile_of

LIBRARY_ROWS = 1024
_ALIGNMENT_BYTES = 16
_LIBRARY_ALIGNMENT_BYTES = 256
"""Largest alignment that affects the library's choice of a kernel."""
_library_agrees: dict[tuple[object, ...], bool] = {}
"""Whether the library's result has the same bits as the kernel's, by device, by type, shape and alignment of the
weight, and by presence of a bias."""


class Linear:
    """Computes `x @ weight.T + bias` for one weight. Not thread-safe. Keeps a reference to the weight, not a copy.

    - weight: float32, bfloat16 or float16 `[n, k]`, contiguous.
    - bias: `[n]` of the same type, contiguous, or None.

    Raises ValueError for a weight of another shape.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dim() != 2 or not weight.is_contiguous():
            raise ValueError(f"weight must be contiguous [n, k]; got {describe(weight)}")
        self._weight, self._bias = weight, bias
        self._n, self._k = weight.shape
        self._tma = by_descriptor(weight)
        addresses = [t.data_ptr() for t in (weight, bias) if t is not None]
        self._aligned = all(address % _ALIGNMENT_BYTES == 0 for address in addresses)
        self._compiled: dict[MatmulTile, Any] = {}
        self._of_weight: dict[MatmulTile, Any] = {}
        self._of_x: dict[MatmulTile, Any] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product `[..., n]` for `x`, `[..., k]` of the weight's type. The result is rounded once.

        On CUDA: one launch on the current stream, or with the library one for each `LIBRARY_ROWS` rows. No
        synchronization, except for the comparison with the library (once per shape). Raises ValueError and
        ConfigError like `matmul`.
        """
        rows = x.reshape(-1, self._k)
        on_gpu = x.is_cuda and backend(x.device) == "triton" and x.dtype == self._weight.dtype
        if on_gpu and self._aligned and rows.is_contiguous() and rows.data_ptr() % _ALIGNMENT_BYTES == 0:
            out = torch.empty(*x.shape[:-1], self._n, dtype=x.dtype, device=x.device)
            if rows.shape[0]:
                with on_device(x):
                    self._run(rows, out.view(-1, self._n))
            return out
        found = matmul(rows[None], self._weight[None].transpose(1, 2), self._bias)
        return found.view(*x.shape[:-1], self._n)

    def _run(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        done = 0
        if len(rows) >= LIBRARY_ROWS and self._has_library():
            done = len(rows) - len(rows) % LIBRARY_ROWS
            for first in range(0, done, LIBRARY_ROWS):
                block = slice(first, first + LIBRARY_ROWS)
                self._by_library(rows[block], out[block], self._bias)
        if done < len(rows):
            self.launch(rows[done:], out[done:])

    def _by_library(self, rows: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        if bias is None:
            torch.mm(rows, self._weight.t(), out=out)
        else:
            torch.addmm(bias, rows, self._weight.t(), out=out)

    def _has_library(self) -> bool:
        """Returns whether the library's product of `LIBRARY_ROWS` rows has the same bits as the kernel's.

        The comparison runs once per shape, with random rows and bias, and waits for the device. Two different
        summation orders would not give the same bits for a million sums.
        """
        weight = self._weight
        aligned = weight.data_ptr() % _LIBRARY_ALIGNMENT_BYTES == 0
        kind = (weight.device, weight.dtype, weight.shape, aligned, self._bias is None)
        if kind not in _library_agrees:
            numbers: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
            rows = torch.randn(LIBRARY_ROWS, self._k, **numbers)
            bias = None if self._bias is None else torch.randn(self._n, **numbers)
            ours, found = (torch.empty(LIBRARY_ROWS, self._n, **numbers) for _ in "12")
            Linear(weight, bias).launch(rows, ours)
            self._by_library(rows, found, bias)
            _library_agrees[kind] = torch.equal(ours, found)
        return _library_agrees[kind]

    def launch(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Computes `out`, `[m, n]`, from `rows`, `[m, k]`, always with the kernel, not with the library."""
        m = rows.shape[0]
        tile = tile_of(m, self._n, rows.dtype, rows.device, self._tma)
        compiled = self._compiled.get(tile)
        if compiled is None:
            self._compiled[tile] = self._first(rows, out, tile)
        elif tile.descriptors:
            self._again_tma(compiled, rows, out, tile)
        else:
            self._again(compiled, rows, out, tile)

    def _first(self, rows: torch.Tensor, out: torch.Tensor, tile: MatmulTile) -> Any:
        if tile.descriptors:
            return run_tma(rows, self._weight, self._bias, out, tile)
        return run(rows[None], self._weight[None].transpose(1, 2), self._bias, out[None], tile)

    def _again(self, compiled: Any, rows: torch.Tensor, out: torch.Tensor, tile: MatmulTile) -> None:
        m, n, k = rows.shape[0], self._n, self._k
        grid = (-(-m // tile.rows) * -(-n // tile.columns), 1, 1)
        meta = (k % tile.summed == 0, GROUP_M, tile.transposed, tile.rows, tile.columns, tile.summed)
        compiled[grid](
            rows, self._weight, self._bias, out, None, m, n, k, 0, k, 1, 0, 1, k, *meta
        )  # for one batch, batch strides are not used

    def _again_tma(self, compiled: Any, rows: torch.Tensor, out: torch.Tensor, tile: MatmulTile) -> None:
        m = rows.shape[0]
        programs = tma_programs(tile, m, self._n, rows.device)
        of_weight = self._of_weight.get(tile)
        if of_weight is None:
            of_weight = self._of_weight[tile] = descriptor(self._weight, tile.columns, tile)
        of_x = self._of_x.get(tile)
        if of_x is None:
            of_x = self._of_x[tile] = descriptor(rows, tile.rows, tile)
        of_x.base, of_x.shape = rows, [m, self._k]
        meta = (GROUP_M, tile.rows, tile.columns, tile.summed)
        compiled[programs, 1, 1](of_x, of_weight, self._bias, out, m, self._n, self._k, programs, *meta)
        of_x.base = None  # the launch has copied the address; release the memory
