"""Runs generation requests: admission, router sessions, measurements, and shutdown."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
import structlog

from disagg import __version__
from disagg.api.admission import Admission
from disagg.api.answers import Answers, Sink
from disagg.api.errors import ApiError, bad, retry_after
from disagg.api.exchange import Exchange
from disagg.api.generation_request import EngineRequest, GenerationRequest
from disagg.api.metrics import Metrics, router_counters
from disagg.api.model import ServedModel
from disagg.api.pace import Pace
from disagg.api.quantiles import RollingQuantiles
from disagg.api.recent import Recent, Track
from disagg.api.tracing import RequestTrace
from disagg.api.workers import MetricReport, Share, WorkerReport
from disagg.core.config.read import ApiConfig
from disagg.core.errors import AbortedError, DisaggError
from disagg.core.profile.types import ProfileRequest, TraceSummary
from disagg.core.status import GroupStatus, ServiceStatus
from disagg.core.types import GroupInfo
from disagg.router.answers import Emit, Output, RouterRequest
from disagg.router.session_driver import RELEASE_TIMEOUT_S

log = structlog.get_logger(__name__)


class Generator(Protocol):
    """The methods of `disagg.router.router.Router` that the API uses."""

    recoveries: Counter[str]
    """Recoveries of requests since the start, by `disagg.router.session_events.Loss`."""

    local_prefills: Counter[str]
    """Prompts that decode groups got to compute since the start: by reason."""

    @property
    def moved_prompts(self) -> Counter[str]:
        """How many prompts left a decode group for a prefill group since the start: `sooner`."""

    @property
    def suspicions(self) -> Counter[str]:
        """How often each group was suspected since the start, by the group's name."""

    def missing(self) -> list[str]:
        """Returns the roles (`prefill`, `decode`; `colocated`) without a living group."""

    def refused_roles(self) -> list[str]:
        """Returns the roles that have had no living group for too long. While such a role exists, requests are
        refused instead of queued."""

    def max_sequences(self, prompt_tokens: int, max_tokens: int) -> int:
        """Returns how many answers or beams of one request of these lengths a decode group can compute at once."""

    def groups(self) -> tuple[GroupStatus, ...]:
        """Returns the latest status of each group."""

    def draining(self) -> tuple[str, ...]:
        """Returns the names of draining groups."""

    def suspected(self) -> tuple[str, ...]:
        """Returns the names of groups that are silent but not lost."""

    async def run(self, request: RouterRequest, emit: Emit) -> None:
        """Emits the answers; a cancellation aborts the request."""

    def profile(self, request: ProfileRequest) -> AsyncGenerator[int | TraceSummary, None]:
        """Records some steps of a rank: yields numbers of recorded steps, then the summary."""


class Service:
    """Runs generation requests for the routes, and reports the server's status. All methods run on one event loop."""

    def __init__(
        self, generator: Generator, model: ServedModel, config: ApiConfig, share: Share | None = None
    ) -> None:
        """`config`: limits of the whole server. `share`: this worker's part of the limits; None if the server has one
        worker."""
        self._share = share or Share()
        config = self._share.limits(config)
        self.model, self.config, self.metrics = model, config, Metrics()
        self._generator = generator
        pace = Pace(config.max_running, config.max_queue_s, config.max_slowdown)
        self._admission = Admission(config.max_running, config.max_queued, self.metrics, pace)
        counts = generator.recoveries, generator.suspicions, generator.local_prefills, generator.moved_prompts
        for counter in router_counters(*counts):
            self.metrics.registry.register(counter)
        self._recent, self._ttft, self._itl = Recent(), RollingQuantiles(), RollingQuantiles()
        self._began_s = time.monotonic()
        self._tasks: dict[asyncio.Task[None], Answers] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.stopping = False
        """True during shutdown: new requests are refused, running ones continue."""

    def follow_groups(self, groups: Sequence[GroupInfo]) -> None:
        """Derives the limits of admission and context length from `groups`, the groups that accept new requests.

        Without groups of a role, the previous limits of this role stay; the server then refuses all requests anyway.
        """
        max_running = self._running_limit(groups) or self._admission.max_running
        context_tokens = min((group.context_tokens for group in groups), default=self.model.context_tokens)
        if (max_running, context_tokens) != (self._admission.max_running, self.model.context_tokens):
            log.info("limits", max_running=max_running, context_tokens=context_tokens)
            self._admission.resize(max_running)
            self.model.context_tokens = context_tokens

    def _running_limit(self, groups: Sequence[GroupInfo]) -> int:
        if self.config.max_running:
            return self.config.max_running
        total = self.config.running_limit(groups)
        return max(1, self._share.of(total)) if total else 0

    def why_not_ready(self) -> str | None:
        """Returns the reason why the server cannot serve requests now; None if the server is ready."""
        if self.stopping:
            return "the server is stopping"
        missing = self._generator.missing()
        return f"no {' and no '.join(missing)} group is up" if missing else None

    def _why_refused(self) -> str | None:
        return self.why_not_ready() if self.stopping or self._generator.refused_roles() else None

    def check_ready(self) -> None:
        """Raises a 503 if requests are refused now. While a group is being replaced, requests wait instead."""
        if why := self._why_refused():
            raise ApiError(503, f"{why}: try again later", code="unavailable", headers=retry_after(1))

    def status(self) -> ServiceStatus:
        """Returns the status of this router and its groups."""
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
            max_running=self._admission.max_running,
            max_queued=self.config.max_queued,
            prompt_tokens_total=int(total(metrics.prompt_tokens)),
            generated_tokens_total=int(total(metrics.generated_tokens)),
            errors_total=int(total(metrics.errors)),
            aborts_total=int(total(metrics.aborts)),
            refused_total=int(total(metrics.requests, outcome="busy")),
            recoveries_total=sum(self._generator.recoveries.values()),
            moved_prompts_total=sum(self._generator.moved_prompts.values()),
            ttft_p50_s=ttft_p50_s,
            ttft_p99_s=ttft_p99_s,
            itl_p50_s=itl_p50_s,
            itl_p99_s=itl_p99_s,
            groups=self._generator.groups(),
            draining=self._generator.draining(),
            suspected=self._generator.suspected(),
            recent=self._recent.statuses(),
        )

    def report(self) -> WorkerReport:
        """Returns status and metrics of this worker, which the server's other workers combine with their own."""
        return WorkerReport(
            self._share.worker,
            self.status(),
            self._ttft.counts(),
            self._itl.counts(),
            [MetricReport.of(family) for family in self.metrics.registry.collect()],
        )

    def profile(self, request: ProfileRequest) -> AsyncGenerator[int | TraceSummary, None]:
        """Records some steps of a rank; see `Generator.profile`."""
        return self._generator.profile(request)

    def check_capacity(self) -> None:
        """Called before a body is read. Raises a 503 if requests are refused, `BusyError` if the server is full."""
        self.check_ready()
        self._admission.check_capacity()

    def start(self, request: GenerationRequest, exchange: Exchange, sink: Sink) -> Answers:
        """Starts all answers to a request, with their outputs passed to `sink`. Raises `ApiError`, or `BusyError` if
        the server is full."""
        self.check_ready()
        parts = request.parts(self._generator.max_sequences)
        if request.sequences > self._admission.limit:
            raise bad(
                "n",
                f"the request has {request.sequences} answers; the limit is {self._admission.limit} "
                f"(api.max_running + api.max_queued)",
            )
        self._admission.enter(request.sequences)
        answers = Answers(sink)
        alone = len(parts) == 1
        for part in parts:
            track = self._recent.begin(f"{exchange.key}-{part.first}", exchange.arrived_s)
            track.report.prompt_tokens = len(part.prompt)
            work = self._answer(answers, part, alone, request, track, exchange)
            task = answers.start(part.answers, work)
            self._tasks[task] = answers
            self._idle.clear()
            # A callback, because a task that is cancelled before its first step runs no `finally`.
            task.add_done_callback(partial(self._done, part.sampling.sequences, track, exchange.trace))
        return answers

    async def drain(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for running answers, then aborts the others. Returns True if none was aborted.

        The caller sets `stopping` first.
        """
        if await self._wait_idle(timeout_s):
            return True
        for answers in set(self._tasks.values()):
            answers.abort(AbortedError("the server is stopping: retry later or on another server"))
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
        self,
        answers: Answers,
        part: EngineRequest,
        alone: bool,
        request: GenerationRequest,
        track: Track,
        exchange: Exchange,
    ) -> None:
        report, metrics = track.report, self.metrics
        try:
            async with self._admission.turn(exchange.deadline_s, alone, request.priority):
                track.turn_s, inside = time.monotonic(), self._admission.inside
                try:
                    await self._session(answers, part, request, track, exchange)
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
        self,
        answers: Answers,
        part: EngineRequest,
        request: GenerationRequest,
        track: Track,
        exchange: Exchange,
    ) -> None:
        meter = self._meter(track, part.sampling.n)
        self.metrics.prompt_tokens.inc(len(part.prompt))

        def emit(output: Output) -> None:
            if output.index == 0:
                output = msgspec.structs.replace(output, cached_tokens=track.report.cached_tokens)
            answers.put(part.first + output.answer, output)
            meter(output)  # last: the client waits for the output

        routed = RouterRequest(
            track.id,
            part.prompt,
            part.sampling,
            max(0.0, exchange.deadline_s - time.monotonic()),
            request.decode or self.model.decode,
            track.report,
            request.cache_salt,
            request.session or exchange.session,
            request.priority,
        )
        await self._generator.run(routed, emit)

    def _meter(self, track: Track, answers: int) -> Callable[[Output], None]:
        """Returns a callback that counts and times the outputs of `answers` answers computed together."""
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
