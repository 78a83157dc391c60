"""Performs a run of `disagg bench serve`, from its settings to its report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx
import uvloop

from disagg.bench.common.report import Label
from disagg.bench.serve.arrivals import Arrivals
from disagg.bench.serve.client import ServeClient
from disagg.bench.serve.load import Load, LoadProgress, RunClock
from disagg.bench.serve.report import Report
from disagg.bench.serve.summary import Slo, summarize
from disagg.bench.serve.workload import Workload
from disagg.core.errors import ConfigError


@dataclass(frozen=True)
class ServeBench:
    """Settings of a run of `disagg bench serve`."""

    url: str
    api_key: str | None
    workload: Workload
    """The workload; an empty model name selects the first model of the server."""
    arrivals: Arrivals | None
    """Arrivals of an open loop; None: closed loop."""
    concurrency: int | None
    """Number of requests that run at once in a closed loop; None in an open loop."""
    requests: int | None
    duration_s: float | None
    """Duration of sending; None if the number of requests is given instead."""
    slo: Slo
    timeout_s: float
    """Time limit for one answer."""
    settings: dict[str, Label | None]
    """The settings as labels, for the report."""

    def due_s(self) -> list[float] | None:
        """Returns the send times; None in a closed loop. Raises `ConfigError` when there would be none."""
        if self.arrivals is None:
            return None
        if self.requests is not None:
            return self.arrivals.first(self.requests)
        assert self.duration_s is not None, "either requests or duration_s is given"
        due_s = self.arrivals.until(self.duration_s)
        if not due_s:
            raise ConfigError(
                f"no request arrives within --duration-s {self.duration_s:g} at --rate {self.arrivals.rate:g}: "
                "give a longer time, a higher rate or another --seed"
            )
        return due_s


def check_url(url: str) -> str:
    """Returns `url` without a final slash. Raises `ConfigError` unless it is an HTTP URL without a password."""
    try:
        parts = httpx.URL(url)
        usable = (
            parts.scheme in ("http", "https")
            and parts.host
            and not (parts.userinfo or parts.query or parts.fragment)
        )
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise ConfigError(f"--url {url}: give the API's base URL, such as http://127.0.0.1:8000/v1")
    return url.rstrip("/")


def run(
    bench: ServeBench,
    report_progress: Callable[[LoadProgress, int | None], None] = lambda counts, total: None,
) -> Report:
    """Sends one probe request, then the load. After each request, `report_progress` is called with the counts so far
    and the total number of requests (None if a duration limits the run).

    Raises `DisaggError` when the server cannot be reached, or answers the probe with neither a valid answer
    nor 429.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(bench, report_progress))


async def _run(bench: ServeBench, report_progress: Callable[[LoadProgress, int | None], None]) -> Report:
    due_s = bench.due_s()
    total = len(due_s) if due_s is not None else bench.requests
    clock, workload = RunClock(), bench.workload
    async with ServeClient(bench.url, bench.api_key, workload.chat, bench.timeout_s, clock) as client:
        workload = replace(workload, model=workload.model or await client.model())
        await client.probe(workload.probe())
        load = Load(workload.request, client.send, clock, lambda counts: report_progress(counts, total))
        clock.start()
        if due_s is not None:
            rows = await load.open_loop(due_s)
        else:
            assert bench.concurrency is not None, "either arrivals or concurrency is given"
            rows = await load.closed_loop(bench.concurrency, bench.requests, bench.duration_s)
    settings = bench.settings | {"model": workload.model}
    return Report(settings, bench.slo, summarize(rows, bench.slo, load.most_running), rows)
