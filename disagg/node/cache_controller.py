"""Copies between the tiers of a rank's prefix cache, ordered by the leader's plans.

Each rank has a controller like SGLang's `HybridCacheController`. The controller decides nothing: the leader's
`HostTier` decides for all ranks. Stores run on a separate thread and stream, after an event of the compute stream,
which never waits for stores. Waiting stores are merged into one copy.

There are two kinds of loads:

    layered      prefill and colocated groups: the load runs on a separate stream, in parts of one or several layers
                 if a step will wait for it (`disagg.node.loaded_layers`). The leader decides which steps wait
                 (`StepPlan.awaited_loads`)
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
from itertools import pairwise
from typing import Any, NamedTuple

import structlog
import torch

from disagg.core.errors import InvariantError
from disagg.core.ports import Clock
from disagg.core.types import Span
from disagg.kv.cache_operations import CacheOperation, PoolName
from disagg.kv.host_pool import HostPool, block_bytes, page_bytes
from disagg.kv.transfer_pools import TransferPools
from disagg.node.device import (
    DeviceEvent,
    DeviceMark,
    DeviceQueue,
    record_event,
    seconds_between,
    use_device,
    wait_for,
)
from disagg.node.host_memory import pinnable_bytes
from disagg.node.loaded_layers import LoadedLayers
from disagg.node.plan import StepPlan

log = structlog.get_logger(__name__)

FIRST_GROUPS = (1, 1, 2)
"""Layers of the first groups of a load. A step that computes longer than the load waits for the first group only."""
QUEUED_AT_ONCE = 4
"""Number of groups that the compute thread queues."""
PACE_GROUP = 1
"""The group after whose load the load thread queues the later groups. If the load thread began earlier, it would
compete for the interpreter lock with the compute thread, which prepares the step."""
LATER_GROUPS = 16
"""Largest number of equal groups of the other layers, of at least 4 layers each. After a load that takes longer than
the step, about the last group's layers are left to compute."""

Moved = Callable[[int, str, float], None]
"""Callback with the number of an operation, its error (empty after a success), and for a load the seconds of its
copies."""


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


def layer_groups(layers: int) -> list[Span]:
    """Returns the groups of layers in which a load is copied, see `FIRST_GROUPS` and `LATER_GROUPS`."""
    ends = [0]
    later = max(4, -(-(layers - sum(FIRST_GROUPS)) // LATER_GROUPS))
    while ends[-1] < layers:
        size = FIRST_GROUPS[len(ends) - 1] if len(ends) <= len(FIRST_GROUPS) else later
        ends.append(min(layers, ends[-1] + size))
    return [Span(start, end) for start, end in pairwise(ends)]


def least_host_bytes(pools: TransferPools, page_size: int) -> int:
    """Returns the least host memory with room for a page and, if the rank caches states, a state."""
    page = block_bytes(page_bytes(pools.kv_buffers, page_size))
    return 2 * max(page, block_bytes(page_bytes(pools.state_buffers, 1))) if pools.state_buffers else page


class _QueuedLoads(NamedTuple):
    """Loads that were ordered together."""

    loaded: LoadedLayers
    marks: list[DeviceMark]
    """The begin of the loads, and their end once all parts are queued."""


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
        self._clock = clock
        self.least_bytes = least_host_bytes(pools, page_size)
        """Least host memory for a second tier."""
        self.kv = HostPool(pools.kv_buffers, page_size, counts.pages)
        """Memory of KV pages."""
        self._reserving = threading.Lock()
        """Guards the reservation of blocks by the store thread and by the threads of a storage."""
        self.states = HostPool(pools.state_buffers, 1, counts.states)
        """Memory of recurrent states."""
        # With several classes of layers, a step does not compute layers in the order of their numbers.
        layers = self.kv.layers
        self._load_groups = layer_groups(layers) if len(pools.kv_buffers) == 1 else [Span(0, layers)]
        for _, pool in self._pools():
            pool.warm()
        self.wanted = counts
        """Numbers of pages and states for which the second tier was to have memory."""
        self.counts = self._pinned(counts)
        """Numbers of pages and states for which the second tier has memory."""
        # Stores have low priority. Loads have high priority, because requests wait for them.
        self._store_queue = DeviceQueue(pools.device, urgent=False)
        self._load_queue = DeviceQueue(pools.device, clock=clock)
        use = partial(use_device, pools.device)
        self.storing: Executor = ThreadPoolExecutor(1, thread_name_prefix="cache-store", initializer=use)
        """Thread of stores."""
        self.loading: Executor = ThreadPoolExecutor(1, thread_name_prefix="cache-load", initializer=use)
        """Thread of loads.

        Of a layered load, the compute thread queues the first parts, and this thread the others.
        """
        self.reporting: Executor = ThreadPoolExecutor(1, thread_name_prefix="cache-report", initializer=use)
        """Thread that waits for the end of layered loads and reports it."""
        self._stores: deque[tuple[CacheOperation, DeviceEvent]] = deque()
        self._loads: dict[int, LoadedLayers] = {}
        """Layered loads under way on this rank, by number of the operation. The compute thread adds loads, the load
        thread removes them."""
        self._latest = LoadedLayers(pools.device)
        """The layered load that was ordered last; parts of it may not be queued yet."""
        self._last_load = 0
        """Number of the latest load; operations are numbered in ascending order."""

    def order(self, plan: StepPlan) -> LoadedLayers:
        """Starts the operations of a plan, after all work queued so far on the current stream.

        Does not wait for copies. If parts of the previous load are not queued yet, queues them first.

        Called on the compute thread. Returns the loads for which the plan's step must wait. Raises `InvariantError`
        if the plan awaits a load that no plan has ordered.
        """
        if plan.cache_operations:
            self._start(plan, record_event(self._device, blocking=True))
        return self._awaited(plan.awaited_loads)

    def _awaited(self, numbers: Sequence[int]) -> LoadedLayers:
        """Returns the events of the latest of these loads that is under way on this rank."""
        if numbers and max(numbers) > self._last_load:
            raise InvariantError(f"a step awaits load {max(numbers)}, and no plan has ordered it")
        under_way = [found for number in sorted(numbers) if (found := self._loads.get(number)) is not None]
        return under_way[-1] if under_way else LoadedLayers(self._device)

    def _start(self, plan: StepPlan, event: DeviceEvent) -> None:
        operations = plan.cache_operations
        stores = [one for one in operations if one.store]
        if stores:
            self._stores.extend((one, event) for one in stores)
            self.storing.submit(self._guarded, self._store_waiting)
        loads = [one for one in operations if not one.store]
        if loads and self._layered:
            # Beside a step that does not wait, the load has fewer launches: its request waits for the report anyway.
            beside = bool(plan.work) and not plan.awaited_loads
            self._launch(loads, event, [Span(0, self.kv.layers)] if beside else self._load_groups)
        elif loads:
            self.loading.submit(self._guarded, self._load, loads, event)

    def _pinned(self, counts: HostBlockCounts) -> HostBlockCounts:
        """Pins the memory of a rank on a GPU, and returns for how many blocks the host has memory.

        The driver would delay running steps if memory was pinned later.
        """
        began_s = self._clock()
        # A hit needs a state: states first, with fewer pages if the host has too little memory.
        states, pages = (pool.memory.pin(pinnable_bytes) for pool in (self.states, self.kv))
        found = HostBlockCounts(pages, states)
        if found != counts:
            if not pages or (counts.states and not states):
                found = HostBlockCounts(0, 0)
                for _, pool in self._pools():
                    pool.memory.unpin()
            log.warning("second_tier_smaller", wanted=counts._asdict(), pinned=found._asdict())
        elif self._device.type == "cuda" and pages:
            mib = sum(pool.memory.memory.nbytes for _, pool in self._pools()) >> 20
            log.info("host_memory_pinned", mib=mib, seconds=round(self._clock() - began_s, 1))
        return found

    @property
    def pinned_bytes(self) -> int:
        """Size of the second tier's memory."""
        pools = zip((self.kv, self.states), self.counts, strict=True)
        return sum(pool.memory.memory.shape[1] * blocks for pool, blocks in pools)

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
        self.loading.shutdown()  # before the thread that gets its reports
        self.reporting.shutdown()

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
        queued = self._prepare_loads(operations, after, [Span(0, self.kv.layers)], staged=True)
        queued.loaded.queue()
        self._report(operations, queued)

    def _launch(
        self, operations: Sequence[CacheOperation], after: DeviceEvent, groups: Sequence[Span]
    ) -> None:
        """Queues the first parts of loads on the compute thread, and has the load thread queue the others."""
        self._latest.queue()  # loads run in the order of their plans
        queued = self._prepare_loads(operations, after, groups, staged=False)
        queued.loaded.queue(QUEUED_AT_ONCE if len(groups) > 1 else 0)
        self._latest, self._last_load = queued.loaded, operations[-1].number
        self._loads.update((operation.number, queued.loaded) for operation in operations)
        self.loading.submit(self._guarded, self._queue_rest, operations, queued, after)

    def _queue_rest(
        self, operations: Sequence[CacheOperation], queued: _QueuedLoads, after: DeviceEvent
    ) -> None:
        """Queues the parts that are not queued yet, then has the end reported. Runs on the load thread."""
        # Many copies that wait on the device would delay the launches of the steps (`disagg.kv.staged_blocks`).
        wait_for(after)
        queued.loaded.wait_for_part(PACE_GROUP)
        queued.loaded.queue()
        self.reporting.submit(self._guarded, self._report, operations, queued)

    def _prepare_loads(
        self,
        operations: Sequence[CacheOperation],
        after: DeviceEvent,
        groups: Sequence[Span],
        *,
        staged: bool,
    ) -> _QueuedLoads:
        """Queues the states of loads; returns the pages by group of layers, not queued yet. `staged`: through a
        buffer, by the copy engine, with fewer calls of the driver; waits for earlier work of the device."""
        self._load_queue.after(after)
        began = self._load_queue.mark()
        slots, blocks = _copies("state", operations)
        with self._load_queue.use():
            for _ in self.states.load_groups(slots, blocks, [Span(0, self.states.layers)], staged=staged):
                pass
        states = self._load_queue.record_event() if slots else None
        pages, blocks = _copies("kv", operations)
        parts = self.kv.load_groups(pages, blocks, groups, staged=staged)

        marks = [began] if groups else [began, self._load_queue.mark()]

        def queue_next() -> DeviceEvent:
            with self._load_queue.use():
                if (span := next(parts, None)) is None:
                    raise InvariantError("a part of a load could not be queued earlier")
            event = self._load_queue.record_event()
            if span == groups[-1]:
                marks.append(self._load_queue.mark())
            return event

        firsts = [span.start for span in groups]
        return _QueuedLoads(LoadedLayers(self._device, states, firsts, queue_next), marks)

    def _report(self, operations: Sequence[CacheOperation], queued: _QueuedLoads) -> None:
        """Waits for the end of queued loads, then reports their end.

        Each load is reported with a part of the time of all loads that were queued together.
        """
        seconds = seconds_between(*queued.marks)
        for operation in operations:
            self._loads.pop(operation.number, None)
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
