"""An asyncio event loop whose clock jumps to the next event: hours of waiting cost nothing."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine, Sequence
from typing import Any

ROUNDS, END_S = 3, 20.0


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their times, on one thread, without any socket.

    The first exception that a callback raises ends `run_forever`; `failure` holds it.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        super().__init__()
        self._now_s, self._clock_resolution = now_s, 1e-9
        self._selector, self._count = self, 0
        self.failure: BaseException | None = None
        self.set_exception_handler(self._fail)

    def time(self) -> float:
        """Returns the simulation's time in seconds."""
        return self._now_s

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Events of equal times happen in the order of these calls."""
        self._count += 1
        timer = _Timer(when, callback, args, self, context)
        timer.number, timer._scheduled = self._count, True
        heapq.heappush(self._scheduled, timer)
        return timer

    def select(self, timeout: float | None) -> Sequence[Any]:
        """Moves the clock to the next timer; the base class calls it where others wait for sockets."""
        if timeout is None:
            raise RuntimeError("no event is left, and the simulation has not ended")
        self._now_s += max(0.0, timeout)
        return ()

    def _process_events(self, event_list: Sequence[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        self.failure = self.failure or error
        self.stop()


class _Timer(asyncio.TimerHandle):
    __slots__ = ("number",)

    def __lt__(self, other: Any) -> bool:
        return (self._when, self.number) < (other._when, other.number)


def run(loop: VirtualTimeLoop, main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` to its end; raises its error, or the first error of a callback. Closes the loop."""
    asyncio.set_event_loop(loop)
    task = loop.create_task(main)

    def stop(_: object) -> None:
        loop.stop()

    task.add_done_callback(stop)
    try:
        loop.run_forever()
        task.remove_done_callback(stop)
        if loop.failure is not None:
            raise loop.failure
        task.result()
    finally:
        _end_tasks(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _end_tasks(loop: VirtualTimeLoop) -> None:
    """Cancelled sessions still release their requests, which takes a while after a failure."""
    loop.set_exception_handler(lambda *_: None)
    for _ in range(ROUNDS):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=END_S))
