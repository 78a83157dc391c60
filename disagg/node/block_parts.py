"""Copies between a rank's blocks of host memory and the parts of pages and states that a storage holds.

A block of a page has all heads of the rank: `[layers, planes, page_size, heads, head_bytes]` of each class of layers.
A block of a recurrent state has each tensor of the rank; a tensor may have heads of several classes, one class after
another (`StateClass.joined`). A stored part has the heads of one unit, so that groups of other tensor-parallel sizes
can read it (`disagg.storage.parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.types import Shard, Span, StateClass
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

    def of_block(self, block: torch.Tensor) -> torch.Tensor:
        """Returns the view `[layers, *shape]` of a block, uint8 `[block_bytes]`."""
        stop = self.first_bytes + len(self.layers) * self.row_bytes
        rows = block[self.first_bytes : stop].view(len(self.layers), self.row_bytes)
        return torch.unflatten(rows[:, self.columns.start : self.columns.stop], 1, self.shape)


class _PartPlace(NamedTuple):
    """Location of one part in a rank's block, and in a buffer that holds all parts of one page or state."""

    whole: _ClassPlace
    layers: Span
    """Layers of the part, local to the rank."""
    heads: Span
    content: Span
    """Bytes of the part in the buffer."""

    def of_block(self, block: torch.Tensor) -> torch.Tensor:
        """Returns the part's view of a block, uint8 `[block_bytes]`."""
        whole = self.whole.of_block(block)
        return whole[self.layers.start : self.layers.stop, :, :, self.heads.start : self.heads.stop]


class BlockParts:
    """The parts of a page, or of a recurrent state, that a rank reads, or writes, in a fixed order."""

    def __init__(self, grid: PartGrid, shard: Shard, parts: Sequence[PagePart]) -> None:
        """`parts`: some or all of `grid.parts_of(shard)`, or of `grid.states_of(shard)`."""
        self.parts = tuple(parts)
        places = [*_page_places(grid, shard), *_state_places(grid, shard)]
        self._places: list[_PartPlace] = []
        self.nbytes = 0
        """Size of all parts of a page or state."""
        for part in self.parts:
            whole = places[part.class_index]
            content = Span(self.nbytes, self.nbytes + grid.nbytes(part))
            layers, heads = part.layers.shift(-whole.layers.start), part.heads.shift(-whole.heads.start)
            self._places.append(_PartPlace(whole, layers, heads, content))
            self.nbytes = content.stop

    def gather(self, block: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copies the parts of a block to `buffer`, uint8 `[nbytes]`, one after another."""
        for place in self._places:
            source = place.of_block(block)
            buffer[place.content.start : place.content.stop].view(source.shape).copy_(source)

    def part_bytes(self, index: int) -> int:
        """Returns the size of a part in bytes, by its index in `parts`."""
        return len(self._places[index].content)

    def gather_part(self, index: int, block: torch.Tensor, into: torch.Tensor) -> None:
        """Copies one part of a block to `into`, uint8 `[part_bytes(index)]`."""
        source = self._places[index].of_block(block)
        into.view(source.shape).copy_(source)

    def scatter(self, buffer: torch.Tensor, block: torch.Tensor) -> None:
        """Copies the parts in `buffer` to a block; reverts `gather`."""
        for place in self._places:
            target = place.of_block(block)
            target.copy_(buffer[place.content.start : place.content.stop].view(target.shape))

    def views(self, buffer: torch.Tensor) -> list[memoryview]:
        """Returns the memory of each part in `buffer`."""
        memory = buffer.numpy().data
        return [memory[place.content.start : place.content.stop] for place in self._places]


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
