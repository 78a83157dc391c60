"""Executes a rank's reads and writes of the third tier of the prefix cache, as the leader's plans order.

The controller decides nothing: the leader's `StorageTier` decides for all ranks. Each rank stores and reads its own
heads. A read thread and a write thread call the storage, whose threads copy parts from and to the blocks of host
memory (`disagg.node.stored_items`). A call blocks for at most a time limit, and each fault counts as a miss.

Fetches are divided into batches. The read thread does one batch of each fetch in turn, so a long prompt does not
delay a short one. After each batch, the thread reports how many leading items have landed: pages, then the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import structlog
import torch

from disagg.core.ports import Clock
from disagg.kv.cache_operations import StorageOperation
from disagg.node.served_items import ServedItems
from disagg.node.stored_items import ItemStorage, StoredItems, StoredParts
from disagg.storage.contract import StorageStatistics
from disagg.storage.keys import PageKeys

log = structlog.get_logger(__name__)

BATCH_BYTES = 16 << 20
"""Size of the items that one call reads or writes; a single item may be larger."""
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


@dataclass(slots=True, eq=False)
class _Fetch:
    """A find or a fetch under way."""

    operation: StorageOperation
    until_s: float
    landed: int = 0
    """Number of leading items that have landed, or were found."""
    states: list[int] = field(default_factory=list)
    """For a find: see `StorageReport.states`."""
    seconds: float = 0.0
    """Time spent on reads, without the time in the queue."""
    unwanted: bool = False


class _Batch(NamedTuple):
    """Items of one kind in an operation."""

    items: StoredItems
    links: Sequence[bytes]
    blocks: Sequence[int]


class StorageController:
    """Executes the storage operations of a rank. Owns two threads, and closes the storage in `stop`."""

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
        self._pages = StoredItems(storage, keys, pages, memory.kv_blocks, BATCH_BYTES, published)
        self._states: StoredItems | None = None
        if states is not None:
            published = partial(served.publish, "state") if served is not None else _publish_nothing
            self._states = StoredItems(storage, keys, states, memory.state_blocks, BATCH_BYTES, published)
        self._moved, self._clock = moved, clock
        self.fetching: Executor = ThreadPoolExecutor(1, thread_name_prefix="storage-fetch")
        """Thread of finds and fetches."""
        self.writing: Executor = ThreadPoolExecutor(1, thread_name_prefix="storage-write")
        """Thread of writes."""
        self._under_way: dict[int, _Fetch] = {}
        self._queue: deque[_Fetch] = deque()
        self._stopped = False

    def order(self, operations: Sequence[StorageOperation], unwanted: Sequence[int]) -> None:
        """Starts the operations of a plan, and ends the fetches `unwanted`; never blocks."""
        for operation in operations:
            if operation.kind == "write":
                self._submit(self.writing, self._write, operation)
            else:
                fetch = _Fetch(operation, self._clock() + operation.limit_s)
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
        """Does the first find in the queue, or the next batch of the first fetch. Runs on the read thread."""
        fetch, error = self._queue.popleft(), ""
        number, before, began_s = fetch.operation.number, fetch.landed, self._clock()
        try:
            done = self._advance(fetch)
        except Exception as exc:  # any error ends this fetch only
            done, error = True, f"{type(exc).__name__}: {exc}"
            log.exception("storage_fetch_failed", operation=number, error=error)
        fetch.seconds += self._clock() - began_s
        if done:
            del self._under_way[number]
        if done or fetch.landed > before:
            self._moved(number, fetch.landed, done, error, fetch.seconds, fetch.states)
        if not done:
            self._queue.append(fetch)
            self._submit(self.fetching, self._fetch_some)

    def _advance(self, fetch: _Fetch) -> bool:
        """Finds all items, or fetches a batch; returns whether the fetch has ended."""
        operation, left_s = fetch.operation, fetch.until_s - self._clock()
        if left_s <= 0 or fetch.unwanted or self._stopped:
            return True
        limit_s = min(left_s, CALL_LIMIT_S)
        if operation.kind == "find":
            fetch.landed = self._pages.leading(operation.links, limit_s)
            if self._states is not None:
                at = [*operation.state_links, *operation.links[: fetch.landed]]
                fetch.states = self._states.find(at, limit_s)
            return True
        if not fetch.landed:  # pins the memory of all blocks, or raises
            self._pages.reserve(operation.blocks)
            if self._states is not None:
                self._states.reserve(operation.state_blocks)
        items, links, blocks = next(self._batches(operation, fetch.landed))
        landed = items.fetch(links, blocks, limit_s)
        fetch.landed += landed
        return landed < len(links) or fetch.landed == len(operation.links) + len(operation.state_links)

    def _batches(self, operation: StorageOperation, first: int = 0) -> Iterator[_Batch]:
        """Yields the items of an operation in batches, pages and then states, without the first `first` items."""
        kinds = [_Batch(self._pages, operation.links, operation.blocks)]
        if self._states is not None:
            kinds.append(_Batch(self._states, operation.state_links, operation.state_blocks))
        for items, links, blocks in kinds:
            for start in range(min(first, len(links)), len(links), items.batch):
                stop = start + items.batch
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
            for items, links, blocks in self._batches(operation):
                count = items.store(links, blocks, CALL_LIMIT_S) if not self._stopped else 0
                stored += count
                if count < len(links):
                    break
        except Exception as exc:  # any error ends this write only
            error = f"{type(exc).__name__}: {exc}"
            log.exception("storage_write_failed", operation=operation.number, error=error)
        self._moved(operation.number, stored, True, error, 0.0, ())


def _publish_nothing(links: Sequence[bytes], blocks: Sequence[int]) -> None:
    """Publishes no block, because the group shares none."""
