"""Admission control: limits the running and queued answers. Decisions are immediate; only `turn` waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from disagg.api.metrics import Metrics
from disagg.api.pace import Pace
from disagg.api.running_slots import RunningSlots
from disagg.core.clock import Clock
from disagg.core.errors import BusyError, RequestTimeoutError
from disagg.router.answers import SessionReport

RETRY_AFTER_S = 1.0


class Admission:
    """Runs up to `max_running` requests and queues up to `max_queued` answers: by priority, then first come, first
    served.

    Answers to one prompt that are computed together are admitted together. All methods run on one event loop.
    """

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        metrics: Metrics,
        pace: Pace | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`pace` may lower the limit of answers."""
        self._max_running, self._max_queued = max_running, max_queued
        self._pace, self._clock = pace, clock
        self._inside = 0
        self._slots = RunningSlots(max_running)
        self._waiting: set[asyncio.Timeout] = set()
        """Timeouts of queued requests that an overload may reject."""
        self._metrics = metrics

    @property
    def limit(self) -> int:
        """Largest number of running and queued answers."""
        return self._max_running + self._max_queued

    @property
    def max_running(self) -> int:
        """Largest number of running requests."""
        return self._max_running

    def resize(self, max_running: int) -> None:
        """Changes the limit of running requests. A lower limit ends no running request."""
        self._max_running = max_running
        self._slots.resize(max_running)
        if self._pace is not None:
            self._pace.resize(max_running)

    def check_capacity(self) -> None:
        """Counts an arriving request. Raises `BusyError` if not even one answer would be admitted.

        Called before the body is read: under overload a rejection must be cheap.
        """
        if self._pace is not None:
            self._pace.arrived(self._inside, self._clock())
        try:
            self._check(1)
        except BusyError:
            if self._pace is not None and self._pace.refused(self._clock()):
                self._reject_queued()
            raise

    def enter(self, answers: int) -> None:
        """Admits `answers` answers; the caller must call `leave` for them later. If not all have room, admits none
        and raises `BusyError`."""
        self._check(answers)
        self._inside += answers

    def ended(self, report: SessionReport, inside: int, answers: int = 1) -> None:
        """Records that `answers` answers, computed together, are complete. `inside`: number of admitted answers at
        their start."""
        if self._pace is not None:
            most = max(inside, self._inside)
            steps = max(map(len, report.answers), default=0)  # the longest answer sets the duration
            self._pace.ended(steps, report.ttft_s, report.ended_s, most, self._clock(), answers)

    @property
    def inside(self) -> int:
        """Number of running and queued answers."""
        return self._inside

    def _check(self, answers: int) -> None:
        pace = self._pace.limit(self._clock()) if self._pace is not None else None
        # An idle server admits a request above the limit of answers; otherwise the request would never run.
        limit = self.limit if pace is None else min(self.limit, max(pace, answers))
        if self._inside + answers > limit:
            raise self._busy(limit)

    def _busy(self, limit: int) -> BusyError:
        return BusyError(
            f"the server is full: {self._inside} answers running or queued, limit {limit} "
            f"(api.max_queued, api.max_queue_s): try again later",
            RETRY_AFTER_S,
        )

    def _reject_queued(self) -> None:
        """Rejects the queued requests at the start of an overload."""
        while self._waiting:
            self._waiting.pop().reschedule(asyncio.get_running_loop().time())

    def leave(self, answers: int = 1) -> None:
        """Removes `answers` ended answers from the admitted answers."""
        self._inside -= answers
        assert self._inside >= 0, "more answers left than entered"

    @asynccontextmanager
    async def turn(self, deadline_s: float, alone: bool = True, priority: int = 0) -> AsyncIterator[None]:
        """Occupies a running slot for the duration of the block.

        Waits for a slot until `deadline_s`, on `time.monotonic`'s clock; then raises `RequestTimeoutError`. `alone`:
        whether the HTTP request needs only this slot. While a request that needs one slot is queued, an overload may
        reject the request with `BusyError`. `priority`: requests with a lower number get a slot first.
        """
        with self._metrics.queued.track_inprogress():
            await self._acquire(deadline_s, alone, priority)
        try:
            with self._metrics.running.track_inprogress():
                yield
        finally:
            self._slots.release()

    async def _acquire(self, deadline_s: float, alone: bool, priority: int) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())) as waiting:
                if alone:
                    self._waiting.add(waiting)
                try:
                    await self._slots.acquire(priority)
                finally:
                    rejected = alone and waiting not in self._waiting
                    self._waiting.discard(waiting)
        except TimeoutError as exc:
            if rejected:
                raise self._busy(self._inside - 1) from exc
            raise RequestTimeoutError(
                "the request reached its deadline (api.request_timeout_s) in the queue"
            ) from exc
