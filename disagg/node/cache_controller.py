"""Copies between the tiers of a rank's prefix cache, as the leader's plans order them.

Each rank of a group has a controller, as in SGLang's `HybridCacheController`, but decides nothing: the leader's
`HostTier` does, for all ranks. Stores run on a thread and a stream of their own, after an event of the compute
stream, which never waits for them. Stores that wait are merged into one launch.

Loads go one of two ways:

    layered      prefill and colocated groups: the compute thread launches them, layer group by layer group, on a
                 stream of their own, and the step waits on the device for each group of layers before it computes
                 them. The first layers compute while later ones load
    in parallel  decode groups: on a thread; the request joins the batch after the report, so that no answer waits
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import structlog
import torch

from disagg.core.types import Span
from disagg.kv.cache_operations import CacheOperation
from disagg.kv.host_pool import HostKVPool, block_bytes, page_bytes
from disagg.kv.pool import KVPool
from disagg.node.device import DeviceEvent, DeviceQueue, record_event, wait_for
from disagg.node.swap import host_memory_bytes

log = structlog.get_logger(__name__)

AUTOMATIC_BYTES = 64 << 30
HOST_SHARE = 8
"""Divisor of the host's memory for the second tier of all ranks of a group together."""
LOAD_GROUPS = 8
"""Groups of layers in which a load is launched, so that a step can begin after an eighth of it."""

Moved = Callable[[int, str], None]
"""Callback with an operation's number and its error, empty if it succeeded."""


def host_cache_bytes(configured: int | None, device: torch.device, ranks: int) -> int:
    """Returns a rank's host memory for cached KV in bytes: `configured`, or a default from the host's memory."""
    if configured is not None:
        return configured
    return min(AUTOMATIC_BYTES, host_memory_bytes() // HOST_SHARE // ranks) if device.type == "cuda" else 0


def host_pages(pool: KVPool, page_size: int, nbytes: int) -> int:
    """Returns the number of pages that `nbytes` of host memory have room for."""
    return nbytes // block_bytes(page_bytes(pool, page_size))


class LoadedLayers(NamedTuple):
    """Loads that a step waits for."""

    device: torch.device
    events: tuple[tuple[int, DeviceEvent], ...]
    """(last layer + 1, event) of each group of layers, ascending; empty if there is nothing to wait for."""

    def before_all(self) -> None:
        """Makes the current stream wait for all layers. Never blocks the host."""
        if self.events:
            _wait_on_device(self.device, self.events[-1][1])

    def before_first(self) -> None:
        """Makes the current stream wait for the first group of layers."""
        if self.events:
            _wait_on_device(self.device, self.events[0][1])

    def after(self, layer: int) -> None:
        """Makes the current stream wait for the layers that follow `layer`, which has been launched."""
        for (stop, _), (_, event) in zip(self.events, self.events[1:], strict=False):
            if stop == layer + 1:
                _wait_on_device(self.device, event)

    @property
    def last_event(self) -> DeviceEvent:
        """Event after all loads; None without any, and on a CPU, where they are complete."""
        return self.events[-1][1] if self.events else None


class HybridCacheController:
    """Executes cache operations. Owns the host memory, and a thread and a stream for stores and for loads each."""

    def __init__(
        self, pool: KVPool, page_size: int, *, blocks: int, layered: bool, moved: Moved, broken: Moved
    ) -> None:
        """`blocks`: pages in host memory, 0 for none. `layered`: how loads run, see above.

        `moved` receives the end of each operation, `broken` that of a load which failed, after which the rank cannot
        go on. Both are called on the controller's threads.
        """
        self._device, self._layered, self._moved, self._broken = pool.device, layered, moved, broken
        self.host = HostKVPool(pool, page_size, blocks)
        """Memory of the second tier."""
        self._store_queue, self._load_queue = DeviceQueue(pool.device), DeviceQueue(pool.device)
        use = partial(_use, pool.device)
        self.storing = ThreadPoolExecutor(1, thread_name_prefix="cache-store", initializer=use)
        self.loading = ThreadPoolExecutor(1, thread_name_prefix="cache-load", initializer=use)
        """Threads of stores, and of loads and the ends of layered ones."""
        self._stores: deque[tuple[CacheOperation, DeviceEvent]] = deque()

    def order(self, operations: Sequence[CacheOperation]) -> LoadedLayers:
        """Starts the operations of a plan, after all work queued so far on the current stream; never blocks.

        Called on the compute thread. Returns what the plan's step has to wait for.
        """
        if not operations:
            return LoadedLayers(self._device, ())
        event = record_event(self._device)
        stores = [one for one in operations if one.store]
        if stores:
            self._stores.extend((one, event) for one in stores)
            self.storing.submit(self.store_waiting)
        loads = [one for one in operations if not one.store]
        if not loads:
            return LoadedLayers(self._device, ())
        if self._layered:
            return self._launch(loads, event)
        self.loading.submit(self.load, loads, event)
        return LoadedLayers(self._device, ())

    def store_waiting(self) -> None:
        """Makes all waiting stores in one copy, and reports them. Runs on the store thread."""
        waiting: list[tuple[CacheOperation, DeviceEvent]] = []
        while self._stores:
            waiting.append(self._stores.popleft())
        error = ""
        try:
            pages, blocks = _pages_and_blocks([operation for operation, _ in waiting])
            if pages:
                self.host.memory.reserve(blocks)
                self._store_queue.after(waiting[-1][1])  # events of one stream: the last one covers all
                with self._store_queue.use():
                    self.host.store(pages, blocks)
                wait_for(self._store_queue.record_event())
        except Exception as exc:  # any error ends these stores only
            log.exception("cache_store_failed", operations=len(waiting))
            error = f"{type(exc).__name__}: {exc}"
        for operation, _ in waiting:
            self._moved(operation.number, error)

    def load(self, operations: Sequence[CacheOperation], after: DeviceEvent) -> None:
        """Makes loads, and reports them. Runs on the load thread."""
        try:
            self._load_queue.after(after)
            pages, blocks = _pages_and_blocks(operations)
            with self._load_queue.use():
                self.host.load(pages, blocks, Span(0, self.host.layers))
            wait_for(self._load_queue.record_event())
        except Exception as exc:
            log.exception("cache_load_failed", operations=len(operations))
            self._broken(operations[0].number, f"{type(exc).__name__}: {exc}")
            return
        for operation in operations:
            self._moved(operation.number, "")

    def stop(self) -> None:
        """Ends the threads after the queued copies. Idempotent."""
        self.storing.shutdown()
        self.loading.shutdown()

    def _launch(self, operations: Sequence[CacheOperation], after: DeviceEvent) -> LoadedLayers:
        pages, blocks = _pages_and_blocks(operations)
        self._load_queue.after(after)
        layers, events = self.host.layers, []
        groups = min(LOAD_GROUPS, layers) if self.host.ordered else 1
        for number in range(groups):
            span = Span(number * layers // groups, (number + 1) * layers // groups)
            with self._load_queue.use():
                self.host.load(pages, blocks, span)
            events.append((span.stop, self._load_queue.record_event()))
        self.loading.submit(self._report, operations, events[-1][1])
        return LoadedLayers(self._device, tuple(events))

    def _report(self, operations: Sequence[CacheOperation], event: DeviceEvent) -> None:
        wait_for(event)
        for operation in operations:
            self._moved(operation.number, "")


def _pages_and_blocks(operations: Sequence[CacheOperation]) -> tuple[list[int], list[int]]:
    transfers = [part for operation in operations for part in operation.transfers if part.pool == "kv"]
    pages = [page for part in transfers for page in part.device]
    return pages, [block for part in transfers for block in part.host]


def _wait_on_device(device: torch.device, event: DeviceEvent) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
