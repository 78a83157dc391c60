"""The queue of requests that wait for a row and pages in a group. Pure: no threads, no clocks, no I/O.

Requests of one router are admitted first come, first served; the routers are served round robin, one request each. No
request overtakes the head of the queue, however small. The wait of the head is therefore bounded by the deadlines of
the admitted requests. If small requests could overtake a large request, the large request's wait would depend on
later arrivals, and a second rule would have to prevent starvation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
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

    @property
    def head(self) -> WaitingRequest | None:
        """The request to admit next; None if no request waits."""
        return next(iter(self), None)

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

    def take(self) -> WaitingRequest | None:
        """Removes and returns the head; its router moves to the end of the round robin order."""
        head = self.head
        if head is not None:
            self._queues.move_to_end(head.router)
            self.remove(head.reserve.key)
        return head

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
