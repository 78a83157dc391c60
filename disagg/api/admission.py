"""How many answers may run and wait. Decides at once; only a turn is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from disagg.api.metrics import Metrics
from disagg.core.errors import BusyError, RequestTimeoutError

RETRY_AFTER_S = 1.0


class Admission:
    """Up to `max_running` answers run, `max_queued` wait in the order of their arrival. Lives on one event loop."""

    def __init__(self, max_running: int, max_queued: int, metrics: Metrics) -> None:
        self._limit = max_running + max_queued
        self._inside = 0
        self._turns = asyncio.Semaphore(max_running)
        self._metrics = metrics

    @property
    def limit(self) -> int:
        """Answers that can be inside at one time."""
        return self._limit

    def enter(self, answers: int) -> None:
        """Takes places for all of `answers`; each must `leave`. Raises `BusyError`, and takes none, when full."""
        if self._inside + answers > self._limit:
            raise BusyError(
                f"the server has {self._inside} answers running or waiting and takes {self._limit}: try again later",
                RETRY_AFTER_S,
            )
        self._inside += answers

    def leave(self) -> None:
        """Gives one place back."""
        self._inside -= 1
        assert self._inside >= 0, "more answers left than entered"

    @asynccontextmanager
    async def turn(self, deadline_s: float) -> AsyncIterator[None]:
        """Waits until one may run, on `time.monotonic`'s clock. Raises `RequestTimeoutError`."""
        with self._metrics.queued.track_inprogress():
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._turns.acquire()
            except TimeoutError as exc:
                raise RequestTimeoutError("the request did not have its turn in time") from exc
        try:
            with self._metrics.running.track_inprogress():
                yield
        finally:
            self._turns.release()
