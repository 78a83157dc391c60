"""Launching of copy kernels: tile sizes, one launch for all planes, and cached compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch

VECTOR_BYTES = 16
"""Widest access of one thread."""
# Of all tiles from 2 to 64 KiB, the smallest came closest to a plain copy on an H200 (`disagg bench
# kernels`): a multiprocessor runs enough programs to hide memory latency. A row is not cut below 4 KiB.
_MAX_BLOCK_WORDS = 512
_INT32_MAX = 2**31 - 1
_KEPT = 1024
"""Number of cached launchers, one for each kernel and row shape; a rank has a few."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Bytes that one program copies, and its number of warps."""

    words: int = 256
    warps: int = 2

    def shape(self, row_words: int) -> tuple[int, int]:
        """Returns words and tokens of a tile, both powers of two."""
        block_words = min(1 << (row_words - 1).bit_length(), _MAX_BLOCK_WORDS)
        return block_words, max(1, self.words // block_words)


# Within 2 % of the plain copy at every row width (H200, 256 MiB). A kernel whose last program adds up the
# sums, instead of a second launch, reached 85 to 95 %.
SUMMED_TILE = Tile(warps=1)
"""Tile of a copy with checksum (`kernels.copy.checksum`)."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Runs `kernel(*tensors, *sizes, *constants, BLOCK_TOKENS, BLOCK_WORDS)` over all planes, tokens and words.

    Created and cached by `launcher`: values that are equal for all calls are computed once.
    """

    kernel: Any
    device: torch.device
    types: tuple[object, ...]
    """Key for the element types of the tensors."""
    planes: int
    row_words: int
    constants: tuple[int, ...]
    tile: Tile
    most_programs: int | None = None
    """None: one program for each tile, a grid of tokens, planes and words. Otherwise a grid of one dimension with at
    most this many programs, each of which copies several tiles."""
    _compiled: dict[int, Any] = field(default_factory=dict, compare=False)
    """Compiled kernels by Triton's specialization: alignment of addresses, width of sizes."""

    def run(
        self,
        tokens: int,
        addresses: tuple[int | None, ...],
        sizes: tuple[int, ...],
        tensors: Callable[[], tuple[torch.Tensor | None, ...]],
    ) -> None:
        """Launches the kernel on the current stream of `device`, without waiting for it.

        `tensors` returns the views for compilation, and is called only if the kernel is not compiled yet.
        `addresses` are the addresses of the tensors' first elements; None stands for an absent tensor, which is
        also part of `types`. New `sizes` cause no compilation.
        """
        block_words, block_tokens = self.tile.shape(self.row_words)
        grid = (-(-tokens // block_tokens), self.planes, -(-self.row_words // block_words))
        if self.most_programs is not None:
            grid = (min(prod(grid), self.most_programs), 1, 1)
        constants = (*self.constants, block_tokens, block_words)
        if self.device.type != "cuda":  # the interpreter
            self.kernel[grid](*tensors(), *sizes, *constants)
        elif self.device.index == torch.cuda.current_device():
            self._run_on_device(grid, addresses, sizes, constants, tensors)
        else:
            with torch.cuda.device(self.device):  # Triton launches on the current device's current stream
                self._run_on_device(grid, addresses, sizes, constants, tensors)

    def _run_on_device(
        self,
        grid: tuple[int, int, int],
        addresses: tuple[int | None, ...],
        sizes: tuple[int, ...],
        constants: tuple[int, ...],
        tensors: Callable[[], tuple[torch.Tensor | None, ...]],
    ) -> None:
        """Launches the compiled kernel directly, because Triton's launcher takes 17 us to find it."""
        variant = 0
        for address in addresses:
            variant = variant << 1 | (address is not None and address % VECTOR_BYTES == 0)
        for size in sizes:
            variant = variant << 1 | (size > _INT32_MAX)
        compiled = self._compiled.get(variant)
        if compiled is not None:
            compiled[grid](*addresses, *sizes, *constants)
            return
        self._compiled[variant] = self.kernel[grid](
            *tensors(),
            *sizes,
            *constants,
            num_warps=self.tile.warps,
            enable_fp_fusion=False,  # the kernel has nothing to fuse; newer Triton warns about the default
        )


@lru_cache(maxsize=_KEPT)
def launcher(
    kernel: Any,
    device: torch.device,
    types: tuple[object, ...],
    planes: int,
    row_words: int,
    constants: tuple[int, ...],
    tile: Tile = Tile(),
    most_programs: int | None = None,
) -> Launcher:
    """Returns the cached launcher for the arguments; see `Launcher`."""
    return Launcher(kernel, device, types, planes, row_words, constants, tile, most_programs)
