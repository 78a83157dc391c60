"""A process of the simulated cluster: everything that it does passes through `later`, until it dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from disagg.core.errors import TransportError

if TYPE_CHECKING:
    from cluster_simulation.world import World

WAKE_S = (1e-5, 1e-4)
"""A thread's wake-up; some processes take longer."""


class Process:
    """One process, with a source of chance of its own: what others do does not change its choices."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.loop = world, name, world.loop
        self.choose = random.Random(f"{world.seed} {name}")
        self.alive, self.paused = True, False
        self._slowness = self.choose.choice([1, 1, 1, 10, 50])
        self._kept: list[Callable[[], None]] = []
        self._calls: set[asyncio.Future[Any]] = set()

    def later(self, work: Callable[[], None], delay_s: float | None = None) -> None:
        """Does `work` after `delay_s`, by default a thread's wake-up, if the process lives; when it is not paused."""
        if delay_s is None:
            delay_s = self._slowness * self.choose.uniform(*WAKE_S)
        self.loop.do_later(delay_s, self._do, work)

    def die(self) -> None:
        """Ends the process: nothing of it happens any more."""
        self.alive, self._kept = False, []
        for call in self._calls:
            call.set_exception(TransportError(f"{self.name} died"))
        self._calls = set()

    def pause(self) -> None:
        """Stops all threads of the process, as a stopped or swapped process does."""
        self.paused = True

    def resume(self) -> None:
        """All that was due is done soon, in its order."""
        self.paused = False
        kept, self._kept = self._kept, []
        for work in kept:
            self.loop.call_soon(self._do, work)

    async def call(self, work: Callable[[], Any]) -> Any:
        """Calls a method from outside, as Ray does; raises `TransportError` if the process dies first."""
        if not self.alive:
            raise TransportError(f"{self.name} is dead")
        done: asyncio.Future[Any] = self.loop.create_future()
        self._calls.add(done)

        def run() -> None:
            self._calls.discard(done)
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - the caller's
                done.set_exception(error)

        self.later(run, self.choose.uniform(0.001, 0.2))
        return await done

    def _do(self, work: Callable[[], None]) -> None:
        if self.paused:
            self._kept.append(work)
        elif self.alive:
            work()
