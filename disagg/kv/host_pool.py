"""Host memory of one rank for cached KV pages and recurrent states: the second tier of the prefix cache.

All parts of a page (each class of layers, K and V, scales) form one contiguous *block*, the page-first layout of
SGLang's hierarchical cache; `kernels.copy.page_blocks` copies between pages and blocks. Recurrent states have
separate blocks of their own size. Copies of all layers go through a buffer on the GPU (`staged_blocks`). Loads layer
by layer copy long runs of consecutive blocks without a kernel (`row_loads`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from disagg.core.types import Span
from disagg.kv.block_runs import Run, runs_of
from disagg.kv.host_slabs import HostSlabs
from disagg.kv.pages import pages_for
from disagg.kv.row_loads import HostRows, PoolPages, RowLoads
from disagg.kv.staged_blocks import HALF_BYTES, HostPart, StagedCopies, few_copies
from disagg.kv.upload import upload
from kernels.copy.page_blocks import Blocks, Pages, blocks_to_pages, pages_to_blocks

BLOCK_ALIGNMENT_BYTES = 4096
"""Alignment of the blocks, as direct I/O requires."""


class _Numbers:
    """Pages of a copy, and their blocks."""

    def __init__(
        self, pages: Sequence[int], blocks: Sequence[int], device: torch.device, slab_blocks: int
    ) -> None:
        # Freed blocks are allocated again in any order; the order of the copies does not matter.
        order = sorted(range(len(blocks)), key=blocks.__getitem__)
        self._pages, self.blocks = [pages[at] for at in order], [blocks[at] for at in order]
        self._device, self._slab_blocks = device, slab_blocks

    @cached_property
    def runs(self) -> list[Run]:
        """Runs of pages and blocks, which only loads without a kernel need."""
        return runs_of(self._pages, self.blocks, self._slab_blocks)

    @cached_property
    def on_device(self) -> torch.Tensor:
        """int64 `[2, pages]` on the device: the pages' numbers in row 0, their blocks' numbers in row 1."""
        return upload([*self._pages, *self.blocks], self._device).view(2, -1)


class _Part(NamedTuple):
    """Layers of one buffer."""

    buffer: torch.Tensor
    layers: Span
    """Layers, local to the buffer."""
    offset_bytes: int
    """Offset within a block of the buffer's part."""


class HostPool:
    """Host memory blocks for the pages (or state slots) of one or several device tensors, with copies both ways."""

    def __init__(
        self, buffers: Sequence[torch.Tensor], page_size: int, blocks: int, half_bytes: int | None = None
    ) -> None:
        """Allocates no host memory yet. `blocks`: number of blocks. `half_bytes`: size of half a buffer for staged
        copies; None: `staged_blocks.HALF_BYTES` on a GPU, and direct copies on a CPU.

        `buffers`: parts of a page, each contiguous `[layers, planes, slots, heads, head_dim]`, on one device: the
        buffers of a `KVPool`, or, with a `page_size` of 1, the `byte_views` of a `MambaPool`. `buffers` may be empty
        if `blocks` is 0.
        """
        self._buffers, self._page_size = list(buffers), page_size
        pinned, nbytes = bool(buffers) and buffers[0].is_cuda, block_bytes(page_bytes(buffers, page_size))
        self.memory = HostSlabs(blocks, nbytes, pinned=pinned)
        """Memory of the blocks; block `i` has all parts of one page. Reserve blocks before a copy."""
        half_bytes = (HALF_BYTES if pinned else 0) if half_bytes is None else half_bytes
        staged = bool(blocks and half_bytes)
        self._loads = StagedCopies(buffers[0].device, half_bytes) if staged else None
        self._stores = StagedCopies(buffers[0].device, half_bytes) if staged else None
        self._rows = RowLoads()
        self.layers = sum(buffer.shape[0] for buffer in buffers)
        """Number of layers of all parts; layers are numbered part after part."""

    def store(self, pages: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies page `pages[i]` to block `blocks[i]`, all layers.

        On a GPU, `store` and `load` block until earlier work of the current stream is complete, and all parts of the
        copy but the last ones: call them on a thread that may wait, never on the compute thread. The last parts are
        queued on the current stream. All three methods raise `InvariantError` if a block is not reserved.
        """
        self._copy(self._numbers(pages, blocks), Span(0, self.layers), to_host=True, staged=True)

    def load(self, pages: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies block `blocks[i]` to page `pages[i]`, all layers."""
        for _ in self.load_groups(pages, blocks, [Span(0, self.layers)], staged=True):
            pass

    def load_groups(
        self, pages: Sequence[int], blocks: Sequence[int], groups: Sequence[Span], *, staged: bool = False
    ) -> Iterator[Span]:
        """Copies block `blocks[i]` to page `pages[i]`, one group of layers after the other; yields each group when
        its copy is queued.

        `staged`: copies through the buffer if possible, which may wait. Otherwise the copy engine copies the blocks
        directly if their runs are long, else a kernel does; both need fewer calls of the driver, and do not wait.
        """
        numbers = self._numbers(pages, blocks)
        for group in groups:
            self._copy(numbers, group, to_host=False, staged=staged)
            yield group

    def warm(self) -> None:
        """Compiles the copy kernels with copies between the first page and scratch memory. Waits for the device."""
        if not (self.memory.blocks and self._buffers[0].is_cuda):
            return
        scratch = torch.empty((1, self.memory.memory.shape[1]), dtype=torch.uint8, pin_memory=True)
        numbers, offset_bytes = upload([0], self._buffers[0].device), 0
        for buffer in self._buffers:
            pages = Pages(buffer, numbers, self._page_size, Span(0, buffer.shape[0]))
            for copy in (pages_to_blocks, blocks_to_pages):
                copy(pages, Blocks(scratch, numbers, offset_bytes))
            if self._loads is not None and self._loads.fits(buffer, self._page_size):
                self._loads.warm(buffer, self._page_size)
            offset_bytes += page_bytes([buffer], self._page_size)
        torch.cuda.synchronize(self._buffers[0].device)

    def _numbers(self, pages: Sequence[int], blocks: Sequence[int]) -> _Numbers | None:
        """Returns the numbers of pages and blocks; None if there are none."""
        if not pages:
            return None
        self.memory.require_reserved(blocks)
        return _Numbers(pages, blocks, self._buffers[0].device, self.memory.slab_blocks)

    def _copy(self, numbers: _Numbers | None, layers: Span, *, to_host: bool, staged: bool) -> None:
        if numbers is None:
            return
        start = offset_bytes = 0
        for buffer in self._buffers:
            stop = start + buffer.shape[0]
            first, end = max(layers.start, start), min(layers.stop, stop)
            if first < end:
                part = _Part(buffer, Span(first - start, end - start), offset_bytes)
                if staged:
                    done = self._copied_staged(numbers, part, to_host)
                else:
                    done = not to_host and self._loaded_as_rows(numbers, part)
                if not done:
                    self._copy_by_kernel(numbers, part, to_host)
            start, offset_bytes = stop, offset_bytes + page_bytes([buffer], self._page_size)

    def _loaded_as_rows(self, numbers: _Numbers, part: _Part) -> bool:
        """Loads a part without a kernel; returns False if that is not possible or too slow."""
        if not self._rows.suit(part.buffer, self._page_size, numbers.runs):
            return False
        pages = PoolPages(part.buffer, self._page_size, part.layers)
        return self._rows.load(pages, numbers.runs, HostRows(self.memory.memory, part.offset_bytes))

    def _copied_staged(self, numbers: _Numbers, part: _Part, to_host: bool) -> bool:
        """Copies a part through the buffer; returns False if that is not possible or too slow."""
        memory, copies = self.memory, self._stores if to_host else self._loads
        if copies is None or not copies.fits(part.buffer, self._page_size):
            return False
        if not few_copies(numbers.blocks, memory.slab_blocks, page_bytes([part.buffer], self._page_size)):
            return False
        host = HostPart(memory.memory, numbers.blocks, part.offset_bytes, memory.slab_blocks)
        return (copies.store if to_host else copies.load)(self._pages(numbers, part), host)

    def _copy_by_kernel(self, numbers: _Numbers, part: _Part, to_host: bool) -> None:
        """Copies a part by a kernel that accesses host memory."""
        copy = pages_to_blocks if to_host else blocks_to_pages
        blocks = Blocks(self.memory.memory, numbers.on_device[1], part.offset_bytes)
        copy(self._pages(numbers, part), blocks)

    def _pages(self, numbers: _Numbers, part: _Part) -> Pages:
        return Pages(part.buffer, numbers.on_device[0], self._page_size, part.layers)


def page_bytes(buffers: Sequence[torch.Tensor], page_size: int) -> int:
    """Returns the size in bytes of a page of `page_size` slots, over all `buffers` of a `HostPool`."""
    return sum(buffer.nbytes // buffer.shape[2] * page_size for buffer in buffers)


def block_bytes(content_bytes: int) -> int:
    """Returns the size in bytes of a block that holds `content_bytes` bytes."""
    return pages_for(content_bytes, BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
