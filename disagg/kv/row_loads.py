"""Loads of runs of consecutive pages from consecutive blocks of host memory, without a kernel.

In a block the planes of all layers follow each other, and in a pool the pages of a plane. So one plane of a run of
pages is one copy of rows: the rows are adjacent on the device, and a block apart in host memory. The copy engine
needs no multiprocessor, so the compute kernels of that time do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import structlog
import torch

from disagg.core.types import Span
from disagg.kv.block_runs import Run
from disagg.kv.copy_engine import CopyRefusedError, RowLoader

MOST_RUNS = 32
"""Largest number of runs of a load. The compute thread queues 16 planes at once, 2.5 ms for this number of runs."""
LEAST_ROWS_BYTES = 1 << 20
"""Smallest average size of a copy of rows. The bus takes 19 us for it, a call of the driver 5 us."""

log = structlog.get_logger(__name__)
_cuda: Any = torch.cuda  # its streams carry no types


class PoolPages(NamedTuple):
    """The layers of a pool that are copied."""

    pool: torch.Tensor
    """`[layers, planes, slots, heads, head_dim]`, contiguous."""
    size: int
    """Slots of a page."""
    layers: Span


class HostRows(NamedTuple):
    """A part of blocks of host memory."""

    memory: torch.Tensor
    """uint8 `[blocks, block_bytes]`, contiguous; pinned if the pool is on a GPU."""
    offset_bytes: int
    """Offset within each block of the pool's part, with all layers."""


class RowLoads:
    """Loads of runs by the copy engine. One thread at a time may use it."""

    def __init__(self) -> None:
        self.refused = False
        """Whether the driver has refused a copy; no other one is tried then."""

    def suit(self, pool: torch.Tensor, page_size: int, runs: Sequence[Run]) -> bool:
        """Returns whether the runs are few and long, so that the calls of the driver take less time than the copies,
        and whether the driver has accepted all copies so far."""
        nbytes = sum(run.blocks for run in runs) * _row_bytes(pool, page_size)
        few = len(runs) <= MOST_RUNS and nbytes >= len(runs) * LEAST_ROWS_BYTES
        return few and not self.refused

    def load(self, pages: PoolPages, runs: Sequence[Run], host: HostRows) -> bool:
        """Copies the layers of all pages of `runs` from their blocks, on the current stream.

        On a GPU nothing waits, unless the device's queue is full. The caller keeps all tensors alive until an event
        recorded on the current stream afterwards is complete. No page may repeat. Returns False if the driver refused
        a copy: any part of the bytes may be copied then, and later work of the current stream may copy them again.
        """
        pool, row_bytes = pages.pool, _row_bytes(pages.pool, pages.size)
        load = (_queued if pool.is_cuda else _copied)(pool, host.memory, row_bytes)
        block_bytes, plane_bytes = host.memory.shape[1], pool.stride(1) * pool.element_size()
        planes = range(pages.layers.start * pool.shape[1], pages.layers.stop * pool.shape[1])
        # Offsets of each run in the host memory and within a plane of the pool.
        places = [
            (run.block * block_bytes + host.offset_bytes, run.first * row_bytes, run.blocks) for run in runs
        ]
        try:
            for plane in planes:
                in_block, in_pool = plane * row_bytes, plane * plane_bytes
                for in_memory, in_plane, count in places:
                    load(in_memory + in_block, in_pool + in_plane, count)
        except CopyRefusedError as exc:
            self.refused = True
            log.warning("loads_of_rows_refused", error=str(exc), now="a kernel reads host memory directly")
        return not self.refused


def _row_bytes(pool: torch.Tensor, page_size: int) -> int:
    """Returns the size of a plane of a page."""
    return page_size * pool.shape[3] * pool.shape[4] * pool.element_size()


_Load = Callable[[int, int, int], None]
"""Copies rows: offset of the first row in the host memory, offset in the pool, number of rows."""


def _queued(pool: torch.Tensor, memory: torch.Tensor, row_bytes: int) -> _Load:
    rows = RowLoader(memory.shape[1], row_bytes, _cuda.current_stream(pool.device).cuda_stream)
    host, device, load = memory.data_ptr(), pool.data_ptr(), rows.load
    return lambda in_memory, in_pool, count: load(host + in_memory, device + in_pool, count)


def _copied(pool: torch.Tensor, memory: torch.Tensor, row_bytes: int) -> _Load:
    content = pool.view(-1).view(torch.uint8)

    def load(in_memory: int, in_pool: int, count: int) -> None:
        rows = content[in_pool : in_pool + count * row_bytes].view(count, row_bytes)
        block, column = divmod(in_memory, memory.shape[1])
        rows.copy_(memory[block : block + count, column : column + row_bytes])

    return load
