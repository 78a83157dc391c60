"""Copies between a rank's blocks of host memory and the parts of pages that a storage holds.

A block has all heads of the rank (`[layers, planes, page_size, heads, head_bytes]` of each class of layers). A stored
part has the heads of one unit, so that groups of other tensor-parallel sizes can read it (`disagg.storage.parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.types import Shard, Span
from disagg.storage.parts import PagePart, PartGrid


class _PartPlace(NamedTuple):
    """Location of one part in a rank's block, and in a buffer that holds all parts of one page."""

    first_bytes: int
    """First byte of the part's class in the block."""
    shape: tuple[int, ...]
    """`[layers, planes, page_size, heads, head_bytes]` of the class on this rank."""
    layers: Span
    """Layers of the part, local to the rank."""
    heads: Span
    content: Span
    """Bytes of the part in the buffer."""

    def of_block(self, block: torch.Tensor) -> torch.Tensor:
        """Returns the part's view of a block, uint8 `[block_bytes]`."""
        nbytes = torch.Size(self.shape).numel()
        whole = block[self.first_bytes : self.first_bytes + nbytes].view(self.shape)
        return whole[self.layers.start : self.layers.stop, :, :, self.heads.start : self.heads.stop]


class BlockParts:
    """The parts of a page that a rank reads, or writes, in a fixed order."""

    def __init__(self, grid: PartGrid, shard: Shard, parts: Sequence[PagePart]) -> None:
        """`parts`: some or all of `grid.parts_of(shard)`."""
        self.parts = tuple(parts)
        firsts, shapes, first_bytes = [], [], 0
        for mine, one in zip(shard.parts, grid.layout.classes, strict=True):
            shape = (len(mine.layers), one.planes, grid.page_size, len(mine.heads), one.head_bytes)
            firsts.append(first_bytes)
            shapes.append(shape)
            first_bytes += torch.Size(shape).numel()
        self._places: list[_PartPlace] = []
        self.nbytes = 0
        """Size of all parts of a page."""
        for part in self.parts:
            mine, number = shard.parts[part.class_index], part.class_index
            content = Span(self.nbytes, self.nbytes + grid.nbytes(part))
            layers, heads = part.layers.shift(-mine.layers.start), part.heads.shift(-mine.heads.start)
            self._places.append(_PartPlace(firsts[number], shapes[number], layers, heads, content))
            self.nbytes = content.stop

    def gather(self, block: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copies the parts of a block to `buffer`, uint8 `[nbytes]`, one after another."""
        for place in self._places:
            source = place.of_block(block)
            buffer[place.content.start : place.content.stop].view(source.shape).copy_(source)

    def scatter(self, buffer: torch.Tensor, block: torch.Tensor) -> None:
        """Copies the parts in `buffer` to a block; reverts `gather`."""
        for place in self._places:
            target = place.of_block(block)
            target.copy_(buffer[place.content.start : place.content.stop].view(target.shape))

    def views(self, buffer: torch.Tensor) -> list[memoryview]:
        """Returns the memory of each part in `buffer`."""
        memory = buffer.numpy().data
        return [memory[place.content.start : place.content.stop] for place in self._places]
