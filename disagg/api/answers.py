"""The answers to one HTTP request: a task for each choice, one stream of (choice, output) out of all of them.

Each task drives one session of the router, and lives until the session has released what it held, also when nobody
waits for it any more. So leaving is never waiting: `abort` cancels the tasks and returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from disagg.api.errors import ClientGoneError
from disagg.core.errors import DisaggError
from disagg.router.session import Output

Item = tuple[int, Output] | Exception


class Answers:
    """An async iterator over `(choice, output)` in the order in which they come; ends when all choices have.

    Raises the first error of any choice. What is not taken waits here: at most `max_tokens` outputs for each choice.
    """

    def __init__(self) -> None:
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._unfinished: dict[int, asyncio.Task[None]] = {}

    def start(self, choice: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work`, which calls `put` or `fail` for `choice`. The caller keeps the task until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._unfinished[choice] = task
        return task

    def put(self, choice: int, output: Output) -> None:
        """Some more of a choice; after one with `finish` it must not be cancelled: its session is releasing."""
        if output.finish is not None:
            self._unfinished.pop(choice, None)
        self._items.put_nowait((choice, output))

    def fail(self, choice: int, error: DisaggError) -> None:
        """The choice has ended without its answer, and with it the whole request: its siblings are aborted."""
        self._unfinished.pop(choice, None)
        self._items.put_nowait(error)
        self._cancel()

    def abort(self, error: Exception | None = None) -> None:
        """Aborts what is unfinished; whoever iterates gets `error` (that the client is gone). Again: nothing."""
        if self._unfinished:
            self._items.put_nowait(error or ClientGoneError())
        self._cancel()

    def _cancel(self) -> None:
        for task in self._unfinished.values():
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
