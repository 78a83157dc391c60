"""Host memory of one rank for cached KV pages and recurrent states: the second tier of the prefix cache.

All parts of a page (each class of layers, K and V, scales) form one contiguous *block*, the page-first layout of
SGLang's hierarchical cache; `kernels.copy.page_blocks` copies between pages and blocks. Recurrent states have blocks
of another size. Memory is pinned in slabs on first use, because pinning all memory at the start would take seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from disagg.core.types import Span
from disagg.kv.pages import pages_for
from kernels.copy.page_blocks import Blocks, blocks_to_pages, pages_to_blocks

SLAB_BYTES = 256 << 20
"""Size of a slab. Pinning one takes about 0.1 s. A copy of pages to several slabs needs a launch for each slab."""
BLOCK_ALIGNMENT_BYTES = 4096
"""Alignment of the blocks, as direct I/O requires."""


@dataclass(frozen=True, slots=True)
class HostMemoryStatistics:
    """Sizes of a host memory."""

    blocks: int
    block_bytes: int
    pinned_bytes: int
    """Size of the memory allocated so far."""


class BlockMemory:
    """`blocks` blocks of at least `content_bytes` bytes each, allocated in slabs on first use.

    Memory stays allocated until the process ends. Not thread-safe: `reserve` is called before blocks are used.
    """

    def __init__(self, blocks: int, content_bytes: int, *, pinned: bool) -> None:
        """`pinned`: page-locked memory, for kernels on a GPU."""
        self.blocks, self._pinned = blocks, pinned
        self.block_bytes = block_bytes(content_bytes)
        """Distance between blocks."""
        self._slab_blocks = max(1, SLAB_BYTES // max(1, self.block_bytes))
        self._slabs: dict[int, torch.Tensor] = {}

    def reserve(self, numbers: Sequence[int]) -> None:
        """Allocates the memory of blocks `numbers`. Raises `RuntimeError` if the host is out of memory."""
        for slab in sorted({number // self._slab_blocks for number in numbers} - self._slabs.keys()):
            count = min(self._slab_blocks, self.blocks - slab * self._slab_blocks)
            self._slabs[slab] = torch.empty(
                (count, self.block_bytes), dtype=torch.uint8, pin_memory=self._pinned
            )

    def block(self, number: int) -> torch.Tensor:
        """Returns the memory of a reserved block, uint8 `[block_bytes]`."""
        slab, place = divmod(number, self._slab_blocks)
        return self._slabs[slab][place]

    def by_slab(self, numbers: Sequence[int]) -> Iterator[tuple[torch.Tensor, list[int], list[int]]]:
        """Yields each slab of reserved blocks: its memory `[blocks, block_bytes]`, indices of `numbers`, and the
        places of these blocks within the slab."""
        indices: defaultdict[int, list[int]] = defaultdict(list)
        for index, number in enumerate(numbers):
            indices[number // self._slab_blocks].append(index)
        for slab, chosen in indices.items():
            yield self._slabs[slab], chosen, [numbers[index] % self._slab_blocks for index in chosen]

    def statistics(self) -> HostMemoryStatistics:
        """Returns the sizes."""
        pinned_bytes = sum(slab.nbytes for slab in self._slabs.values())
        return HostMemoryStatistics(self.blocks, self.block_bytes, pinned_bytes)


class HostPool:
    """Host memory blocks for pages, or slots, of one or several device tensors, and the copies in both directions."""

    def __init__(self, buffers: Sequence[torch.Tensor], page_size: int, blocks: int) -> None:
        """Allocates no memory yet. `blocks`: number of blocks.

        `buffers`: parts of a page, each contiguous `[layers, planes, slots, heads, head_dim]`, on one device: the
        buffers of a `KVPool`, or, with a `page_size` of 1, the `byte_views` of a `MambaPool`. Empty without blocks.
        """
        self._buffers, self._page_size = list(buffers), page_size
        pinned = bool(buffers) and buffers[0].device.type == "cuda"
        self.memory = BlockMemory(blocks, page_bytes(buffers, page_size), pinned=pinned)
        """Memory of the blocks; block `i` has all parts of one page."""
        self.layers = sum(buffer.shape[0] for buffer in buffers)
        """Number of layers of all parts; layers are numbered part after part."""

    def store(self, pages: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies page `pages[i]` to block `blocks[i]`, all layers.

        On a GPU, `store` and `load` queue copies on the current stream without synchronization. The blocks must be
        reserved.
        """
        for memory, indices, places in self.memory.by_slab(blocks):
            numbers = self._upload([pages[index] for index in indices], places)
            for buffer, offset_bytes in self._parts():
                part = Blocks(memory, offset_bytes)
                layers = Span(0, buffer.shape[0])
                pages_to_blocks(buffer, numbers[0], part, numbers[1], self._page_size, layers)

    def load(self, pages: Sequence[int], blocks: Sequence[int], layers: Span) -> None:
        """Copies `layers` of block `blocks[i]` to page `pages[i]`."""
        for memory, indices, places in self.memory.by_slab(blocks):
            numbers = self._upload([pages[index] for index in indices], places)
            start = 0
            for buffer, offset_bytes in self._parts():
                stop = start + buffer.shape[0]
                first, end = max(layers.start, start), min(layers.stop, stop)
                if first < end:
                    part, span = Blocks(memory, offset_bytes), Span(first - start, end - start)
                    blocks_to_pages(buffer, numbers[0], part, numbers[1], self._page_size, span)
                start = stop

    def _parts(self) -> Iterator[tuple[torch.Tensor, int]]:
        offset_bytes = 0
        for buffer in self._buffers:
            yield buffer, offset_bytes
            offset_bytes += page_bytes([buffer], self._page_size)

    def _upload(self, pages: list[int], places: list[int]) -> torch.Tensor:
        both = torch.tensor([pages, places], dtype=torch.int64)
        device = self._buffers[0].device
        return both.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else both


def page_bytes(buffers: Sequence[torch.Tensor], page_size: int) -> int:
    """Returns the bytes of a page of `page_size` slots in all `buffers`, see `HostPool`."""
    return sum(buffer.nbytes // buffer.shape[2] * page_size for buffer in buffers)


def block_bytes(content_bytes: int) -> int:
    """Returns the size of a block for `content_bytes` bytes."""
    return pages_for(content_bytes, BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
