"""The answers to one HTTP request: tasks for one or more of them, one stream of (answer, output) out of all.

Each task drives one session of the router, and lives until the session has released what it held, also when nobody
waits for it any more. So leaving is never waiting: `abort` cancels the tasks and returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from disagg.api.errors import ClientGoneError
from disagg.core.errors import DisaggError
from disagg.router.session import Output

Item = tuple[int, Output] | Exception


class Answers:
    """An async iterator over `(answer, output)` in the order in which they come; ends when all answers have.

    Raises the first error of any. What is not taken waits here: at most `max_tokens` outputs for each answer.
    """

    def __init__(self) -> None:
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._unfinished: dict[int, asyncio.Task[None]] = {}

    def start(self, answers: Iterable[int], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work`, which calls `put` or `fail` for `answers`. The caller keeps the task until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._unfinished |= dict.fromkeys(answers, task)
        return task

    def put(self, answer: int, output: Output) -> None:
        """Some more of an answer; `finish` of all of a task: it must not be cancelled, its session is releasing."""
        if output.finish is not None:
            self._unfinished.pop(answer, None)
        self._items.put_nowait((answer, output))

    def fail(self, answers: Iterable[int], error: DisaggError) -> None:
        """These have ended without their text, and with them the whole request: their siblings are aborted."""
        for answer in answers:
            self._unfinished.pop(answer, None)
        self._items.put_nowait(error)
        self._cancel()

    def abort(self, error: Exception | None = None) -> None:
        """Aborts what is unfinished; whoever iterates gets `error` (that the client is gone). Again: nothing."""
        if self._unfinished:
            self._items.put_nowait(error or ClientGoneError())
        self._cancel()

    def _cancel(self) -> None:
        for task in set(self._unfinished.values()):
            task.cancel()
        self._unfinished.clear()

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> tuple[int, Output]:
        if not self._unfinished and self._items.empty():
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item
