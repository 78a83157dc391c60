"""The queue of requests that wait for a row and pages in a group. Pure: no threads, no clocks, no I/O.

Requests with the lowest priority number are admitted first (`Reserve.priority`). Requests of equal priority and of
one router are admitted first come, first served; the routers are served round robin, one request each. No request of
an equal or higher number overtakes the first ready request, however small. Without lower numbers, its wait is
therefore bounded by the deadlines of the admitted requests. If small requests could overtake a large request, the
large request's wait would depend on later arrivals, and a second rule would have to prevent starvation. Requests of a
higher number wait as long as requests of lower numbers keep arriving. A request that is not ready, because its
prefetch is under way, holds no memory and is overtaken. It keeps its position, and its prefetch has a time limit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disagg.core.errors import InvariantError
from disagg.core.types import RequestKey
from transport.control import messages as m


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """One queued request, which has no row and pages yet. Times are on the leader's clock."""

    router: str
    """Control address of the request's router."""
    reserve: m.Reserve
    deadline_s: float
    wait_until_s: float
    """Time after which the request is refused if still queued; at most `deadline_s`."""
    fetch_until_s: float = math.inf
    """Time after which the request no longer waits for its prefetch."""


@dataclass(frozen=True, slots=True)
class WaitingStatistics:
    """Current counts of a `WaitingQueue`."""

    waiting: int
    routers: int
    """Number of routers that have requests in the queue."""


Routers = OrderedDict[str, OrderedDict[RequestKey, WaitingRequest]]
"""Requests by router. Routers are in the order of service, the requests of each in the order of arrival."""


class WaitingQueue:
    """Waiting requests by priority; of equal priority: FIFO within each router, round robin over the routers."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._levels: dict[int, Routers] = {}
        """Requests by priority."""
        self._requests: dict[RequestKey, WaitingRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Yields the requests by priority, and then router by router. The queue must not change during the
        iteration."""
        for priority in sorted(self._levels):
            for queue in self._levels[priority].values():
                yield from queue.values()

    @property
    def full(self) -> bool:
        """Whether the queue accepts no further request."""
        return len(self) >= self._max_waiting

    def first(self, ready: Callable[[WaitingRequest], bool]) -> WaitingRequest | None:
        """Returns the request to admit next, the first one that is `ready`; None if none is."""
        return next(filter(ready, self), None)

    def is_first(self, priority: int, ready: Callable[[WaitingRequest], bool]) -> bool:
        """Returns whether a new request of this priority would precede all requests that are `ready`."""
        first = self.first(ready)
        return first is None or priority < first.reserve.priority

    def get(self, key: RequestKey) -> WaitingRequest | None:
        """Returns the queued request with this key; None if there is none."""
        return self._requests.get(key)

    def add(self, request: WaitingRequest) -> None:
        """Queues a request after its router's other requests of the same priority. The queue must not be `full`, and
        must not contain the request."""
        key = request.reserve.key
        assert not self.full, "the caller refuses further requests"
        assert key not in self._requests, "a request waits once"
        self._requests[key] = request
        routers = self._levels.setdefault(request.reserve.priority, OrderedDict())
        routers.setdefault(request.router, OrderedDict())[key] = request

    def take(self, request: WaitingRequest) -> None:
        """Removes a queued request; its router moves to the end of the round robin order of the priority."""
        self._levels[request.reserve.priority].move_to_end(request.router)
        self.remove(request.reserve.key)

    def remove(self, key: RequestKey) -> WaitingRequest | None:
        """Removes and returns the queued request with this key; None if there is none."""
        request = self._requests.pop(key, None)
        if request is None:
            return None
        priority = request.reserve.priority
        routers = self._levels[priority]
        del routers[request.router][key]
        if not routers[request.router]:
            del routers[request.router]
        if not routers:
            del self._levels[priority]
        return request

    def statistics(self) -> WaitingStatistics:
        """Returns the current counts."""
        return WaitingStatistics(len(self), len({one.router for one in self._requests.values()}))

    def check(self) -> None:
        """Raises `InvariantError` unless each request is queued once, under its priority and router, within the
        limit."""
        queued = [
            (priority, router, key, one)
            for priority, routers in self._levels.items()
            for router, queue in routers.items()
            for key, one in queue.items()
        ]
        sound = (
            {key: one for *_, key, one in queued} == self._requests
            and len(queued) == len(self) <= self._max_waiting
            and all(routers and all(routers.values()) for routers in self._levels.values())
            and all(
                (one.reserve.priority, one.router, one.reserve.key) == (priority, router, key)
                for priority, router, key, one in queued
            )
        )
        if not sound:
            raise InvariantError(f"the waiting queue is inconsistent: {self._levels}, {self._requests}")
