"""How many answers may run and wait. Decides at once; only a turn is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from disagg.api.metrics import Metrics
from disagg.api.pace import Pace
from disagg.core.clock import Clock
from disagg.core.errors import BusyError, RequestTimeoutError
from disagg.router.session import SessionReport

RETRY_AFTER_S = 1.0


class Admission:
    """Up to `max_running` answers run, `max_queued` wait in the order of their arrival. Lives on one event loop.

    Answers to one prompt that are computed together have one turn.
    """

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        metrics: Metrics,
        pace: Pace | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`pace` may allow fewer of them."""
        self._limit, self._pace, self._clock = max_running + max_queued, pace, clock
        self._inside = 0
        self._turns = asyncio.Semaphore(max_running)
        self._waiting: set[asyncio.Timeout] = set()
        """Of those that may be turned away while they wait."""
        self._metrics = metrics

    @property
    def limit(self) -> int:
        """Answers that can be inside at one time."""
        return self._limit

    def knock(self) -> None:
        """Somebody asks for one answer, or more. Raises `BusyError` when not even one would be let in.

        Before anything is read: who is refused must cost nothing, or nobody is served under overload.
        """
        if self._pace is not None:
            self._pace.came(self._inside, self._clock())
        try:
            self._check(1)
        except BusyError:
            if self._pace is not None and self._pace.refused(self._clock()):
                self._turn_away()
            raise

    def enter(self, answers: int) -> None:
        """Takes places for all of `answers`; each must `leave`. Raises `BusyError`, and takes none, when full."""
        self._check(answers)
        self._inside += answers

    def ended(self, report: SessionReport, inside: int, answers: int = 1) -> None:
        """So many answers came whole, made together; `inside` were there when they had their turn."""
        if self._pace is not None:
            most = max(inside, self._inside)
            steps = max(map(len, report.answers), default=0)  # the longest one takes as long as all of them
            self._pace.ended(steps, report.ttft_s, report.ended_s, most, self._clock(), answers)

    @property
    def inside(self) -> int:
        """Answers that run or wait."""
        return self._inside

    def _check(self, answers: int) -> None:
        pace = self._pace.limit(self._clock()) if self._pace is not None else None
        # A request for many answers is let in alone, whatever the pace: else it would be refused for ever.
        limit = self._limit if pace is None else min(self._limit, max(pace, answers))
        if self._inside + answers > limit:
            raise self._busy(limit)

    def _busy(self, limit: int) -> BusyError:
        return BusyError(
            f"the server has {self._inside} answers running or waiting and takes {limit}: try again later",
            RETRY_AFTER_S,
        )

    def _turn_away(self) -> None:
        """Those that wait and may be: an overload has begun, and they would wait for nothing good."""
        while self._waiting:
            self._waiting.pop().reschedule(asyncio.get_running_loop().time())

    def leave(self, answers: int = 1) -> None:
        """Gives their places back."""
        self._inside -= answers
        assert self._inside >= 0, "more answers left than entered"

    @asynccontextmanager
    async def turn(self, deadline_s: float, alone: bool = True) -> AsyncIterator[None]:
        """Waits until one may run, on `time.monotonic`'s clock. Raises `RequestTimeoutError`.

        `alone`: no other answer belongs to the same request, so this one may still be refused: then `BusyError`.
        """
        with self._metrics.queued.track_inprogress():
            await self._acquire(deadline_s, alone)
        try:
            with self._metrics.running.track_inprogress():
                yield
        finally:
            self._turns.release()

    async def _acquire(self, deadline_s: float, alone: bool) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())) as patience:
                if alone:
                    self._waiting.add(patience)
                try:
                    await self._turns.acquire()
                finally:
                    away = alone and patience not in self._waiting
                    self._waiting.discard(patience)
        except TimeoutError as exc:
            if away:
                raise self._busy(self._inside - 1) from exc
            raise RequestTimeoutError("the request did not have its turn in time") from exc
