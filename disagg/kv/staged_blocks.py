"""Copies between pages of a GPU's pool and blocks of host memory, through a buffer on the GPU.

A kernel that accesses host memory occupies multiprocessors for as long as the bus takes, and the compute kernels of
that time wait for them. Here the copy engine moves rows of bytes between host memory and the buffer, and a kernel
moves them between the buffer and the pages, at the speed of device memory. The buffer has two halves, so that both
work at the same time.

The calling thread waits for what a copy depends on, and only then calls the driver. With many copies that waited on
the device, for the step that computes their pages and for each other, launches of the compute thread took
milliseconds (docs/performance.md); probably the driver's queue of copies was full, and a blocked call kept its lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import structlog
import torch

from disagg.core.types import Span
from disagg.kv.block_runs import Run, consecutive
from disagg.kv.copy_engine import ByteRows, CopyRefusedError, queue_rows
from kernels.copy.page_blocks import Blocks, Pages, blocks_to_pages, pages_to_blocks

HALF_BYTES = 16 << 20
"""Size of half a buffer. The bus takes 0.3 ms for it, which is long beside a launch and short beside a step."""
LEAST_CALL_BYTES = 128 << 10
"""Smallest average size of a run of blocks for a copy through the buffer: the bus takes 2 us for it, as long as a
call of the driver."""
MOST_CALLS = 64
"""Largest number of copies, each a call of the driver, that fill or empty one half of the buffer. At most those of
both halves are queued on the device."""
_MOST_ROWS = 256
"""Largest number of pages, or parts of pages, in half of the buffer."""

log = structlog.get_logger(__name__)
_cuda: Any = torch.cuda  # its streams and events carry no types


class HostPart(NamedTuple):
    """A part of blocks of host memory."""

    memory: torch.Tensor
    """uint8 `[blocks, block_bytes]`, contiguous; pinned if the pool is on a GPU."""
    blocks: Sequence[int]
    """Block of each page."""
    offset_bytes: int
    """Offset within each block of the pool's part, with all layers."""
    slab_blocks: int
    """Number of blocks that are pinned together."""


class _StagedPart(NamedTuple):
    """Pages and layers that fit half of the buffer."""

    pages: Pages
    """The layers as a pool of their own."""
    row_bytes: int
    """Size of the layers of a page."""
    offset_bytes: int
    """Offset of the layers within a block."""
    runs: list[Run]


def few_copies(blocks: Sequence[int], slab_blocks: int, part_bytes: int) -> bool:
    """Returns whether the runs of the blocks are long enough for a staged copy of `part_bytes` of each block."""
    return len(blocks) * part_bytes >= len(consecutive(blocks, slab_blocks)) * LEAST_CALL_BYTES


class StagedCopies:
    """A buffer on a device, and copies through it in one direction. One thread at a time may use it."""

    def __init__(self, device: torch.device, half_bytes: int) -> None:
        """Allocates the buffer. On a CPU every copy is complete when its call returns."""
        self._device = device
        self._halves = torch.empty((2, half_bytes), dtype=torch.uint8, device=device)
        self._rows = torch.arange(_MOST_ROWS, device=device)
        self._engine = _cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[Any] = [None, None]
        """Event after the last use of each half; None on a CPU and before the first use."""
        self._half = 0
        self.refused = False
        """Whether the driver has refused a copy; no other one is tried then."""

    def fits(self, buffer: torch.Tensor, page_size: int) -> bool:
        """Returns whether a layer of a page of `buffer` fits half of the buffer, and no copy was refused."""
        return not self.refused and 0 < _layer_bytes(buffer, page_size) <= self._halves.shape[1]

    def load(self, pages: Pages, host: HostPart) -> bool:
        """Copies from the blocks to the pages, all layers of `pages.layers`.

        `load` and `store` wait for earlier work of the current stream, and for all parts of the copy but the last
        ones. These are queued on the current stream and on the copy engine when the call returns; an event recorded
        on the current stream afterwards covers both. The caller keeps all tensors alive until that event is complete.
        No page and no block may repeat. Both return False if the driver refused a copy: any part of the bytes may be
        copied then, and later work of the current stream may copy them again.
        """
        self._wait_for(self._event(None))
        for part in self._parts(pages, host):
            half = self._next_half()
            self._wait_for(self._free[half])
            if not self._copy_rows(half, part, host, to_host=False):
                return False
            self._stream_waits(self._event(self._engine))
            blocks_to_pages(part.pages, self._blocks(half, part))
            self._free[half] = self._event(None)
        return True

    def store(self, pages: Pages, host: HostPart) -> bool:
        """Copies from the pages to the blocks; otherwise like `load`."""
        for part in self._parts(pages, host):
            half = self._next_half()
            self._wait_for(self._free[half])
            pages_to_blocks(part.pages, self._blocks(half, part))
            self._wait_for(self._event(None))
            copied = self._copy_rows(half, part, host, to_host=True)
            self._free[half] = self._event(self._engine)
            if not copied:
                break
        self._stream_waits(self._free[self._half])
        return not self.refused

    def warm(self, buffer: torch.Tensor, page_size: int) -> None:
        """Compiles the kernels with a copy of the first page's first layer to the buffer and back."""
        numbers = torch.zeros(1, dtype=torch.int64, device=self._device)
        pages = Pages(buffer, numbers, page_size, Span(0, 1))
        part = next(self._parts(pages, HostPart(self._halves, [0], 0, slab_blocks=1)))
        pages_to_blocks(part.pages, self._blocks(0, part))
        blocks_to_pages(part.pages, self._blocks(0, part))

    def _parts(self, pages: Pages, host: HostPart) -> Iterator[_StagedPart]:
        layer_bytes = _layer_bytes(pages.pool, pages.size)
        half_bytes = self._halves.shape[1]
        most_layers = half_bytes // layer_bytes
        for first in range(pages.layers.start, pages.layers.stop, most_layers):
            layers = Span(first, min(first + most_layers, pages.layers.stop))
            pool, row_bytes = pages.pool[layers.start : layers.stop], len(layers) * layer_bytes
            most_rows = min(half_bytes // row_bytes, _MOST_ROWS)
            start = 0
            while start < len(host.blocks):
                runs = consecutive(host.blocks[start : start + most_rows], host.slab_blocks)[:MOST_CALLS]
                end = start + sum(run.blocks for run in runs)
                some = Pages(pool, pages.numbers[start:end], pages.size, Span(0, len(layers)))
                yield _StagedPart(some, row_bytes, host.offset_bytes + layers.start * layer_bytes, runs)
                start = end

    def _next_half(self) -> int:
        self._half ^= 1
        return self._half

    def _blocks(self, half: int, part: _StagedPart) -> Blocks:
        """Returns half of the buffer as blocks, one for each page of the part."""
        rows = len(part.pages.numbers)
        memory = self._halves[half, : rows * part.row_bytes].view(rows, part.row_bytes)
        return Blocks(memory, self._rows[:rows], 0)

    def _copy_rows(self, half: int, part: _StagedPart, host: HostPart, *, to_host: bool) -> bool:
        """Queues the copies between half of the buffer and the host, one for each run, on the engine's stream.

        Returns False if the driver refused one of them.
        """
        try:
            for run in part.runs:
                self._copy_run(run, half, part, host, to_host=to_host)
        except CopyRefusedError as exc:
            self.refused = True
            log.warning("copies_not_staged", error=str(exc), now="a kernel accesses host memory directly")
        return not self.refused

    def _copy_run(self, run: Run, half: int, part: _StagedPart, host: HostPart, *, to_host: bool) -> None:
        buffer, pitch_bytes, row_bytes = self._halves[half], host.memory.shape[1], part.row_bytes
        at_bytes = run.first * row_bytes
        if self._engine is None:
            rows = buffer[at_bytes : at_bytes + run.blocks * row_bytes].view(run.blocks, row_bytes)
            columns = slice(part.offset_bytes, part.offset_bytes + row_bytes)
            blocks = host.memory[run.block : run.block + run.blocks, columns]
            (blocks if to_host else rows).copy_(rows if to_host else blocks)
            return
        start = host.memory.data_ptr() + run.block * pitch_bytes + part.offset_bytes
        device_rows, host_rows = (
            ByteRows(buffer.data_ptr() + at_bytes, row_bytes),
            ByteRows(start, pitch_bytes),
        )
        stream = self._engine.cuda_stream
        queue_rows(device_rows, host_rows, row_bytes, run.blocks, to_host=to_host, stream=stream)

    def _event(self, stream: Any) -> Any:
        """Records an event on `stream`; None: the current stream. Returns None on a CPU."""
        if self._engine is None:
            return None
        event = _cuda.Event(blocking=True)  # a thread that waits for it sleeps, and leaves its core to others
        event.record(stream or _cuda.current_stream(self._device))
        return event

    @staticmethod
    def _wait_for(event: Any) -> None:
        """Blocks the calling thread until the work before `event` is complete."""
        if event is not None:
            event.synchronize()

    def _stream_waits(self, event: Any) -> None:
        """Makes later work of the current stream wait for `event`."""
        if event is not None:
            _cuda.current_stream(self._device).wait_event(event)


def _layer_bytes(buffer: torch.Tensor, page_size: int) -> int:
    """Returns the size of a layer of a page of `page_size` slots."""
    layers, _, slots = buffer.shape[:3]
    return buffer.nbytes // slots * page_size // max(1, layers)
