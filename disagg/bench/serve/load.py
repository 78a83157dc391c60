"""When requests are sent: at times drawn before (open loop), or when an earlier one ends (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from disagg.bench.serve.answer import OK, REFUSED, Row
from disagg.bench.serve.workload import Asked


class Clock:
    """Seconds since the run's start."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """It is zero now."""
        self._origin_s = time.perf_counter()

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._origin_s

    async def until(self, due_s: float) -> None:
        """Returns at `due_s`; lets others run in any case."""
        await asyncio.sleep(max(0.0, due_s - self.now()))


@dataclass(frozen=True)
class Counts:
    """How far a run is, in requests."""

    running: int = 0
    ok: int = 0
    refused: int = 0
    """With status 429."""
    failed: int = 0

    @property
    def ended(self) -> int:
        """All that are not running any more."""
        return self.ok + self.refused + self.failed


class Load:
    """Sends requests and collects their rows. One run."""

    def __init__(
        self,
        request: Callable[[int], Asked],
        ask: Callable[[Asked, float | None], Awaitable[Row]],
        clock: Clock,
        tell: Callable[[Counts], None],
    ) -> None:
        """`request` draws number `index`; `ask` sends it, with the time at which it was due; raises nothing."""
        self._request, self._ask, self._clock, self._tell = request, ask, clock, tell
        self._rows: list[Row] = []
        self._ended: Counter[str] = Counter()
        self._running = self._most_running = 0

    @property
    def most_running(self) -> int:
        """The most requests that ever were under way at once."""
        return self._most_running

    async def open_loop(self, due_s: Sequence[float]) -> list[Row]:
        """Sends request `i` at `due_s[i]`, however many are unanswered; returns when all have ended."""
        async with asyncio.TaskGroup() as group:
            for index, due in enumerate(due_s):
                asked = self._request(index)  # before it is due: drawing a long prompt takes time
                await self._clock.until(due)
                group.create_task(self._one(asked, due))
                await asyncio.sleep(0)  # it is on its way before the next one is drawn
        return self._in_order()

    async def closed_loop(
        self, concurrency: int, requests: int | None = None, duration_s: float | None = None
    ) -> list[Row]:
        """Keeps `concurrency` under way, until so many or for so long; returns when all have ended."""
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

    async def _one(self, asked: Asked, due_s: float | None) -> None:
        self._running += 1
        self._most_running = max(self._most_running, self._running)
        row = await self._ask(asked, due_s)
        self._running -= 1
        self._rows.append(row)
        self._ended[row.kind] += 1
        ended, ok, refused = len(self._rows), self._ended[OK], self._ended[REFUSED]
        self._tell(Counts(self._running, ok, refused, ended - ok - refused))

    def _in_order(self) -> list[Row]:
        return sorted(self._rows, key=lambda row: row.index)
