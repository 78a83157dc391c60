"""Executes a rank's reads and writes of the third tier of the prefix cache, as the leader's plans order.

The controller decides nothing: the leader's `StorageTier` decides for all ranks. Each rank stores and reads its own
heads. Read threads and a write thread call the storage, whose threads copy parts from and to the blocks of host
memory (`disagg.node.stored_items`). A call blocks for at most a time limit, and each fault counts as a miss.

Fetches are divided into batches. The read threads begin one batch of each fetch in turn, so a long prompt does not
delay a short one. While one thread prepares or ends its batch, the storage reads the batches of the others, so the
storage is never idle during a fetch. After each batch, the thread reports how many leading items have landed: pages,
then the state.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import structlog
import torch

from disagg.core.ports import Clock
from disagg.kv.cache_operations import StorageOperation
from disagg.node.served_items import ServedItems
from disagg.node.storage_fetch import Fetch, ReadTimes
from disagg.node.stored_items import ItemStorage, StoredItems, StoredParts
from disagg.storage.contract import StorageStatistics
from disagg.storage.keys import PageKeys

log = structlog.get_logger(__name__)

BATCH_BYTES = 4 << 20
"""Size of the items that one call reads; a single item may be larger."""
WRITTEN_BYTES = 16 << 20
"""Size of the items that one call writes; a single item may be larger."""
READERS = 4
"""Number of batches that are read at the same time."""
CALL_LIMIT_S = 2.0
"""Time limit of one call of the storage. Only a hung disk or server makes a call last this long."""

Moved = Callable[[int, int, bool, str, float, Sequence[int]], None]
"""Callback with an operation's number, its finished leading items, whether it has ended, its error, the seconds that
its reads took, and the states that a find has found; see `StorageMoved`."""


class BlockMemory(Protocol):
    """Access to the blocks in host memory; implemented by `HybridCacheController`."""

    def kv_blocks(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Returns the memory of blocks of KV pages; see `disagg.node.stored_items.Blocks`."""

    def state_blocks(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Returns the memory of blocks of recurrent states."""


class _Batch(NamedTuple):
    """Items of one kind in an operation."""

    items: StoredItems
    links: Sequence[bytes]
    blocks: Sequence[int]


class StorageController:
    """Executes the storage operations of a rank. Owns its threads, and closes the storage in `stop`."""

    def __init__(
        self,
        storage: ItemStorage,
        keys: PageKeys,
        pages: StoredParts,
        states: StoredParts | None,
        memory: BlockMemory,
        moved: Moved,
        clock: Clock,
        served: ServedItems | None = None,
    ) -> None:
        """`states`: parts of recurrent states; None if the rank stores none. `moved` is called on the controller's
        threads. `served`: index in which items are published for other groups; None if they are not shared.
        """
        self._storage = storage.reads
        published = partial(served.publish, "kv") if served is not None else _publish_nothing
        self._pages = StoredItems(storage, keys, pages, memory.kv_blocks, published)
        self._states: StoredItems | None = None
        if states is not None:
            published = partial(served.publish, "state") if served is not None else _publish_nothing
            self._states = StoredItems(storage, keys, states, memory.state_blocks, published)
        self._moved, self._clock = moved, clock
        self.fetching: Executor = ThreadPoolExecutor(READERS, thread_name_prefix="storage-fetch")
        """Threads of finds and fetches."""
        self.writing: Executor = ThreadPoolExecutor(1, thread_name_prefix="storage-write")
        """Thread of writes."""
        self._under_way: dict[int, Fetch] = {}
        self._queue: deque[Fetch] = deque()
        """Finds, and fetches of which another batch may begin."""
        self._lock = threading.Lock()  # guards the fetches and their times, and orders the reports
        self._times = ReadTimes(clock)
        self._stopped = False

    def order(self, operations: Sequence[StorageOperation], unwanted: Sequence[int]) -> None:
        """Starts the operations of a plan, and ends the fetches `unwanted`; never blocks."""
        for operation in operations:
            if operation.kind == "write":
                self._submit(self.writing, self._write, operation)
            else:
                fetch = Fetch(operation, self._clock() + operation.limit_s)
                self._under_way[operation.number] = fetch
                self._queue.append(fetch)
                self._submit(self.fetching, self._fetch_some)
        for number in unwanted:
            if (known := self._under_way.get(number)) is not None:
                known.unwanted = True

    def statistics(self) -> StorageStatistics:
        """Returns the storage's counts."""
        return self._storage.statistics()

    def stop(self) -> None:
        """Ends the threads after the calls under way, and closes the storage. Idempotent."""
        self._stopped = True
        self.fetching.shutdown()
        self.writing.shutdown()
        self._storage.close()

    def _submit(self, thread: Executor, work: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # after `stop`, no report is expected
            thread.submit(work, *arguments)

    # --- reads

    def _fetch_some(self) -> None:
        """Does the first find in the queue, or the next batch of the first fetch. Runs on a read thread."""
        fetch = self._queue.popleft()
        limit_s = min(fetch.until_s - self._clock(), CALL_LIMIT_S)
        if limit_s <= 0 or fetch.unwanted or self._stopped:
            with self._lock:
                fetch.stopped = True
                self._report_end(fetch)
        elif fetch.operation.kind == "find":
            self._find(fetch, limit_s)
        else:
            self._fetch(fetch, limit_s)

    def _find(self, fetch: Fetch, limit_s: float) -> None:
        operation, began_s = fetch.operation, self._clock()
        try:
            fetch.landed = self._pages.leading(operation.links, limit_s)
            if self._states is not None:
                at = [*operation.state_links, *operation.links[: fetch.landed]]
                fetch.states = self._states.find(at, limit_s)
        except Exception as exc:  # any error ends this find only
            fetch.error = _text(exc)
            log.exception("storage_fetch_failed", operation=operation.number, error=fetch.error)
        with self._lock:
            fetch.seconds, fetch.stopped = self._clock() - began_s, True
            self._report_end(fetch)

    def _fetch(self, fetch: Fetch, limit_s: float) -> None:
        """Reads the next batch of a fetch. Another thread may begin the batch after it meanwhile."""
        operation, landed, error = fetch.operation, 0, ""
        batch = next(self._batches(operation, BATCH_BYTES, fetch.begun), None)
        with self._lock:
            fetch.stopped |= batch is None
            if batch is None or fetch.stopped:  # without items, or stopped by an earlier batch just now
                self._report_end(fetch)
                return
            first = not fetch.begun
            reading = fetch.begin(len(batch.links))
            self._times.began(fetch)
        try:
            if first:  # pins the memory of all blocks, or raises
                self._reserve(operation)
            else:
                self._enqueue(fetch)
            landed = batch.items.fetch(batch.links, batch.blocks, limit_s)
        except Exception as exc:  # any error ends this fetch only
            error = _text(exc)
            log.exception("storage_fetch_failed", operation=operation.number, error=error)
        with self._lock:
            before = fetch.landed
            fetch.end(reading, landed, error)
            self._times.ended(fetch)
            ended = self._report_end(fetch)
            if not ended and fetch.landed > before:
                self._moved(operation.number, fetch.landed, False, "", fetch.seconds, fetch.states)
        if first and not ended:  # alone so far: after a pause of the storage, the first call is a trial
            self._enqueue(fetch)

    def _enqueue(self, fetch: Fetch) -> None:
        """Lets a read thread begin the next batch of a fetch, if there is one."""
        if not fetch.stopped:
            self._queue.append(fetch)
            self._submit(self.fetching, self._fetch_some)

    def _reserve(self, operation: StorageOperation) -> None:
        self._pages.reserve(operation.blocks)
        if self._states is not None:
            self._states.reserve(operation.state_blocks)

    def _report_end(self, fetch: Fetch) -> bool:
        """Reports the end of a find or a fetch, once, when no batch of it is under way; returns whether it has ended.

        The blocks of a fetch belong to it until this report.
        """
        number = fetch.operation.number
        if not fetch.ended or self._under_way.get(number) is not fetch:
            return False
        del self._under_way[number]
        self._moved(number, fetch.landed, True, fetch.error, fetch.seconds, fetch.states)
        return True

    def _batches(self, operation: StorageOperation, nbytes: int, first: int = 0) -> Iterator[_Batch]:
        """Yields the items of an operation in batches of `nbytes` bytes, pages and then states, without the first
        `first` items."""
        kinds = [_Batch(self._pages, operation.links, operation.blocks)]
        if self._states is not None:
            kinds.append(_Batch(self._states, operation.state_links, operation.state_blocks))
        for items, links, blocks in kinds:
            count = items.batch(nbytes)
            for start in range(min(first, len(links)), len(links), count):
                stop = start + count
                yield _Batch(items, links[start:stop], blocks[start:stop])
            first = max(0, first - len(links))

    # --- writes

    def _write(self, operation: StorageOperation) -> None:
        """Stores the items of an operation that are not stored yet. Runs on the write thread.

        After the first item that cannot be stored, later items are skipped, so that a hung storage does not keep
        blocks locked.
        """
        stored, error = 0, ""
        try:
            for items, links, blocks in self._batches(operation, WRITTEN_BYTES):
                count = items.store(links, blocks, CALL_LIMIT_S) if not self._stopped else 0
                stored += count
                if count < len(links):
                    break
        except Exception as exc:  # any error ends this write only
            error = _text(exc)
            log.exception("storage_write_failed", operation=operation.number, error=error)
        self._moved(operation.number, stored, True, error, 0.0, ())


def _text(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _publish_nothing(links: Sequence[bytes], blocks: Sequence[int]) -> None:
    """Publishes no block, because the group shares none."""
