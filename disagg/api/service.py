"""Runs what was asked for: admission, a session of the router for each answer, measurements, and the stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import structlog

from disagg.api.admission import Admission
from disagg.api.answers import Answers
from disagg.api.asked import Asked
from disagg.api.errors import ApiError, bad, retry_after
from disagg.api.metrics import Metrics
from disagg.api.model import ServedModel
from disagg.core.config import ApiConfig
from disagg.core.errors import AbortedError, DisaggError
from disagg.core.types import SamplingParams
from disagg.router.session import RELEASE_TIMEOUT_S, Output, SessionReport
from disagg.router.text import Decode

log = structlog.get_logger(__name__)


class Generator(Protocol):
    """What the API needs of `disagg.router.session.Router`."""

    def missing(self) -> list[str]:
        """Roles (`prefill`, `decode`) of which no group is up."""

    def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_s: float,
        decode: Decode | None = None,
        report: SessionReport | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Streams an answer; closing the iterator aborts it."""


class Service:
    """The engine as the routes see it. Lives on one event loop."""

    def __init__(self, generator: Generator, model: ServedModel, config: ApiConfig) -> None:
        self.model, self.config, self.metrics = model, config, Metrics()
        self._generator = generator
        self._admission = Admission(config.max_running, config.max_queued, self.metrics)
        self._tasks: dict[asyncio.Task[None], Answers] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.stopping = False
        """Set once, for good: new requests are refused, running ones go on."""

    def why_not_ready(self) -> str | None:
        """Why no request is taken now; None when one is."""
        if self.stopping:
            return "the server is stopping"
        missing = self._generator.missing()
        return f"no {' and no '.join(missing)} group is up" if missing else None

    def check_ready(self) -> None:
        """Raises a 503 when no request is taken now."""
        if why := self.why_not_ready():
            raise ApiError(503, f"{why}: try again later", code="unavailable", headers=retry_after(1))

    def start(self, asked: Asked, request_id: str, arrived_s: float, deadline_s: float) -> Answers:
        """Starts all the answers. Times are `time.monotonic`'s. Raises `ApiError`, and `BusyError` when full."""
        self.check_ready()
        if asked.choices > self._admission.limit:
            raise bad(
                "n", f"{asked.choices} answers in one request; this server runs {self._admission.limit}"
            )
        self._admission.enter(asked.choices)
        answers = Answers()
        for choice in range(asked.choices):
            work = self._answer(answers, choice, asked, f"{request_id}-{choice}", arrived_s, deadline_s)
            task = answers.start(choice, work)
            self._tasks[task] = answers
            self._idle.clear()
            # A callback, because a task that is cancelled before its first step runs no `finally`.
            task.add_done_callback(self._done)
        return answers

    async def drain(self, timeout_s: float) -> bool:
        """Waits for running answers, then aborts them; False when it had to. Set `stopping` before."""
        if await self._wait_idle(timeout_s):
            return True
        for answers in set(self._tasks.values()):
            answers.abort(AbortedError("the server is stopping: ask again, elsewhere or later"))
        await self._wait_idle(RELEASE_TIMEOUT_S + 1.0)
        return False

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._admission.leave()
        if task.cancelled():
            self.metrics.aborts.inc()
        if not self._tasks:
            self._idle.set()

    async def _answer(
        self, answers: Answers, choice: int, asked: Asked, key: str, arrived_s: float, deadline_s: float
    ) -> None:
        report, metrics = SessionReport(), self.metrics
        try:
            async with self._admission.turn(deadline_s):
                began_s = time.monotonic()
                try:
                    await self._session(
                        answers, choice, asked, key, deadline_s, report, self._meter(arrived_s)
                    )
                finally:
                    if report.reserved_s:
                        metrics.queue.observe(began_s - arrived_s + report.reserved_s)
                    metrics.transferred(report)
        except DisaggError as error:
            metrics.errors.labels(error.code).inc()
            answers.fail(choice, error)
        except Exception:
            log.exception("answer_failed", request=key)
            metrics.errors.labels(DisaggError.code).inc()
            answers.fail(choice, DisaggError("internal error; the server's log has its details"))

    async def _session(
        self,
        answers: Answers,
        choice: int,
        asked: Asked,
        key: str,
        deadline_s: float,
        report: SessionReport,
        meter: Callable[[Output], None],
    ) -> None:
        prompt, sampling = asked.choice(choice)
        self.metrics.prompt_tokens.inc(len(prompt))
        left_s = max(0.0, deadline_s - time.monotonic())
        stream = self._generator.generate(
            key, prompt, sampling, timeout_s=left_s, decode=self.model.decode, report=report
        )
        async with aclosing(stream) as outputs:
            async for output in outputs:
                meter(output)
                answers.put(choice, output)

    def _meter(self, arrived_s: float) -> Callable[[Output], None]:
        """Counts an answer's outputs as they come."""
        last_s, first = arrived_s, True

        def count(output: Output) -> None:
            nonlocal last_s, first
            if not output.tokens:
                return
            now_s = time.monotonic()
            if first:
                self.metrics.ttft.observe(now_s - arrived_s)
            else:
                self.metrics.itl.observe((now_s - last_s) / len(output.tokens))
            last_s, first = now_s, False
            self.metrics.generated_tokens.inc(len(output.tokens))

        return count
