"""Executes a rank's reads and writes of the third tier of the prefix cache, as the leader's plans order.

The controller decides nothing: the leader's `StorageTier` decides for all ranks. Each rank stores and reads its own
heads. A read thread and a write thread call the storage, and copy pages between host memory and buffers of their own.
A call of the storage blocks for at most a time limit, and each fault counts as a miss.

Fetches are divided into batches. The read thread does one batch of each fetch in turn, so a long prompt does not
delay a short one. After each batch, the thread reports how many leading pages have landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from disagg.core.ports import Clock
from disagg.kv.cache_operations import StorageOperation
from disagg.node.block_parts import BlockParts
from disagg.storage.contract import PageStorage, StorageStatistics
from disagg.storage.keys import PageKeys

log = structlog.get_logger(__name__)

BATCH_BYTES = 16 << 20
"""Size of a buffer of pages that one call reads or writes; a single page may be larger."""
CALL_LIMIT_S = 2.0
"""Time limit of one call of the storage. Only a hung disk or server makes a call last this long."""

Moved = Callable[[int, int, bool, str, float], None]
"""Callback with an operation's number, its finished leading pages, whether it has ended, its error, and the seconds
that its reads took; see `StorageMoved`."""


class BlockMemory(Protocol):
    """Access to the blocks of KV pages in host memory; implemented by `HybridCacheController`."""

    def kv_blocks(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Returns the memory of blocks, uint8 `[block_bytes]` each. Raises `RuntimeError` if pinning fails."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """A find or a fetch under way."""

    operation: StorageOperation
    until_s: float
    landed: int = 0
    seconds: float = 0.0
    """Time spent on reads, without the time in the queue."""
    unwanted: bool = False


class StorageController:
    """Executes the storage operations of a rank. Owns two threads, and closes the storage in `stop`."""

    def __init__(
        self,
        storage: PageStorage,
        keys: PageKeys,
        read: BlockParts,
        written: BlockParts,
        memory: BlockMemory,
        moved: Moved,
        clock: Clock,
    ) -> None:
        """`read`: all parts of this rank.

        `written`: the parts that this rank stores and no other rank of the group stores.

        `moved` is called on the controller's threads.
        """
        self._storage, self._keys, self._memory = storage, keys, memory
        self._read, self._written = read, written
        self._moved, self._clock = moved, clock
        self.fetching: Executor = ThreadPoolExecutor(1, thread_name_prefix="storage-fetch")
        """Thread of finds and fetches."""
        self.writing: Executor = ThreadPoolExecutor(1, thread_name_prefix="storage-write")
        """Thread of writes."""
        self._under_way: dict[int, _Fetch] = {}
        self._queue: deque[_Fetch] = deque()
        self._stopped = False
        self._batch_pages = max(1, BATCH_BYTES // read.nbytes)
        self._read_buffer = self._write_buffer = torch.empty((0, 0), dtype=torch.uint8)

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
            self._moved(number, fetch.landed, done, error, fetch.seconds)
        if not done:
            self._queue.append(fetch)
            self._submit(self.fetching, self._fetch_some)

    def _advance(self, fetch: _Fetch) -> bool:
        """Finds all pages, or fetches a batch; returns whether the fetch has ended."""
        operation, left_s = fetch.operation, fetch.until_s - self._clock()
        if left_s <= 0 or fetch.unwanted or self._stopped:
            return True
        limit_s = min(left_s, CALL_LIMIT_S)
        if operation.kind == "find":
            keys = self._keys.keys(operation.links, self._read.parts[:1])
            fetch.landed = _leading(self._storage.exists(keys, limit_s))
            return True
        if not fetch.landed:
            self._memory.kv_blocks(operation.blocks)  # pins the memory of all blocks, or raises
        start, stop = fetch.landed, fetch.landed + self._batch_pages
        links, blocks = operation.links[start:stop], self._memory.kv_blocks(operation.blocks[start:stop])
        buffer = self._read_buffer = _grown(self._read_buffer, len(links), self._read.nbytes)
        into = [view for page in buffer[: len(links)] for view in self._read.views(page)]
        found = self._storage.get(self._keys.keys(links, self._read.parts), into, limit_s)
        landed = _leading(_whole(found, len(self._read.parts)))
        for page, block in zip(buffer[:landed], blocks, strict=False):
            self._read.scatter(page, block)
        fetch.landed += landed
        return landed < len(links) or fetch.landed == len(operation.links)

    # --- writes

    def _write(self, operation: StorageOperation) -> None:
        """Stores the pages of an operation that are not stored yet. Runs on the write thread.

        After the first page that cannot be stored, later pages are skipped, so that a hung storage does not keep
        blocks locked.
        """
        stored, error = 0, ""
        try:
            while stored < len(operation.links) and not self._stopped:
                stop = stored + self._batch_pages
                links, blocks = operation.links[stored:stop], operation.blocks[stored:stop]
                count = self._write_batch(links, blocks)
                stored += count
                if count < len(links):
                    break
        except Exception as exc:  # any error ends this write only
            error = f"{type(exc).__name__}: {exc}"
            log.exception("storage_write_failed", operation=operation.number, error=error)
        self._moved(operation.number, stored, True, error, 0.0)

    def _write_batch(self, links: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Stores the missing pages of a batch; returns how many leading pages of the batch are stored."""
        parts = self._written
        count = len(parts.parts)
        if not count:
            return len(links)
        there = _whole(self._storage.exists(self._keys.keys(links, parts.parts), CALL_LIMIT_S), count)
        lacking = [at for at, stored in enumerate(there) if not stored]
        if not lacking:
            return len(links)
        buffer = self._write_buffer = _grown(self._write_buffer, len(lacking), parts.nbytes)
        for page, block in zip(buffer, self._memory.kv_blocks([blocks[at] for at in lacking]), strict=False):
            parts.gather(block, page)
        keys = self._keys.keys([links[at] for at in lacking], parts.parts)
        pages = [view for page in buffer[: len(lacking)] for view in parts.views(page)]
        results = _whole(self._storage.put(keys, pages, CALL_LIMIT_S), count)
        for at, stored in zip(lacking, results, strict=True):
            there[at] = stored
        return _leading(there)


def _whole(parts: Sequence[bool], count: int) -> list[bool]:
    """Returns for each page whether all of its `count` parts are True in `parts`."""
    return [all(parts[first : first + count]) for first in range(0, len(parts), count)]


def _leading(results: Sequence[bool]) -> int:
    """Returns the number of results before the first False."""
    return next((at for at, result in enumerate(results) if not result), len(results))


def _grown(buffer: torch.Tensor, pages: int, page_bytes: int) -> torch.Tensor:
    """Returns a buffer of at least `pages` pages: `buffer` itself if it is large enough."""
    if len(buffer) >= pages:
        return buffer
    return torch.empty((pages, page_bytes), dtype=torch.uint8)
