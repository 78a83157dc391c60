"""Slots of running requests, which waiting requests get by priority."""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort


class RunningSlots:
    """A semaphore whose waiters are served by priority, then first come, first served. Used on one event loop."""

    def __init__(self, limit: int) -> None:
        """`limit`: number of slots."""
        self._limit, self._taken = limit, 0
        self._numbers = itertools.count()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        """Priority, number of arrival, and future of each waiter, in the order of service."""

    @property
    def taken(self) -> int:
        """Number of slots in use; above the limit after the limit was lowered."""
        return self._taken

    def resize(self, limit: int) -> None:
        """Changes the number of slots. A lower number takes no slot away: slots in excess vanish when released."""
        self._limit = limit
        self._serve()

    async def acquire(self, priority: int = 0) -> None:
        """Takes a slot; waits for one behind all waiters of the same or a lower priority number."""
        if not self._waiters and self._taken < self._limit:
            self._taken += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (priority, next(self._numbers), granted)
        insort(self._waiters, waiter)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._forget(waiter)
            else:
                self.release()  # the slot was granted before the cancellation
            raise

    def _forget(self, waiter: tuple[int, int, asyncio.Future[None]]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def release(self) -> None:
        """Returns a slot, which goes to the first waiter."""
        self._taken -= 1
        self._serve()

    def _serve(self) -> None:
        while self._waiters and self._taken < self._limit:
            _, _, granted = self._waiters.pop(0)
            if not granted.cancelled():
                granted.set_result(None)
                self._taken += 1
