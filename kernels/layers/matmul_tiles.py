"""Tiles of `kernels.layers.matmul`, and the choice of the fastest tile for a product's size.

All tiles give a result the same bits; `kernels.layers.matmul.require_same_bits` checks this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kernels.attention.common import multiprocessors, shared_bytes

_TMA_CAPABILITY = (9, 0)
_TMA_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Tile sizes and variant of a matmul program. All tiles give a result the same bits."""

    rows: int
    columns: int
    summed: int
    """Elements of the summed dimension in one step."""
    warps: int = 4
    stages: int = 4
    rate: float = 1.0
    """Arithmetic rate relative to the best tile, measured on Hopper (4,096 summed elements)."""
    transposed: bool = False
    """Whether the program computes the transposed product. For few rows of `left` this is faster, because columns of
    `right` then fill the 64 rows of a tensor core instruction."""
    descriptors: bool = False
    """Whether the program loads operands by bulk tensor copies (TMA), in a persistent grid."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program with 16-bit operands, in bytes.

        Without descriptors, programs on Hopper use one stage more than counted here. It fits for all of these tiles.
        """
        held = self.stages if self.descriptors else self.stages - 1
        return 2 * (self.rows + self.columns) * self.summed * held

    def cost(self, rows: int, columns: int, programs: int) -> float:
        """Returns the time of a product on `programs` multiprocessors, in relative units and rounded up to whole
        waves."""
        blocks = -(-rows // self.rows) * -(-columns // self.columns)
        return -(-blocks // programs) * self.rows * self.columns / self.rate


_FEW_ROWS = (
    MatmulTile(16, 64, 128, stages=5, transposed=True),
    MatmulTile(32, 64, 128, stages=5, transposed=True),
)
"""Tiles for up to 16 and up to 32 rows. The time for so few rows is the time to read `right`."""
_FLOAT32 = MatmulTile(32, 32, 32, stages=3)
_PLAIN = (
    MatmulTile(64, 32, 128, stages=6, rate=0.6),
    MatmulTile(64, 64, 128, stages=4, rate=0.7),
    MatmulTile(128, 128, 64, warps=8, stages=4, rate=0.75),
)
_TMA = (
    _PLAIN[0],
    MatmulTile(64, 64, 128, stages=4, rate=0.75, descriptors=True),
    MatmulTile(64, 128, 64, stages=5, rate=0.85, descriptors=True),
    MatmulTile(128, 128, 64, stages=5, rate=0.93, descriptors=True),
    MatmulTile(128, 256, 64, warps=8, stages=4, descriptors=True),
)


@lru_cache(maxsize=4096)
def tile_of(rows: int, columns: int, dtype: torch.dtype, device: torch.device, tma: bool) -> MatmulTile:
    """Returns the fastest tile for a product of `rows` and `columns`.

    `tma`: whether the operands support bulk tensor copies; see `by_descriptor`.
    """
    if dtype == torch.float32:
        return _FLOAT32
    if rows <= 32:
        return _FEW_ROWS[rows > 16]
    programs = multiprocessors(device)
    choices = _with_room(_TMA if tma else _PLAIN, device)
    return min(choices, key=lambda tile: tile.cost(rows, columns, programs))


def tiles(dtype: torch.dtype, device: torch.device) -> tuple[MatmulTile, ...]:
    """Returns all tiles that `tile_of` may choose on `device`."""
    if dtype == torch.float32:
        return (_FLOAT32,)
    return (*_FEW_ROWS, *_with_room((*_PLAIN, *(_TMA[1:] if has_tma(device) else ())), device))


def _with_room(choices: tuple[MatmulTile, ...], device: torch.device) -> tuple[MatmulTile, ...]:
    """Returns the tiles that fit into a program's shared memory. Many GPUs have 99 KiB, less than half of
    Hopper's."""
    room = shared_bytes(device)
    return tuple(tile for tile in choices if device.type != "cuda" or tile.shared_bytes <= room)


@lru_cache
def has_tma(device: torch.device) -> bool:
    """Returns whether the device supports bulk tensor copies (TMA)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TMA_CAPABILITY


def by_descriptor(x: torch.Tensor) -> bool:
    """Returns whether bulk tensor copies can read a matrix: 16 bits, rows contiguous, 16-byte aligned."""
    plain = has_tma(x.device) and x.element_size() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    aligned = x.stride(0) * x.element_size() % _TMA_ALIGNMENT_BYTES == 0
    return plain and aligned and x.data_ptr() % _TMA_ALIGNMENT_BYTES == 0
