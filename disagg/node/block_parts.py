"""Where a rank's blocks of host memory have the parts of pages and states that a storage holds.

A block of a page has all heads of the rank: `[layers, planes, page_size, heads, head_bytes]` of each class of layers.
A block of a recurrent state has each tensor of the rank; a tensor may have heads of several classes, one class after
another (`StateClass.joined`). A stored part has the heads of one unit, so that groups of other tensor-parallel sizes
can read it (`disagg.storage.parts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from disagg.core.types import Shard, Span, StateClass
from disagg.storage.bounce import copy
from disagg.storage.parts import PagePart, PartGrid


class _ClassPlace(NamedTuple):
    """Location of one class of layers, or of state tensors, in a rank's block."""

    first_bytes: int
    layers: Span
    """Global numbers of the rank's layers, or of its state tensors."""
    heads: Span
    """Global numbers of the rank's heads."""
    row_bytes: int
    """Distance between layers."""
    columns: Span
    """Bytes of the class in each layer's row."""
    shape: tuple[int, int, int, int]
    """`[planes, tokens, heads, head_bytes]` of a layer's `columns`."""


class _PartPlace(NamedTuple):
    """Location of one part in a rank's block: `[layers, planes, tokens, bytes of the heads]`."""

    first_bytes: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    @classmethod
    def of(cls, whole: _ClassPlace, layers: Span, heads: Span) -> _PartPlace:
        """`layers` and `heads`: those of the part, local to the rank."""
        planes, tokens, all_heads, head_bytes = whole.shape
        first_bytes = whole.first_bytes + layers.start * whole.row_bytes
        first_bytes += whole.columns.start + heads.start * head_bytes
        token_bytes = all_heads * head_bytes
        return cls(
            first_bytes,
            (len(layers), planes, tokens, len(heads) * head_bytes),
            (whole.row_bytes, tokens * token_bytes, token_bytes, 1),
        )

    @property
    def nbytes(self) -> int:
        """Size of the part."""
        return math.prod(self.shape)

    def of_block(self, block: np.ndarray[Any, Any]) -> memoryview:
        """Returns the memory of the part in a block, uint8 `[block_bytes]`."""
        return np.ndarray(self.shape, np.uint8, block.data, self.first_bytes, self.strides).data


class BlockParts:
    """The parts of a page, or of a recurrent state, that a rank reads, or writes, in a fixed order."""

    def __init__(self, grid: PartGrid, shard: Shard, parts: Sequence[PagePart]) -> None:
        """`parts`: some or all of `grid.parts_of(shard)`, or of `grid.states_of(shard)`."""
        self.parts = tuple(parts)
        places = [*_page_places(grid, shard), *_state_places(grid, shard)]
        self._places: list[_PartPlace] = []
        for part in self.parts:
            whole = places[part.class_index]
            layers, heads = part.layers.shift(-whole.layers.start), part.heads.shift(-whole.heads.start)
            self._places.append(_PartPlace.of(whole, layers, heads))
        self.nbytes = sum(place.nbytes for place in self._places)
        """Size of all parts of a page or state."""

    def part_bytes(self, index: int) -> int:
        """Returns the size of a part in bytes, by its index in `parts`."""
        return self._places[index].nbytes

    def views(self, block: torch.Tensor) -> list[memoryview]:
        """Returns the memory of each part in a block, uint8 `[block_bytes]`.

        The memory is strided if the block has more heads than the part: `[layers, planes, tokens, bytes]`.
        """
        memory = block.numpy()
        return [place.of_block(memory) for place in self._places]

    def gather_part(self, index: int, block: torch.Tensor, into: torch.Tensor) -> None:
        """Copies one part of a block to `into`, uint8 `[part_bytes(index)]`."""
        copy(into.numpy().data, self._places[index].of_block(block.numpy()))


def _page_places(grid: PartGrid, shard: Shard) -> list[_ClassPlace]:
    """Returns the place of each class of layers in a block of a page."""
    places: list[_ClassPlace] = []
    first_bytes = 0
    for mine, one in zip(shard.parts, grid.layout.classes, strict=True):
        shape = (one.planes, grid.page_size, len(mine.heads), one.head_bytes)
        row_bytes = torch.Size(shape).numel()
        places.append(_ClassPlace(first_bytes, mine.layers, mine.heads, row_bytes, Span(0, row_bytes), shape))
        first_bytes += len(mine.layers) * row_bytes
    return places


def _state_places(grid: PartGrid, shard: Shard) -> list[_ClassPlace]:
    """Returns the place of each class of state tensors in a block of a state."""
    tensors: list[list[tuple[Shard, StateClass]]] = []
    for mine, one in zip(shard.states, grid.layout.states, strict=True):
        if not one.joined:
            tensors.append([])
        tensors[-1].append((mine, one))
    places: list[_ClassPlace] = []
    first_bytes = 0
    for classes in tensors:
        row_bytes, start = sum(len(mine.heads) * one.head_bytes for mine, one in classes), 0
        for mine, one in classes:
            shape = (1, 1, len(mine.heads), one.head_bytes)
            columns = Span(start, start + len(mine.heads) * one.head_bytes)
            places.append(_ClassPlace(first_bytes, mine.layers, mine.heads, row_bytes, columns, shape))
            start = columns.stop
        first_bytes += len(classes[0][0].layers) * row_bytes
    return places
