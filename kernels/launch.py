"""How a copy kernel is started: the size of its tiles, one launch for all planes, no search for what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VECTOR_BYTES = 16
"""Widest access of one thread."""
# Of all tiles from 2 to 64 KiB the smallest came closest to a plain copy on an H200 (`disagg bench kernels`): a
# multiprocessor holds so many programs that they hide each other's memory latency. A row is not cut below 4 KiB.
_MAX_BLOCK_WORDS = 512
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program copies, and with how many warps."""

    words: int = 256
    warps: int = 2

    def shape(self, row_words: int) -> tuple[int, int]:
        """Words and tokens, both powers of two."""
        block_words = min(1 << (row_words - 1).bit_length(), _MAX_BLOCK_WORDS)
        return block_words, max(1, self.words // block_words)


@dataclass(frozen=True, slots=True)
class Launch:
    """`kernel(*tensors, *sizes, *constants, BLOCK_TOKENS, BLOCK_WORDS)`, over all planes, tokens and words."""

    kernel: Any
    device: torch.device
    tensors: Callable[[], tuple[torch.Tensor, ...]]
    """Makes the views that the kernel is compiled for; only asked when it is not compiled yet."""
    addresses: tuple[int, ...]
    """Of the first elements of `tensors`."""
    types: tuple[object, ...]
    """What tells apart element types of `tensors`."""
    planes: int
    tokens: int
    row_words: int
    sizes: tuple[int, ...]
    """Differ from call to call; nothing is compiled anew for them."""
    constants: tuple[int, ...]
    tile: Tile = Tile()

    def run(self) -> None:
        """One launch on the current stream of `device`; never waits for it."""
        block_words, block_tokens = self.tile.shape(self.row_words)
        grid = (-(-self.tokens // block_tokens), self.planes, -(-self.row_words // block_words))
        constants = (*self.constants, block_tokens, block_words)
        if self.device.type != "cuda":  # the interpreter
            self.kernel[grid](*self.tensors(), *self.sizes, *constants)
        elif self.device.index == torch.cuda.current_device():
            self._run_on_device(grid, constants)
        else:
            with torch.cuda.device(self.device):  # Triton launches on the current device's current stream
                self._run_on_device(grid, constants)

    def _run_on_device(self, grid: tuple[int, int, int], constants: tuple[int, ...]) -> None:
        """Triton's own launcher takes 17 us to find what it compiled before; found here, a launch takes 9."""
        # Everything that Triton compiles apart for.
        key = (
            self.kernel,
            self.device.index,
            constants,
            self.types,
            *(address % VECTOR_BYTES == 0 for address in self.addresses),
            *(size > _INT32_MAX for size in self.sizes),
        )
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[grid](*self.addresses, *self.sizes, *constants)
            return
        _compiled[key] = self.kernel[grid](
            *self.tensors(),
            *self.sizes,
            *constants,
            num_warps=self.tile.warps,
            enable_fp_fusion=False,  # nothing to fuse; newer Triton warns when this is left to its default
        )


_compiled: dict[tuple[object, ...], Any] = {}
