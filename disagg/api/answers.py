"""The answers to one HTTP request: merges the outputs of several tasks into one stream of (answer, output).

Each task drives one session of the router and lives until the session has released its memory, also after the client
has gone. `abort` therefore only cancels the tasks and does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from disagg.api.errors import ClientGoneError
from disagg.core.errors import DisaggError
from disagg.router.answers import Output

Item = tuple[int, Output] | Exception


class Answers:
    """An async iterator over `(answer, output)` in order of arrival; ends after all answers.

    Raises the first error of any answer. Buffers at most `max_tokens` outputs per answer.
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
        """Adds an output. After the last one of an answer, `abort` no longer cancels its task, which is releasing."""
        if output.finish is not None:
            self._unfinished.pop(answer, None)
        self._items.put_nowait((answer, output))

    def fail(self, answers: Iterable[int], error: DisaggError) -> None:
        """Ends `answers` with an error, which fails the whole request and aborts its other answers."""
        for answer in answers:
            self._unfinished.pop(answer, None)
        self._items.put_nowait(error)
        self._cancel()

    def abort(self, error: Exception | None = None) -> None:
        """Aborts unfinished answers; the iterator raises `error`, by default `ClientGoneError`. Idempotent."""
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
