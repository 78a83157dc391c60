"""How a copy kernel is started: the size of its tiles, one launch for all planes, no search for what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

VECTOR_BYTES = 16
"""Widest access of one thread."""
# Of all tiles from 2 to 64 KiB the smallest came closest to a plain copy on an H200 (`disagg bench kernels`): a
# multiprocessor holds so many programs that they hide each other's memory latency. A row is not cut below 4 KiB.
_MAX_BLOCK_WORDS = 512
_INT32_MAX = 2**31 - 1
_KEPT = 1024
"""Launchers: one for each kernel and shape of rows; a rank has a few."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program copies, and with how many warps."""

    words: int = 256
    warps: int = 2

    def shape(self, row_words: int) -> tuple[int, int]:
        """Words and tokens, both powers of two."""
        block_words = min(1 << (row_words - 1).bit_length(), _MAX_BLOCK_WORDS)
        return block_words, max(1, self.words // block_words)


# Within 2 % of the plain copy at every width of row (H200, 256 MiB). A kernel whose last program adds up the sums,
# instead of a second launch, reached 85 to 95 %.
SUMMED_TILE = Tile(warps=1)
"""Of a copy that also sums (`kernels.checksum`)."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """`kernel(*tensors, *sizes, *constants, BLOCK_TOKENS, BLOCK_WORDS)`, over all planes, tokens and words.

    Made by `launcher`, which keeps it: what does not differ from call to call is worked out once.
    """

    kernel: Any
    device: torch.device
    types: tuple[object, ...]
    """What tells apart element types of the tensors."""
    planes: int
    row_words: int
    constants: tuple[int, ...]
    tile: Tile
    _compiled: dict[int, Any] = field(default_factory=dict, compare=False)
    """By what else Triton compiles apart for: alignment of addresses, width of sizes."""

    def run(
        self,
        tokens: int,
        addresses: tuple[int | None, ...],
        sizes: tuple[int, ...],
        tensors: Callable[[], tuple[torch.Tensor | None, ...]],
    ) -> None:
        """One launch on the current stream of `device`; never waits for it.

        `tensors` makes the views that the kernel is compiled for, and is only asked when it is not compiled yet;
        `addresses` are those of their first elements, None for none (which `types` tells apart). Nothing is compiled
        anew for `sizes`.
        """
        block_words, block_tokens = self.tile.shape(self.row_words)
        grid = (-(-tokens // block_tokens), self.planes, -(-self.row_words // block_words))
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
        """Triton's own launcher takes 17 us to find what it compiled before."""
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
            enable_fp_fusion=False,  # nothing to fuse; newer Triton warns when this is left to its default
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
) -> Launcher:
    """The launcher for these; see `Launcher`."""
    return Launcher(kernel, device, types, planes, row_words, constants, tile)
