"""A run of `disagg bench serve`, from what was asked to the report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx

from disagg.bench.report import Label
from disagg.bench.serve.arrivals import Arrivals
from disagg.bench.serve.client import Client
from disagg.bench.serve.load import Clock, Counts, Load
from disagg.bench.serve.report import Report
from disagg.bench.serve.summary import Slo, summarize
from disagg.bench.serve.workload import Workload
from disagg.core.errors import ConfigError


@dataclass(frozen=True)
class ServeBench:
    """What to do. `check` first."""

    url: str
    api_key: str | None
    workload: Workload
    """Its model may be empty: the first one that the server names."""
    arrivals: Arrivals | None
    """Of an open loop; None: closed."""
    concurrency: int | None
    """Of a closed loop."""
    requests: int | None
    duration_s: float | None
    """How long requests are sent; one of the two is given."""
    slo: Slo
    timeout_s: float
    """Of one answer."""
    asked: dict[str, Label | None]
    """The same in words, for the report."""

    def due_s(self) -> list[float] | None:
        """When requests are sent; None in a closed loop. Raises `ConfigError` when none would be."""
        if self.arrivals is None:
            return None
        if self.requests is not None:
            return self.arrivals.first(self.requests)
        assert self.duration_s is not None, "one of the two is given"
        due_s = self.arrivals.until(self.duration_s)
        if not due_s:
            raise ConfigError(
                f"no request arrives within --duration-s {self.duration_s:g} at --rate {self.arrivals.rate:g}: "
                "give a longer time, a higher rate or another --seed"
            )
        return due_s


def check_url(url: str) -> str:
    """`url` without a slash at its end. Raises `ConfigError` unless it is one of HTTP, and names no password."""
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
        raise ConfigError(f"--url {url}: give where the API begins, such as http://127.0.0.1:8000/v1")
    return url.rstrip("/")


def run(bench: ServeBench, tell: Callable[[Counts, int | None], None] = lambda counts, total: None) -> Report:
    """One request that does not count, then the load. `tell` hears of each request that ends, and of how many.

    Raises `DisaggError` when the server cannot be reached or answers the first request with anything but a right
    answer or 429: it would answer the others no better.
    """
    return asyncio.run(_run(bench, tell))


async def _run(bench: ServeBench, tell: Callable[[Counts, int | None], None]) -> Report:
    due_s = bench.due_s()
    total = len(due_s) if due_s is not None else bench.requests
    clock, workload = Clock(), bench.workload
    async with Client(bench.url, bench.api_key, workload.chat, bench.timeout_s, clock) as client:
        workload = replace(workload, model=workload.model or await client.model())
        await client.probe(workload.probe())
        load = Load(workload.request, client.ask, clock, lambda counts: tell(counts, total))
        clock.start()
        if due_s is not None:
            rows = await load.open_loop(due_s)
        else:
            assert bench.concurrency is not None, "one of the two loops is asked for"
            rows = await load.closed_loop(bench.concurrency, bench.requests, bench.duration_s)
    asked = bench.asked | {"model": workload.model}
    return Report(asked, bench.slo, summarize(rows, bench.slo, load.most_running), rows)
