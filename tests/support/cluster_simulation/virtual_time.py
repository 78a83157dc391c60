"""An asyncio event loop whose clock jumps to the next event: hours of waiting cost nothing."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import Any

LIMIT_S = 1800.0
"""A simulation that runs longer never ends."""
ROUNDS, END_S = 3, 20.0


class _Ready(asyncio.Handle):
    def run(self) -> None:
        """Calls back."""
        self._run()


class _Timer(asyncio.TimerHandle):
    def run(self) -> None:
        """Calls back."""
        self._run()


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their times, on one thread, without any socket.

    The first exception that a callback raises ends `run_forever`; `failure` holds it.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        super().__init__()
        self._now_s, self._until_s, self._count = now_s, now_s + LIMIT_S, 0
        self._timers: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        """A heap of a timer without arguments, or a function with its arguments. The number keeps the order of equal
        times."""
        self.failure: BaseException | None = None
        self.set_exception_handler(self._fail)

    def time(self) -> float:
        """Returns the simulation's time in seconds."""
        return self._now_s

    def _call_soon(self, callback: Any, args: Any, context: Any) -> asyncio.Handle:
        handle = _Ready(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Calls back at `when`; events of equal times happen in the order of these calls."""
        self._count += 1
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._count, timer, ()))
        return timer

    def do_later(self, delay_s: float, work: Callable[..., None], *arguments: Any) -> None:
        """The same as `call_later` for work that is never cancelled, in a third of its time."""
        self._count += 1
        heapq.heappush(self._timers, (self._now_s + delay_s, self._count, work, arguments))

    def _run_once(self) -> None:
        """Runs all that is ready; if nothing is, moves the clock from timer to timer. The base class calls it."""
        ready = self._ready
        while not ready and not self._stopping:
            self._run_timer()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle.run()

    def _run_timer(self) -> None:
        """Runs the next timer, unless it is cancelled."""
        if not self._timers:
            raise RuntimeError("no event is left, and the simulation has not ended")
        when, _, work, arguments = heapq.heappop(self._timers)
        if type(work) is _Timer:
            if work.cancelled():
                return
            work = work.run
        if when > self._now_s:
            self._now_s = when
            if when > self._until_s and self.failure is None:
                self._fail(
                    self, {"exception": AssertionError(f"nothing ends the simulation within {LIMIT_S:g} s")}
                )
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - ends `run_forever`
            self.call_exception_handler({"message": "a timer failed", "exception": error})

    def _timer_handle_cancelled(self, handle: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        self.failure = self.failure or error
        self.stop()


def run(loop: VirtualTimeLoop, main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` to its end; raises its error, or the first error of a callback. Closes the loop."""
    asyncio.set_event_loop(loop)
    task = loop.create_task(main)

    def stop(_: object) -> None:
        loop.stop()

    task.add_done_callback(stop)
    try:
        loop.run_forever()
        if loop.failure is not None:
            raise loop.failure
        task.result()
    finally:
        task.remove_done_callback(stop)
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
