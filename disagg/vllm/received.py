"""Requests whose KV has come: from the transfer thread to vLLM's scheduler.

A worker reports them when it launches a step. With asynchronous scheduling, the scheduler reads this report after it
has launched the next step, and schedules the request in the step after that one. A scheduler in the worker's process
reads the requests that have come since, and schedules them a step earlier, or two; see `NewlyReceived`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TypeVar

T = TypeVar("T")
LINGER_S = 2e-3
"""Longest time for which an empty step waits for KV. Between empty steps, vLLM sleeps for 1 ms."""
_MOST_NEWEST = 256
"""Requests kept for a scheduler in the same process. A scheduler in another process never takes them."""


class ReceivedRequests:
    """Requests of one worker whose blocks nobody writes any more. Thread-safe."""

    def __init__(self) -> None:
        self._all: deque[str] = deque()
        self._newest: deque[str] = deque(maxlen=_MOST_NEWEST)
        self._added = threading.Event()

    def add(self, request_id: str, loaded: bool) -> None:
        """Adds a request. `loaded`: whether its KV has come."""
        if loaded:
            self._newest.append(request_id)  # first, so that no request is among the newest after its report
        self._all.append(request_id)
        self._added.set()

    def take(self, wait_s: float = 0.0) -> set[str]:
        """Returns all requests since the last call. If there are none, waits for the first one up to `wait_s`."""
        if wait_s and not self._all:
            self._added.wait(wait_s)
        self._added.clear()
        return set(taken(self._all))

    def newest(self) -> NewlyReceived:
        """Returns what a scheduler in this process reads."""
        return NewlyReceived(self._newest)


class NewlyReceived:
    """vLLM's `KVConnectorWorkerMetadata` of a step: the requests whose KV has come when the scheduler reads it.

    A copy in another process has no requests. Each of them is in a report of `ReceivedRequests.take` too.
    """

    def __init__(self, requests: deque[str] | None = None) -> None:
        self._requests: deque[str] = deque() if requests is None else requests

    def take(self) -> set[str]:
        """Returns the requests since the last call."""
        return set(taken(self._requests))

    def aggregate(self, other: NewlyReceived) -> NewlyReceived:
        """Returns the metadata of several workers: no requests, since vLLM needs the reports of all workers."""
        return NewlyReceived()

    def __reduce__(self) -> tuple[type[NewlyReceived], tuple[()]]:
        return NewlyReceived, ()


def taken(queue: deque[T]) -> list[T]:
    """Empties a queue that another thread fills."""
    found = []
    while queue:
        found.append(queue.popleft())
    return found
