"""Several server processes (workers) on one port: their shares of the limits, and their combined status and metrics.

Each worker sends its `WorkerReport` to the other workers over a unix socket in a private folder. Therefore any worker
can answer `/status` and `/metrics` for all workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client.metrics_core import Metric

from disagg.api.quantiles import quantiles
from disagg.api.recent import KEPT
from disagg.core.config.read import ApiConfig
from disagg.core.status import GroupStatus, ServiceStatus

REPLY_TIMEOUT_S = 1.0
"""Seconds to wait for another worker's report; status and metrics omit workers that do not reply in time."""
LABEL = "worker"
"""Label that distinguishes the workers in router metrics. Sums over the workers would fall when a worker restarts."""
_SUMS = (
    *("requests_running", "requests_queued", "max_running", "max_queued", "prompt_tokens_total"),
    *("generated_tokens_total", "errors_total", "aborts_total", "refused_total", "recoveries_total"),
    "moved_prompts_total",
)


class Share(NamedTuple):
    """One worker's share of the limits that all `workers` have together."""

    worker: int = 0
    workers: int = 1

    def of(self, total: int) -> int:
        """Returns the worker's part of `total`. The parts of all workers add up to `total`."""
        return total // self.workers + (self.worker < total % self.workers)

    def limits(self, config: ApiConfig) -> ApiConfig:
        """Returns `config` with the worker's part of each limit."""
        return msgspec.structs.replace(
            config,
            workers=1,
            max_running=self.of(config.max_running),
            max_queued=self.of(config.max_queued),
            max_connections=self.of(config.max_connections),
            max_connections_per_address=self.of(config.max_connections_per_address),
        )


class MetricReport(msgspec.Struct, frozen=True, array_like=True):
    """One metric family."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]
    """Name, labels and value of each sample."""

    @staticmethod
    def of(family: Metric) -> MetricReport:
        """Returns the report of a family."""
        samples = [(sample.name, sample.labels, sample.value) for sample in family.samples]
        return MetricReport(family.name, family.documentation, family.type, samples)


class WorkerReport(msgspec.Struct, frozen=True):
    """Status and metrics of one worker."""

    worker: int
    status: ServiceStatus
    ttft: dict[int, int]
    """Number of answers of the last minute in each bucket of time to first token; see `RollingQuantiles`."""
    itl: dict[int, int]
    metrics: list[MetricReport]
    """Metrics of the router, without those of its groups."""


def merged_status(reports: Sequence[WorkerReport]) -> ServiceStatus:
    """Merges the reports of all workers into one status; fields that cannot be merged come from the first report."""
    statuses = [report.status for report in reports]
    if len(statuses) == 1:
        return statuses[0]
    newest_first = heapq.merge(
        *(status.recent for status in statuses), key=lambda answer: answer.arrived_unix_s, reverse=True
    )
    ttft_p50_s, ttft_p99_s = _quantiles([report.ttft for report in reports])
    itl_p50_s, itl_p99_s = _quantiles([report.itl for report in reports])
    return msgspec.structs.replace(
        statuses[0],
        workers=len(reports),
        uptime_s=max(status.uptime_s for status in statuses),
        ttft_p50_s=ttft_p50_s,
        ttft_p99_s=ttft_p99_s,
        itl_p50_s=itl_p50_s,
        itl_p99_s=itl_p99_s,
        groups=merged_groups(reports),
        suspected=tuple(sorted({name for status in statuses for name in status.suspected})),
        recent=tuple(islice(newest_first, KEPT)),
        **{field: sum(getattr(status, field) for status in statuses) for field in _SUMS},
    )


def merged_groups(reports: Sequence[WorkerReport]) -> tuple[GroupStatus, ...]:
    """Returns the newest status of each group in the first report. The newest status may come from any report, so
    that totals never decrease between scrapes."""
    newest: dict[str, GroupStatus] = {}
    for report in reports:
        for group in report.status.groups:
            newest[group.name] = max(newest.get(group.name, group), group, key=_progress)
    return tuple(newest[group.name] for group in reports[0].status.groups)


def merged_metrics(reports: Sequence[WorkerReport], *, labelled: bool) -> Iterator[Metric]:
    """Yields the families of all workers. If `labelled`, the label `worker` distinguishes their samples."""
    families: dict[str, Metric] = {}
    for report in sorted(reports, key=lambda report: report.worker):
        for found in report.metrics:
            family = families.setdefault(found.name, Metric(found.name, found.help, found.kind))
            for name, labels, value in found.samples:
                which = {LABEL: str(report.worker)} if labelled else {}
                family.add_sample(name, {**which, **labels}, value)
    yield from families.values()


class Siblings:
    """The other workers of a server. Without a folder, the server has one worker."""

    def __init__(self, share: Share, folder: Path | None = None) -> None:
        """`folder`: private folder with the workers' sockets."""
        self.share, self._folder = share, folder

    @contextlib.asynccontextmanager
    async def listening(self, report: Callable[[], WorkerReport]) -> AsyncIterator[None]:
        """Within the block, sends this worker's report to each other worker that connects."""
        if self._folder is None:
            yield
            return

        async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError), contextlib.closing(writer):
                writer.write(msgspec.msgpack.encode(report()))
                await writer.drain()

        path = self._path(self.share.worker)
        path.unlink(missing_ok=True)  # left by a worker that was killed
        async with await asyncio.start_unix_server(send, path):
            yield

    async def reports(self) -> list[WorkerReport]:
        """Returns the reports of the other workers, without workers that do not reply in time."""
        others = [one for one in range(self.share.workers) if one != self.share.worker]
        found = await asyncio.gather(*(self._read(self._path(one)) for one in others))
        return [report for report in found if report is not None]

    async def _read(self, path: Path) -> WorkerReport | None:
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(path)
                with contextlib.closing(writer):
                    return msgspec.msgpack.decode(await reader.read(), type=WorkerReport)
        except (OSError, TimeoutError, msgspec.MsgspecError):  # the worker starts, ends or is blocked
            return None

    def _path(self, worker: int) -> Path:
        assert self._folder is not None, "without a folder there is one worker"
        return self._folder / str(worker)


def _progress(group: GroupStatus) -> tuple[int, int]:
    return len(group.ranks), group.steps_total


def _quantiles(counts: Sequence[dict[int, int]]) -> list[float]:
    total: Counter[int] = Counter()
    for found in counts:
        total.update(found)
    return quantiles(total, (0.5, 0.99))
