"""Copies between the tiers of a rank's prefix cache, ordered by the leader's plans.

Each rank has a controller like SGLang's `HybridCacheController`. The controller decides nothing: the leader's
`HostTier` decides for all ranks. Stores run on a separate thread and stream, after an event of the compute stream,
which never waits for stores. Waiting stores are merged into one launch.

There are two kinds of loads:

    layered      prefill and colocated groups: the compute thread launches the load, layer group by layer group, on a
                 separate stream. Before the step computes a group of layers, it waits on the device for the load of
                 that group. The first layers compute while later layers load
    in parallel  decode groups: a separate thread runs the load. The request joins the batch after the report of the
                 load, so that no running request is delayed
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import structlog
import torch

from disagg.core.ports import Clock
from disagg.core.types import Span
from disagg.kv.cache_operations import CacheOperation, PoolName
from disagg.kv.host_pool import HostPool, block_bytes, page_bytes
from disagg.kv.transfer_pools import TransferPools
from disagg.node.device import (
    DeviceEvent,
    DeviceMark,
    DeviceQueue,
    let_stream_wait,
    record_event,
    seconds_between,
    use_device,
    wait_for,
)

log = structlog.get_logger(__name__)

LOAD_GROUPS = 8
"""Number of layer groups into which a load is divided, so that a step can begin after an eighth of the load."""

Moved = Callable[[int, str, float], None]
"""Callback with an operation's number, its error, empty if it succeeded, and for a load the seconds of the copies."""


class HostBlockCounts(NamedTuple):
    """Numbers of host memory blocks of a rank: for KV pages, and for recurrent states."""

    pages: int
    states: int
    """Number of state blocks; 0 if the rank caches no recurrent states."""


def host_block_counts(pools: TransferPools, page_size: int, nbytes: int) -> HostBlockCounts:
    """Returns how many blocks fit `nbytes` of host memory.

    If the rank caches states, half of the memory is for states.
    """
    states = 0
    if pools.state_buffers and nbytes:
        nbytes //= 2
        states = nbytes // block_bytes(page_bytes(pools.state_buffers, 1))
    return HostBlockCounts(nbytes // block_bytes(page_bytes(pools.kv_buffers, page_size)), states)


def least_host_bytes(pools: TransferPools, page_size: int) -> int:
    """Returns the least host memory with room for a page and, if the rank caches states, a state."""
    page = block_bytes(page_bytes(pools.kv_buffers, page_size))
    return 2 * max(page, block_bytes(page_bytes(pools.state_buffers, 1))) if pools.state_buffers else page


class LoadedLayers(NamedTuple):
    """Device events after the loads for which a step waits, one for each group of layers."""

    device: torch.device
    events: tuple[tuple[int, DeviceEvent], ...]
    """(last layer + 1, event) of each group of layers, ascending; empty if the step waits for no load."""

    def before_all(self) -> None:
        """Makes the current stream wait for all layers. Never blocks the host."""
        if self.events:
            let_stream_wait(self.device, self.events[-1][1])

    def before_first(self) -> None:
        """Makes the current stream wait for the first group of layers."""
        if self.events:
            let_stream_wait(self.device, self.events[0][1])

    def after(self, layer: int) -> None:
        """Makes the current stream wait for the layers that follow `layer`, which has been launched."""
        for (stop, _), (_, event) in zip(self.events, self.events[1:], strict=False):
            if stop == layer + 1:
                let_stream_wait(self.device, event)

    @property
    def last_event(self) -> DeviceEvent:
        """Event after all loads; None without loads, and on a CPU, where the loads are already complete."""
        return self.events[-1][1] if self.events else None


class _QueuedLoads(NamedTuple):
    """Loads that were queued together."""

    events: tuple[tuple[int, DeviceEvent], ...]
    """See `LoadedLayers.events`."""
    began: DeviceMark
    ended: DeviceMark


class HybridCacheController:
    """Executes cache operations. Owns the host memory, and a thread and a stream each for stores and for loads."""

    def __init__(
        self,
        pools: TransferPools,
        page_size: int,
        counts: HostBlockCounts,
        *,
        layered: bool,
        moved: Moved,
        broken: Callable[[str], None],
        clock: Clock = time.perf_counter,
    ) -> None:
        """`counts`: blocks in host memory; 0 pages for no second tier. `layered`: kind of the loads; see the module.

        `moved` is called at the end of each operation. `broken` is called with an error after which the rank cannot
        continue, for example a failed load. Both run on the controller's threads. `clock`: measures loads on a CPU.
        """
        self._device, self._layered, self._moved, self._broken = pools.device, layered, moved, broken
        self.counts = counts
        """Numbers of pages and states for which the second tier has room."""
        self.least_bytes = least_host_bytes(pools, page_size)
        """Least host memory for a second tier."""
        self.kv = HostPool(pools.kv_buffers, page_size, counts.pages)
        """Memory of KV pages."""
        self._reserving = threading.Lock()
        """Guards the reservation of blocks by the store thread and by the threads of a storage."""
        self.states = HostPool(pools.state_buffers, 1, counts.states)
        """Memory of recurrent states."""
        # With several classes of layers, a step does not compute layers in the order of their numbers.
        self._load_groups = min(LOAD_GROUPS, self.kv.layers) if len(pools.kv_buffers) == 1 else 1
        for _, pool in self._pools():
            pool.warm()
        # Stores have low priority. Loads have high priority, because requests wait for them.
        self._store_queue = DeviceQueue(pools.device, urgent=False)
        self._load_queue = DeviceQueue(pools.device, clock=clock)
        use = partial(use_device, pools.device)
        self.storing: Executor = ThreadPoolExecutor(1, thread_name_prefix="cache-store", initializer=use)
        """Thread of stores."""
        self.loading: Executor = ThreadPoolExecutor(1, thread_name_prefix="cache-load", initializer=use)
        """Thread of loads.

        The compute thread launches layered loads; this thread then only reports the end of the load.
        """
        self._stores: deque[tuple[CacheOperation, DeviceEvent]] = deque()

    def order(self, operations: Sequence[CacheOperation]) -> LoadedLayers:
        """Starts the operations of a plan, after all work queued so far on the current stream; never blocks.

        Called on the compute thread. Returns the loads for which the plan's step must wait.
        """
        nothing = LoadedLayers(self._device, ())
        if not operations:
            return nothing
        event = record_event(self._device)
        stores = [one for one in operations if one.store]
        if stores:
            self._stores.extend((one, event) for one in stores)
            self.storing.submit(self._guarded, self._store_waiting)
        loads = [one for one in operations if not one.store]
        if not loads:
            return nothing
        if self._layered:
            return self._launch(loads, event)
        self.loading.submit(self._guarded, self._load, loads, event)
        return nothing

    def kv_blocks(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Returns the memory of blocks of KV pages, uint8 `[block_bytes]` each. Any thread may call it.

        Raises `RuntimeError` if the host has no memory for them.
        """
        with self._reserving:
            return [self.kv.memory.block(number) for number in numbers]

    def state_blocks(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Returns the memory of blocks of recurrent states. Otherwise like `kv_blocks`."""
        with self._reserving:
            return [self.states.memory.block(number) for number in numbers]

    def stop(self) -> None:
        """Ends the threads after the queued copies. Idempotent."""
        self.storing.shutdown()
        self.loading.shutdown()

    def _store_waiting(self) -> None:
        """Executes all waiting stores as one copy, then reports the end of each store. Runs on the store thread."""
        waiting: list[tuple[CacheOperation, DeviceEvent]] = []
        while self._stores:
            waiting.append(self._stores.popleft())
        if not waiting:
            return
        ready = [operation for operation, _ in waiting if self._has_memory(operation)]
        error = ""
        try:
            self._store_queue.after(waiting[-1][1])  # all events are of one stream: the last event covers all
            for name, pool in self._pools():
                with self._store_queue.use():
                    pool.store(*_copies(name, ready))
            wait_for(self._store_queue.record_event())
        except Exception as exc:  # any error ends these stores only
            error = f"{type(exc).__name__}: {exc}"
            log.exception("cache_store_failed", operations=len(ready), error=error)
        for operation in ready:
            self._moved(operation.number, error, 0.0)

    def _has_memory(self, operation: CacheOperation) -> bool:
        """Reserves the blocks of a store; reports the store as failed if the host has no memory for its blocks."""
        try:
            with self._reserving:
                for name, pool in self._pools():
                    pool.memory.reserve(_copies(name, [operation])[1])
        except RuntimeError as exc:
            log.warning("no_host_memory", error=str(exc))
            self._moved(operation.number, f"{type(exc).__name__}: {exc}", 0.0)
            return False
        return True

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs `work` on a thread of the controller; an exception breaks the rank."""
        try:
            work(*arguments)
        except Exception as exc:
            log.exception("cache_thread_failed")
            self._broken(f"{type(exc).__name__}: {exc}")

    def _load(self, operations: Sequence[CacheOperation], after: DeviceEvent) -> None:
        """Copies all layers of the loads, then reports the end of the loads. Runs on the load thread."""
        self._report(operations, self._queue_loads(operations, after, groups=1))

    def _launch(self, operations: Sequence[CacheOperation], after: DeviceEvent) -> LoadedLayers:
        queued = self._queue_loads(operations, after, self._load_groups)
        self.loading.submit(self._guarded, self._report, operations, queued)
        return LoadedLayers(self._device, queued.events)

    def _queue_loads(
        self, operations: Sequence[CacheOperation], after: DeviceEvent, groups: int
    ) -> _QueuedLoads:
        """Queues loads: states first, then pages by group of layers."""
        self._load_queue.after(after)
        began = self._load_queue.mark()
        with self._load_queue.use():
            slots, blocks = _copies("state", operations)
            self.states.load(slots, blocks, Span(0, self.states.layers))
        pages, blocks = _copies("kv", operations)
        layers, events = self.kv.layers, []
        for number in range(groups):
            span = Span(number * layers // groups, (number + 1) * layers // groups)
            with self._load_queue.use():
                self.kv.load(pages, blocks, span)
            events.append((span.stop, self._load_queue.record_event()))
        return _QueuedLoads(tuple(events), began, self._load_queue.mark())

    def _report(self, operations: Sequence[CacheOperation], queued: _QueuedLoads) -> None:
        """Waits for the end of queued loads, then reports their end. Runs on the load thread.

        Each load is reported with a part of the time of all loads that were queued together.
        """
        seconds = seconds_between(queued.began, queued.ended)
        sizes = [len(_copies("kv", [operation])[0]) for operation in operations]
        for operation, pages in zip(operations, sizes, strict=True):
            self._moved(operation.number, "", seconds * pages / max(1, sum(sizes)))

    def _pools(self) -> tuple[tuple[PoolName, HostPool], ...]:
        return ("kv", self.kv), ("state", self.states)


def _copies(pool: PoolName, operations: Sequence[CacheOperation]) -> tuple[list[int], list[int]]:
    """Returns the device pages or slots of all `operations`, and the host block of each."""
    transfers = [part for operation in operations for part in operation.transfers if part.pool == pool]
    numbers = [number for part in transfers for number in part.device]
    return numbers, [block for part in transfers for block in part.host]
