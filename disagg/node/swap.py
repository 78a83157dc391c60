"""Copies of a rank's KV pages to pinned host memory and back, for preempted requests.

Copies run on a separate thread and stream and block neither the compute thread nor the compute stream. They use the
same memory layout and the same copies as the second tier of the prefix cache (`disagg.kv.host_pool`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog
import torch

from disagg.core.config.groups import DecodeConfig, GroupConfig
from disagg.core.ports import Clock
from disagg.core.types import KVLayout
from disagg.kv import host_pool
from disagg.kv.host_pool import HostPool, block_bytes
from disagg.kv.transfer_pools import TransferPools
from disagg.model.spec.model_spec import rank_token_bytes
from disagg.node.device import DeviceEvent, DeviceQueue, use_device, wait_for
from disagg.node.host_memory import total_bytes
from disagg.node.plan import Swap

log = structlog.get_logger(__name__)

AUTOMATIC_BYTES = 4 << 30
HOST_SHARE = 16
"""Divisor of the host's memory for a rank's default limit: eight ranks may use half of the memory."""


def page_bytes(layout: KVLayout, ranks: int, page_size: int) -> int:
    """Returns the size of a page in bytes on the rank with the most heads."""
    return rank_token_bytes(layout, ranks) * page_size


def swap_bytes(group: GroupConfig, device: torch.device) -> int:
    """Returns the host memory in bytes that a rank of `group` has for swapped pages; 0 if it does not swap.

    Without a setting, the memory is a share of the host's memory.
    """
    if not isinstance(group, DecodeConfig) or group.preemption == "recompute":
        return 0
    if group.swap_bytes is not None:
        return group.swap_bytes
    return min(AUTOMATIC_BYTES, total_bytes() // HOST_SHARE) if device.type == "cuda" else 0


class Swapper:
    """Swaps pages; owns the host memory, a stream and a thread.

    The compute thread calls `order`. The swapper's thread calls `done(swap, seconds, error)` after the copy; before
    that, pages and blocks must not be reused.
    """

    def __init__(
        self,
        pools: TransferPools,
        page_size: int,
        *,
        nbytes: int,
        done: Callable[[Swap, float, str], None],
        clock: Clock = time.monotonic,
    ) -> None:
        """`nbytes`: host memory, rounded down to whole blocks; 0: no swapping."""
        self._done, self._clock = done, clock
        size_bytes = block_bytes(host_pool.page_bytes(pools.kv_buffers, page_size))
        self.host = HostPool(pools.kv_buffers, page_size, nbytes // size_bytes if size_bytes else 0)
        """Host memory of the swapped pages; used on the swapper's thread."""
        self.host.warm()
        self._queue = DeviceQueue(pools.device)
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="swap", initializer=partial(use_device, pools.device)
        )

    def order(self, swap: Swap, after: DeviceEvent) -> None:
        """Queues a copy that starts after the event `after` of the compute stream. Never blocks.

        Copies run in the order of these calls.
        """
        self._thread.submit(self.copy, swap, after)

    def copy(self, swap: Swap, after: DeviceEvent) -> None:
        """Copies the pages, then calls `done`. Runs on the swapper's thread."""
        began_s, error = self._clock(), ""
        try:
            self._queue.after(after)
            self.host.memory.reserve(swap.blocks)
            with self._queue.use():
                if swap.out:
                    self.host.store(swap.pages, swap.blocks)
                else:
                    self.host.load(swap.pages, swap.blocks)
            wait_for(self._queue.record_event())
        except Exception as exc:  # any error ends this request only
            log.exception("swap_failed", request=str(swap.key))
            error = f"{type(exc).__name__}: {exc}"
        self._done(swap, self._clock() - began_s, error)

    def stop(self) -> None:
        """Ends the thread after the queued copies. Idempotent."""
        self._thread.shutdown()
