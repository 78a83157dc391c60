"""Threads that do the I/O of a storage, so that a hung disk or server never blocks a caller."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from disagg.core.log import get_logger

log = get_logger(__name__)

Task = Callable[[], None]


class IOThreads:
    """A fixed number of threads with one queue. Thread-safe.

    The threads are daemons: a thread that is blocked in a read of a hung disk cannot be joined, and must not prevent
    the process from ending.
    """

    def __init__(self, name: str, count: int) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        self._lock = threading.Lock()
        self._closed = False
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """Number of threads."""
        return len(self._threads)

    def submit(self, task: Task) -> bool:
        """Queues a task, which must not raise. Returns False after `close`."""
        with self._lock:
            if not self._closed:
                self._queue.put(task)
            return not self._closed

    def close(self, timeout_s: float) -> bool:
        """Ends the threads after the tasks in the queue. Returns False if a thread still runs after `timeout_s`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        ends_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:  # a bug in the task: the thread must still serve other pages
                log.exception("storage_task_failed")
            del task  # a waiting thread keeps no reference to the last call's batch
