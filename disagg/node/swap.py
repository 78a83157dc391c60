"""Copies of a rank's KV pages to pinned host memory and back, for preempted requests.

Copies run on a separate thread and stream and block neither the compute thread nor the compute stream. Pages are
gathered into one contiguous block on the device, and one copy moves the block over PCIe. Separate copies of each page
and layer, a few KiB each, would be limited by latency.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import structlog
import torch

from disagg.core.ports import Clock
from disagg.core.types import KVLayout, Shard, Span
from disagg.kv.host_slabs import HostSlabs
from disagg.kv.pages import slots_of
from disagg.kv.pool import KVPool, MHATokenToKVPool
from disagg.kv.transfer_pools import TransferPools
from disagg.model.spec.model_spec import rank_token_bytes
from disagg.node.device import DeviceEvent, DeviceQueue, use_device, wait_for
from disagg.node.plan import Swap
from disagg.node.warm import warm_copies
from kernels.copy.gather import gather
from kernels.copy.layout import segment_bytes
from kernels.copy.scatter import scatter
from staging.routes import Route

log = structlog.get_logger(__name__)

BLOCK_BYTES = 4 << 20
"""Size of a block, or one page if larger. PCIe takes 80 to 200 us for a block, ten times the overhead of a copy."""
AUTOMATIC_BYTES = 4 << 30
HOST_SHARE = 16
"""Divisor of the host's memory for a rank's default limit: eight ranks may use half of the memory."""


def page_bytes(layout: KVLayout, ranks: int, page_size: int) -> int:
    """Returns the size of a page in bytes on the rank with the most heads."""
    return rank_token_bytes(layout, ranks) * page_size


def block_pages(layout: KVLayout, ranks: int, page_size: int, pool_pages: int) -> int:
    """Returns the number of pages in a block, the same on all ranks.

    At most an eighth of the pool, to bound the waste of a partly used block.
    """
    return max(1, min(BLOCK_BYTES // page_bytes(layout, ranks, page_size), pool_pages // 8))


def swap_bytes(configured: int | None, device: torch.device) -> int:
    """Returns a rank's host memory for swapped pages in bytes: `configured`, or a default from the host's memory."""
    if configured is not None:
        return configured
    return min(AUTOMATIC_BYTES, host_memory_bytes() // HOST_SHARE) if device.type == "cuda" else 0


def host_memory_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the memory that this process may use: the smaller of the container's limit and the host's memory."""
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(limit.read_text()))
    except (OSError, ValueError):  # no such file, or `max`
        return total


class Swapper:
    """Swaps pages; owns the host memory, a stream and a thread.

    The compute thread calls `order`. The swapper's thread calls `done(swap, seconds, error)` after the copy; before
    that, pages and blocks must not be reused.
    """

    def __init__(
        self,
        pool: KVPool,
        shard: Shard,
        page_size: int,
        *,
        block_pages: int,
        nbytes: int,
        done: Callable[[Swap, float, str], None],
        clock: Clock = time.monotonic,
    ) -> None:
        """`nbytes`: host memory, rounded down to whole blocks; 0: no swapping."""
        device = pool.device
        self._pool, self._page_size, self._done, self._clock = pool, page_size, done, clock
        self._block_pages = block_pages
        self._block_bytes = self._bytes_of(block_pages)
        self.host = HostSlabs(nbytes // self._block_bytes, self._block_bytes, pinned=device.type == "cuda")
        """Memory of the blocks; used by the swapper's thread."""
        self._queue = DeviceQueue(device)
        self._staging = torch.empty(
            self._block_bytes if self.host.blocks else 0, dtype=torch.uint8, device=device
        )
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="swap", initializer=partial(use_device, device)
        )
        if self.host.blocks:
            with self._queue.use():
                routes = tuple(Route(0, 0, part.layers, part.heads) for part in shard.parts)
                without_states = msgspec.structs.replace(shard, states=())
                warm_copies(routes, without_states, TransferPools.of(pool, None), sums=None)

    def order(self, swap: Swap, after: DeviceEvent) -> None:
        """Queues a copy that starts after the event `after` of the compute stream. Never blocks.

        Copies run in the order of these calls.
        """
        self._thread.submit(self.copy, swap, after)

    def copy(self, swap: Swap, after: DeviceEvent) -> None:
        """Copies and reports the end to `done`. Runs on the swapper's thread."""
        began_s, error = self._clock(), ""
        try:
            self._queue.after(after)
            for index, block in enumerate(swap.blocks):
                first = index * self._block_pages
                self._copy_block(swap.pages[first : first + self._block_pages], block, swap.out)
            wait_for(self._queue.record_event())
        except Exception as exc:  # any error ends this request only
            log.exception("swap_failed", request=str(swap.key))
            error = f"{type(exc).__name__}: {exc}"
        self._done(swap, self._clock() - began_s, error)

    def stop(self) -> None:
        """Ends the thread after the queued copies. Idempotent."""
        self._thread.shutdown()

    def _copy_block(self, pages: list[int], block: int, out: bool) -> None:
        # One staging buffer is enough: the next block's gather waits for this copy, a few microseconds of about 100.
        span = Span(0, len(pages) * self._page_size)
        slots = self._queue.upload(slots_of(pages, self._page_size, span))
        nbytes = self._bytes_of(len(pages))
        staged, host = self._staging[:nbytes], self.host.block(block)[:nbytes]
        with self._queue.use():
            if not out:
                staged.copy_(host, non_blocking=True)
            start = 0
            for part in self._pool.parts:
                layers, heads, stop = (
                    Span(0, part.layers),
                    Span(0, part.heads),
                    start + _bytes_of(part, len(slots)),
                )
                if out:
                    gather(part.buffer, slots, layers, heads, staged[start:stop])
                else:
                    scatter(staged[start:stop], part.buffer, slots, layers, heads)
                start = stop
            if out:
                host.copy_(staged, non_blocking=True)

    def _bytes_of(self, pages: int) -> int:
        return sum(_bytes_of(part, pages * self._page_size) for part in self._pool.parts)


def _bytes_of(pool: MHATokenToKVPool, tokens: int) -> int:
    return segment_bytes(pool.buffer, tokens, Span(0, pool.layers), Span(0, pool.heads))
