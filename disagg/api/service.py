"""Runs what was asked for: admission, a session of the router for each answer, measurements, and the stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

import structlog

from disagg import __version__
from disagg.api.admission import Admission
from disagg.api.answers import Answers
from disagg.api.asked import Asked, Part
from disagg.api.errors import ApiError, bad, retry_after
from disagg.api.exchange import Exchange
from disagg.api.group_metrics import GroupCollector
from disagg.api.metrics import Metrics
from disagg.api.model import ServedModel
from disagg.api.pace import Pace
from disagg.api.quantiles import RollingQuantiles
from disagg.api.recent import Recent, Track
from disagg.api.tracing import RequestTrace
from disagg.core.config import ApiConfig
from disagg.core.errors import AbortedError, DisaggError
from disagg.core.status import GroupStatus, ServiceStatus
from disagg.core.types import SamplingParams
from disagg.router.session import RELEASE_TIMEOUT_S, Output, SessionReport
from disagg.router.text import Decode

log = structlog.get_logger(__name__)


class Generator(Protocol):
    """What the API needs of `disagg.router.router.Router`."""

    def missing(self) -> list[str]:
        """Roles (`prefill`, `decode`; `colocated`) of which no group is up."""

    def max_sequences(self, prompt_tokens: int, max_tokens: int) -> int:
        """Most answers to such a request, or beams, that are computed side by side."""

    def groups(self) -> tuple[GroupStatus, ...]:
        """What each group said last."""

    def draining(self) -> tuple[str, ...]:
        """Names of the groups that are given nothing new."""

    def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_s: float,
        decode: Decode | None = None,
        report: SessionReport | None = None,
        cache_salt: str = "",
        session: str = "",
    ) -> AsyncGenerator[Output, None]:
        """Streams an answer; closing the iterator aborts it."""


class Service:
    """The engine as the routes see it. Lives on one event loop."""

    def __init__(self, generator: Generator, model: ServedModel, config: ApiConfig) -> None:
        self.model, self.config, self.metrics = model, config, Metrics()
        self._generator = generator
        pace = Pace(config.max_running, config.max_queue_s, config.max_slowdown)
        self._admission = Admission(config.max_running, config.max_queued, self.metrics, pace)
        self.metrics.registry.register(GroupCollector(generator.groups))
        self._recent, self._ttft, self._itl = Recent(), RollingQuantiles(), RollingQuantiles()
        self._began_s = time.monotonic()
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

    def status(self) -> ServiceStatus:
        """This router with its groups, now."""
        metrics, total = self.metrics, self.metrics.total
        ttft_p50_s, ttft_p99_s = self._ttft.quantiles((0.5, 0.99))
        itl_p50_s, itl_p99_s = self._itl.quantiles((0.5, 0.99))
        return ServiceStatus(
            model=self.model.name,
            version=__version__,
            unix_s=time.time(),
            uptime_s=time.monotonic() - self._began_s,
            ready=self.why_not_ready() or "ready",
            requests_running=int(total(metrics.running)),
            requests_queued=int(total(metrics.queued)),
            max_running=self.config.max_running,
            max_queued=self.config.max_queued,
            prompt_tokens_total=int(total(metrics.prompt_tokens)),
            generated_tokens_total=int(total(metrics.generated_tokens)),
            errors_total=int(total(metrics.errors)),
            aborts_total=int(total(metrics.aborts)),
            refused_total=int(total(metrics.requests, outcome="busy")),
            ttft_p50_s=ttft_p50_s,
            ttft_p99_s=ttft_p99_s,
            itl_p50_s=itl_p50_s,
            itl_p99_s=itl_p99_s,
            groups=self._generator.groups(),
            draining=self._generator.draining(),
            recent=self._recent.told(),
        )

    def knock(self) -> None:
        """Before a request is read. Raises a 503 when none is taken now, and `BusyError` when full."""
        self.check_ready()
        self._admission.knock()

    def start(self, asked: Asked, exchange: Exchange) -> Answers:
        """Starts all the answers to the request. Raises `ApiError`, and `BusyError` when full."""
        self.check_ready()
        parts = asked.parts(self._generator.max_sequences)
        if asked.sequences > self._admission.limit:
            raise bad(
                "n", f"{asked.sequences} answers in one request; this server runs {self._admission.limit}"
            )
        self._admission.enter(asked.sequences)
        answers = Answers()
        alone = len(parts) == 1
        for part in parts:
            track = self._recent.begin(f"{exchange.key}-{part.first}", exchange.arrived_s)
            track.report.prompt_tokens = len(part.prompt)
            work = self._answer(answers, part, alone, asked, track, exchange)
            task = answers.start(part.answers, work)
            self._tasks[task] = answers
            self._idle.clear()
            # A callback, because a task that is cancelled before its first step runs no `finally`.
            task.add_done_callback(partial(self._done, part.sampling.sequences, track, exchange.trace))
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

    def _done(
        self, sequences: int, track: Track, trace: RequestTrace | None, task: asyncio.Task[None]
    ) -> None:
        del self._tasks[task]
        self._admission.leave(sequences)
        if task.cancelled():
            self.metrics.aborts.inc()
            track.ended("aborted")
        if trace is not None:
            trace.answer(track)
        if not self._tasks:
            self._idle.set()

    async def _answer(
        self, answers: Answers, part: Part, alone: bool, asked: Asked, track: Track, exchange: Exchange
    ) -> None:
        report, metrics = track.report, self.metrics
        try:
            async with self._admission.turn(exchange.deadline_s, alone):
                track.turn_s, inside = time.monotonic(), self._admission.inside
                try:
                    await self._session(answers, part, asked, track, exchange)
                    self._admission.ended(report, inside, part.sampling.sequences)
                finally:
                    if report.reserved_s:
                        metrics.queue.observe(track.turn_s - track.arrived_s + report.reserved_s)
                    metrics.transferred(report)
        except DisaggError as error:
            metrics.errors.labels(error.code).inc()
            track.ended("aborted" if isinstance(error, AbortedError) else "error", error.code)
            answers.fail(part.answers, error)
        except Exception:
            log.exception("answer_failed", request=track.id)
            metrics.errors.labels(DisaggError.code).inc()
            track.ended("error", DisaggError.code)
            answers.fail(part.answers, DisaggError("internal error; the server's log has its details"))

    async def _session(
        self, answers: Answers, part: Part, asked: Asked, track: Track, exchange: Exchange
    ) -> None:
        meter = self._meter(track, part.sampling.n)
        self.metrics.prompt_tokens.inc(len(part.prompt))
        left_s = max(0.0, exchange.deadline_s - time.monotonic())
        stream = self._generator.generate(
            track.id,
            part.prompt,
            part.sampling,
            timeout_s=left_s,
            decode=self.model.decode,
            report=track.report,
            cache_salt=asked.cache_salt,
            session=asked.session or exchange.session,
        )
        async with aclosing(stream) as outputs:
            async for output in outputs:
                meter(output)
                answers.put(part.first + output.answer, output)

    def _meter(self, track: Track, answers: int) -> Callable[[Output], None]:
        """Counts the outputs of `answers` answers as they come."""
        last_s: dict[int, float] = {}
        left = answers

        def count(output: Output) -> None:
            nonlocal left
            now_s = time.monotonic()
            if output.tokens and not track.first_s:
                track.first_s = now_s
                self.metrics.ttft.observe(now_s - track.arrived_s)
                self._ttft.add(now_s - track.arrived_s)
            elif output.tokens and output.answer in last_s:
                each_s = (now_s - last_s[output.answer]) / len(output.tokens)
                self.metrics.itl.observe(each_s)
                self._itl.add(each_s)
            if output.tokens:
                last_s[output.answer] = now_s
                self.metrics.generated_tokens.inc(len(output.tokens))
            left -= output.finish is not None
            if not left:
                track.ended("stop" if output.finish == "stop" else "length")

        return count
