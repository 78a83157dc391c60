"""Runs the answers to one HTTP request: passes the outputs of several tasks to one sink.

Each task runs one request of the router, and ends only when the router has released the request's memory, even if the
client disconnects earlier. `abort` therefore cancels the tasks without waiting for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from disagg.api.errors import ClientGoneError
from disagg.core.errors import DisaggError
from disagg.router.answers import Output


class Sink(Protocol):
    """Receives the answers to one HTTP request, on the event loop. Its methods do not block."""

    def put(self, answer: int, output: Output) -> None:
        """Receives an output of an answer. The outputs of one answer arrive in order."""

    def end(self, error: Exception | None) -> None:
        """Ends the answers. Called once: after the last output of all answers, or with the first error of any
        answer."""


class Answers:
    """The tasks of one HTTP request. When all answers have ended, or one has failed, further outputs are dropped."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._unfinished: dict[int, asyncio.Task[None]] = {}
        self._ended = False

    def start(self, answers: Iterable[int], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work`, which calls `put` or `fail` for `answers`.

        Returns the task, to which the caller keeps a reference until the task ends.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._unfinished |= dict.fromkeys(answers, task)
        return task

    def put(self, answer: int, output: Output) -> None:
        """Passes an output to the sink. After an answer's last output, `abort` no longer cancels the answer's task,
        because the task is releasing memory."""
        if self._ended:
            return
        self._sink.put(answer, output)
        if output.finish is not None:
            self._unfinished.pop(answer, None)
            if not self._unfinished:
                self._end(None)

    def fail(self, answers: Iterable[int], error: DisaggError) -> None:
        """Ends `answers` with an error: the whole request fails, and its other answers are aborted."""
        for answer in answers:
            self._unfinished.pop(answer, None)
        self._end(error)
        self._cancel()

    def abort(self, error: Exception | None = None) -> None:
        """Aborts unfinished answers; the sink gets `error`, by default `ClientGoneError`. Idempotent."""
        if self._unfinished:
            self._end(error or ClientGoneError())
        self._cancel()

    def _end(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            self._sink.end(error)

    def _cancel(self) -> None:
        for task in set(self._unfinished.values()):
            task.cancel()
        self._unfinished.clear()
