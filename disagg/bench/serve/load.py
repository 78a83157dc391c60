"""Sends requests at precomputed times (open loop), or each one when an earlier request has ended (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from disagg.bench.serve.answer import OK, REFUSED, RequestResult
from disagg.bench.serve.workload import WorkloadRequest


class RunClock:
    """Seconds since the start of the run."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Sets the current time to zero."""
        self._origin_s = time.perf_counter()

    def now(self) -> float:
        """Returns the seconds since the start."""
        return time.perf_counter() - self._origin_s

    async def until(self, due_s: float) -> None:
        """Sleeps until `due_s`. Other tasks run at least once, even if `due_s` is in the past."""
        await asyncio.sleep(max(0.0, due_s - self.now()))


@dataclass(frozen=True)
class LoadProgress:
    """Progress of a run, in requests."""

    running: int = 0
    ok: int = 0
    refused: int = 0
    """Requests refused with status 429."""
    failed: int = 0

    @property
    def ended(self) -> int:
        """Number of requests that have ended."""
        return self.ok + self.refused + self.failed


class Load:
    """Sends the requests of one run and collects their results."""

    def __init__(
        self,
        request: Callable[[int], WorkloadRequest],
        send: Callable[[WorkloadRequest, float | None], Awaitable[RequestResult]],
        clock: RunClock,
        report_progress: Callable[[LoadProgress], None],
    ) -> None:
        """`request(index)` draws a request. `send(request, due_s)` sends it, and must not raise."""
        self._request, self._send, self._clock, self._report_progress = request, send, clock, report_progress
        self._rows: list[RequestResult] = []
        self._ended: Counter[str] = Counter()
        self._running = self._most_running = 0

    @property
    def most_running(self) -> int:
        """Largest number of requests running at once."""
        return self._most_running

    async def open_loop(self, due_s: Sequence[float]) -> list[RequestResult]:
        """Sends request `i` at `due_s[i]`, independently of earlier answers; returns when all have ended."""
        async with asyncio.TaskGroup() as group:
            for index, due in enumerate(due_s):
                request = self._request(index)  # drawn before the send time, because a long prompt takes time
                await self._clock.until(due)
                group.create_task(self._one(request, due))
                await asyncio.sleep(0)  # the task sends the request before the next request is drawn
        return self._in_order()

    async def closed_loop(
        self, concurrency: int, requests: int | None = None, duration_s: float | None = None
    ) -> list[RequestResult]:
        """Keeps `concurrency` requests running until `requests` were sent or `duration_s` has passed; returns when
        all requests have ended."""
        numbers: Iterator[int] = count() if requests is None else iter(range(requests))

        async def one_after_another() -> None:
            for index in numbers:
                if duration_s is not None and self._clock.now() >= duration_s:
                    return
                await self._one(self._request(index), None)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_after_another())
        return self._in_order()

    async def _one(self, request: WorkloadRequest, due_s: float | None) -> None:
        self._running += 1
        self._most_running = max(self._most_running, self._running)
        row = await self._send(request, due_s)
        self._running -= 1
        self._rows.append(row)
        self._ended[row.kind] += 1
        ended, ok, refused = len(self._rows), self._ended[OK], self._ended[REFUSED]
        self._report_progress(LoadProgress(self._running, ok, refused, ended - ok - refused))

    def _in_order(self) -> list[RequestResult]:
        return sorted(self._rows, key=lambda row: row.index)
