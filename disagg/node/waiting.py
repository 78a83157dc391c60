"""The queue of requests that wait for a row and pages in a group. Pure: no threads, no clocks, no I/O.

Requests of one router are admitted first come, first served; the routers are served round robin, one request each. No
request overtakes the first ready request, however small. Its wait is therefore bounded by the deadlines of the
admitted requests. If small requests could overtake a large request, the large request's wait would depend on later
arrivals, and a second rule would have to prevent starvation. A request that is not ready, because its prefetch is
under way, holds no memory and is overtaken. It keeps its position, and its prefetch has a time limit.
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


class WaitingQueue:
    """Waiting requests: FIFO within each router, round robin over the routers."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._queues: OrderedDict[str, OrderedDict[RequestKey, WaitingRequest]] = OrderedDict()
        """Requests by router. Routers are in the order of service, the requests of each in the order of arrival."""
        self._routers: dict[RequestKey, str] = {}

    def __len__(self) -> int:
        return len(self._routers)

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Yields the requests router by router. The queue must not change during the iteration."""
        for queue in self._queues.values():
            yield from queue.values()

    @property
    def full(self) -> bool:
        """Whether the queue accepts no further request."""
        return len(self) >= self._max_waiting

    def first(self, ready: Callable[[WaitingRequest], bool]) -> WaitingRequest | None:
        """Returns the request to admit next, the first one that is `ready`; None if none is."""
        return next(filter(ready, self), None)

    def get(self, key: RequestKey) -> WaitingRequest | None:
        """Returns the queued request with this key; None if there is none."""
        router = self._routers.get(key)
        return self._queues[router][key] if router is not None else None

    def add(self, request: WaitingRequest) -> None:
        """Queues a request after its router's other requests. The queue must not be `full`, and must not contain the
        request."""
        key = request.reserve.key
        assert not self.full, "the caller refuses further requests"
        assert key not in self._routers, "a request waits once"
        self._routers[key] = request.router
        self._queues.setdefault(request.router, OrderedDict())[key] = request

    def take(self, request: WaitingRequest) -> None:
        """Removes a queued request; its router moves to the end of the round robin order."""
        self._queues.move_to_end(request.router)
        self.remove(request.reserve.key)

    def remove(self, key: RequestKey) -> WaitingRequest | None:
        """Removes and returns the queued request with this key; None if there is none."""
        router = self._routers.pop(key, None)
        if router is None:
            return None
        queue = self._queues[router]
        request = queue.pop(key)
        if not queue:
            del self._queues[router]
        return request

    def statistics(self) -> WaitingStatistics:
        """Returns the current counts."""
        return WaitingStatistics(len(self), len(self._queues))

    def check(self) -> None:
        """Raises `InvariantError` unless each request is queued once, under its router, within the limit."""
        queued = {key: router for router, queue in self._queues.items() for key in queue}
        sound = (
            queued == self._routers
            and len(queued) == sum(map(len, self._queues.values())) <= self._max_waiting
            and all(self._queues.values())
            and all(
                (one.router, one.reserve.key) == (router, key)
                for router, queue in self._queues.items()
                for key, one in queue.items()
            )
        )
        if not sound:
            raise InvariantError(f"the waiting queue is inconsistent: {self._queues}, {self._routers}")
