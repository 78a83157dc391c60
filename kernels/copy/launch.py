"""Launches of copy kernels: tile sizes, a grid over all planes, and a cache of compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch

VECTOR_BYTES = 16
"""Widest access of one thread."""
# Of all tiles from 2 to 64 KiB, the smallest tile came closest to a plain copy on an H200 (`disagg bench kernels`),
# because a multiprocessor then runs enough programs to hide memory latency. Rows of up to 4 KiB are not cut.
_MAX_BLOCK_WORDS = 512
_INT32_MAX = 2**31 - 1
_KEPT = 1024
"""Largest number of cached launchers. A rank needs a few: one for each kernel and row shape."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Size of the tile that one program copies, in words, and the program's number of warps."""

    words: int = 256
    warps: int = 2

    def shape(self, row_words: int) -> tuple[int, int]:
        """Returns the width of a tile in words and its height in tokens, both powers of two."""
        block_words = min(1 << (row_words - 1).bit_length(), _MAX_BLOCK_WORDS)
        return block_words, max(1, self.words // block_words)


# With this tile, a copy with checksum has at least 98 % of the plain copy's speed at every row width (H200, 256 MiB).
# A kernel whose last program adds up the partial sums, instead of a second launch, reached 85 to 95 %.
SUMMED_TILE = Tile(warps=1)
"""Tile of a copy with checksum (`kernels.copy.checksum`)."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Runs `kernel(*tensors, *sizes, *constants, BLOCK_TOKENS, BLOCK_WORDS)` over all planes, tokens and words.

    `launcher` creates and caches launchers, so that values which are equal for all calls are computed once.
    """

    kernel: Any
    device: torch.device
    types: tuple[object, ...]
    """Element types of the tensors, in any form that distinguishes them; part of the cache key."""
    planes: int
    row_words: int
    constants: tuple[int, ...]
    tile: Tile
    most_programs: int | None = None
    """Largest number of programs of a launch, in a grid of one dimension; each program copies several tiles if
    needed. None: one program for each tile, in a grid of tokens, planes and words."""
    _compiled: dict[int, Any] = field(default_factory=dict, compare=False)
    """Compiled kernels. The key is Triton's specialization: alignment of addresses, width of sizes."""

    def run(
        self,
        tokens: int,
        addresses: tuple[int | None, ...],
        sizes: tuple[int, ...],
        tensors: Callable[[], tuple[torch.Tensor | None, ...]],
    ) -> None:
        """Launches the kernel on the current stream of `device`, without waiting for it; see `prepare`."""
        self.prepare(tokens, addresses, sizes, tensors)()

    def prepare(
        self,
        tokens: int,
        addresses: tuple[int | None, ...],
        sizes: tuple[int, ...],
        tensors: Callable[[], tuple[torch.Tensor | None, ...]],
    ) -> Callable[[], None]:
        """Returns a function that launches the kernel on the current stream of `device`, all arguments prepared.

        `tensors` returns the tensors for compilation; it is called only if the kernel is not compiled yet (and by the
        interpreter). `addresses` are the addresses of the tensors' first elements, None for an absent tensor; `types`
        must distinguish absent tensors too. New `sizes` cause no compilation.
        """
        block_words, block_tokens = self.tile.shape(self.row_words)
        grid = (-(-tokens // block_tokens), self.planes, -(-self.row_words // block_words))
        if self.most_programs is not None:
            grid = (min(prod(grid), self.most_programs), 1, 1)
        constants = (*self.constants, block_tokens, block_words)
        if self.device.type != "cuda":  # the interpreter
            return lambda: self.kernel[grid](*tensors(), *sizes, *constants)
        return self._prepare_on_device(grid, addresses, sizes, constants, tensors)

    def _prepare_on_device(
        self,
        grid: tuple[int, int, int],
        addresses: tuple[int | None, ...],
        sizes: tuple[int, ...],
        constants: tuple[int, ...],
        tensors: Callable[[], tuple[torch.Tensor | None, ...]],
    ) -> Callable[[], None]:
        """Returns a launch of the compiled kernel, because Triton's launcher takes 17 us to look up a compiled
        kernel."""
        variant = 0
        for address in addresses:
            variant = variant << 1 | (address is not None and address % VECTOR_BYTES == 0)
        for size in sizes:
            variant = variant << 1 | (size > _INT32_MAX)
        arguments = (*addresses, *sizes, *constants)

        def launch() -> None:
            compiled = self._compiled.get(variant)
            if compiled is not None:
                compiled[grid](*arguments)
                return
            self._compiled[variant] = self.kernel[grid](
                *tensors(),
                *sizes,
                *constants,
                num_warps=self.tile.warps,
                enable_fp_fusion=False,  # the kernel has nothing to fuse; newer Triton warns about the default
            )

        def launch_on_device() -> None:
            if self.device.index == torch.cuda.current_device():
                launch()
            else:
                with torch.cuda.device(self.device):  # Triton launches on the current device's current stream
                    launch()

        return launch_on_device


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
