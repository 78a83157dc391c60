"""Requests whose KV has come: from the transfer thread to vLLM's scheduler.

A worker reports them when it launches a step. With asynchronous scheduling, the scheduler reads this report after it
has launched the next step, and schedules the request in the step after that one. A scheduler in the worker's process
reads the requests that have come since, and schedules them a step earlier, or two; see `NewlyReceived`.

A request may be reported early, when the end of its transfer is expected within `early_s`. The step that computes it
then waits for the rest (`await_rests`), and a second report says that nobody writes its blocks any more
(`take_settled`); see `disagg.vllm.unsettled`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import TypeVar

from disagg.core.ports import Clock

T = TypeVar("T")
LINGER_S = 2e-3
"""Longest time for which an empty step waits for KV. Between empty steps, vLLM sleeps for 1 ms."""
_MOST_NEWEST = 256
"""Requests kept for a scheduler in the same process. A scheduler in another process never takes them."""


class ReceivedRequests:
    """Requests of one worker whose KV has come, is about to come, or will not come. Thread-safe."""

    def __init__(self, clock: Clock = time.monotonic, early_s: float = 0.0) -> None:
        """`early_s`: time before the expected end of a transfer at which it is reported; 0: at the end."""
        self._clock, self._early_s = clock, early_s
        self._all: deque[str] = deque()
        self._newest: deque[str] = deque(maxlen=_MOST_NEWEST)
        self._settled: deque[str] = deque()
        self._due_s: dict[str, tuple[float, float]] = {}
        """From when until when each request may be reported early."""
        self._rests: set[str] = set()
        """Requests that were reported early, whose blocks are still written."""
        self._lost: dict[str, frozenset[int]] = {}
        """Blocks of the requests that were reported early, and whose rest does not come."""
        self._ended: set[str] = set()
        """Those of `_lost` whose transfers have ended."""
        self._forgotten: set[str] = set()
        """Requests that were in `_lost`, whose transfers have not ended."""
        self._changed = threading.Condition()
        self.early = 0
        """Requests that were reported early."""
        self.waited_s = 0.0
        """Time for which steps have waited for rests."""

    # --- transfer thread

    def expect(self, request_id: str, end_s: float, overdue_s: float = math.inf) -> None:
        """Announces when the transfer of a request ends, instead of an earlier announcement.

        `overdue_s`: when KV should have come that announces the end anew; without it, the request is not reported
        after this time. Has no effect after the request's report.
        """
        with self._changed:
            due_s = end_s - self._early_s
            if due_s > overdue_s:
                self._due_s.pop(request_id, None)
            elif self._early_s and request_id not in self._rests:
                self._due_s[request_id] = due_s, overdue_s
                self._changed.notify_all()

    def withdraw(self, request_id: str) -> None:
        """Forbids an early report from now on: the transfer is ending without all KV."""
        with self._changed:
            self._due_s.pop(request_id, None)

    def lose(self, request_id: str, blocks: Iterable[int]) -> bool:
        """Records that the rest does not come, if the request was reported early. Copies may still write its blocks.

        Returns whether it was. The blocks are reported with each step until `forget`.
        """
        with self._changed:
            self._due_s.pop(request_id, None)
            if request_id in self._rests:
                self._rests.discard(request_id)
                self._lost[request_id] = frozenset(blocks)
                self._changed.notify_all()
            return request_id in self._lost

    def add(self, request_id: str, loaded: bool) -> None:
        """Adds a request whose transfer has ended. `loaded`: whether its KV has come."""
        with self._changed:
            self._due_s.pop(request_id, None)
            if request_id in self._lost:
                self._ended.add(request_id)
                return
            if request_id not in self._rests | self._forgotten:
                self._report(request_id, loaded)
            self._rests.discard(request_id)
            self._forgotten.discard(request_id)
            self._settled.append(request_id)
            self._changed.notify_all()

    # --- worker and scheduler

    def take(self, wait_s: float = 0.0) -> set[str]:
        """Returns all requests since the last call. If there are none, waits for the first one up to `wait_s`."""
        with self._changed:
            until_s = self._clock() + wait_s
            self._report_due()
            while not self._all and (left_s := self._next_s(until_s) - self._clock()) > 0:
                self._changed.wait(left_s)
                self._report_due()
            return set(taken(self._all))

    def take_newest(self) -> set[str]:
        """Returns the requests with KV since the last call, reported or not."""
        with self._changed:
            self._report_due()
            return set(taken(self._newest))

    def newest(self) -> NewlyReceived:
        """Returns what a scheduler in this process reads."""
        return NewlyReceived(self)

    def take_settled(self) -> set[str]:
        """Returns the requests since the last call whose blocks nobody writes any more.

        Call it before `take`: a request settles after its report, or with it.
        """
        with self._changed:
            return set(taken(self._settled))

    def await_rests(self, request_ids: Set[str], limit_s: float) -> set[str]:
        """Blocks until the rests of these requests have come or are lost, for `limit_s` at most.

        Returns those that still come.
        """
        if self._coming(request_ids):
            began_s = self._clock()
            self.block(lambda: not self._coming(request_ids), limit_s)
            self.waited_s += self._clock() - began_s
        return self._coming(request_ids)

    def block(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Blocks until `ready()`, for `limit_s` at most."""
        with self._changed:
            self._changed.wait_for(ready, limit_s)

    def lost_blocks(self) -> set[int]:
        """Returns the blocks of the requests that were reported early and whose rest does not come."""
        with self._changed:
            return set().union(*self._lost.values())

    def forget(self, request_id: str) -> None:
        """Ends the reports of a request's lost blocks: nothing in the engine uses them."""
        with self._changed:
            if self._lost.pop(request_id, None) is None:
                return
            if request_id in self._ended:
                self._ended.discard(request_id)
                self._settled.append(request_id)
            else:
                self._forgotten.add(request_id)

    # --- with the lock

    def _coming(self, request_ids: Set[str]) -> set[str]:
        with self._changed:
            return self._rests & request_ids

    def _next_s(self, until_s: float) -> float:
        return min([until_s, *(due_s for due_s, _ in self._due_s.values())])

    def _report_due(self) -> None:
        now_s = self._clock()
        for request_id in [one for one, (due_s, _) in self._due_s.items() if due_s <= now_s]:
            _, overdue_s = self._due_s.pop(request_id)
            if now_s > overdue_s:
                continue
            self._rests.add(request_id)
            self.early += 1
            self._report(request_id, loaded=True)

    def _report(self, request_id: str, loaded: bool) -> None:
        if loaded:
            self._newest.append(request_id)
        self._all.append(request_id)


class NewlyReceived:
    """vLLM's `KVConnectorWorkerMetadata` of a step: the requests whose KV has come when the scheduler reads it.

    A copy in another process has no requests. Each of them is in a report of `ReceivedRequests.take` too.
    """

    def __init__(self, requests: ReceivedRequests | None = None) -> None:
        self._requests = requests

    def take(self) -> set[str]:
        """Returns the requests since the last call."""
        return self._requests.take_newest() if self._requests is not None else set()

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
