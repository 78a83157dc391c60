"""Several workers of one server: shares of limits, reports over unix sockets, common status and metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api.metrics import Metrics, exposition
from disagg.api.recent import KEPT
from disagg.api.workers import (
    MetricReport,
    Share,
    Siblings,
    WorkerReport,
    merged_groups,
    merged_metrics,
    merged_status,
)
from disagg.core.config.read import ApiConfig
from disagg.core.errors import ConfigError
from disagg.core.status import GroupStatus, RankStatus, RecentAnswer, ServiceStatus

RANKS = (RankStatus("decode r0", 0),)


def report(worker: int, tokens: int, **fields: Any) -> WorkerReport:
    """The report of a worker that has generated `tokens` tokens."""
    metrics = Metrics()
    metrics.generated_tokens.inc(tokens)
    metrics.requests.labels("ok").inc()
    metrics.ttft.observe(0.2)
    status = ServiceStatus(
        model="m",
        version="1",
        unix_s=0.0,
        uptime_s=float(worker),
        ready="ready",
        requests_running=worker,
        requests_queued=0,
        max_running=3,
        max_queued=4,
        prompt_tokens_total=1,
        generated_tokens_total=tokens,
        errors_total=0,
        aborts_total=0,
        refused_total=0,
        **fields,
    )
    found = [MetricReport.of(family) for family in metrics.registry.collect()]
    return WorkerReport(worker, status, {-10 * worker: 5}, {}, found)


@given(total=st.integers(0, 5000), workers=st.integers(1, 40))
def test_the_parts_add_up_and_differ_by_one_at_most(total: int, workers: int) -> None:
    parts = [Share(worker, workers).of(total) for worker in range(workers)]
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


def test_each_limit_is_shared() -> None:
    config = ApiConfig(
        workers=2, max_running=5, max_queued=7, max_connections=9, max_connections_per_address=3
    )
    parts = [Share(worker, 2).limits(config) for worker in range(2)]
    found = [
        (part.max_running, part.max_queued, part.max_connections, part.max_connections_per_address)
        for part in parts
    ]
    assert found == [(3, 4, 5, 2), (2, 3, 4, 1)]
    for limit in ("max_running", "max_connections", "max_connections_per_address"):
        with pytest.raises(ConfigError, match=rf"{limit} = 1.*at least api.workers \(2\)"):
            ApiConfig(workers=2, **{limit: 1})


def test_totals_are_sums_and_groups_are_the_newest() -> None:
    old, new = (GroupStatus("decode", "decode", RANKS, steps_total=steps) for steps in (3, 4))
    answers = [RecentAnswer(str(moment), float(moment)) for moment in range(KEPT)]
    first = report(0, 10, groups=(old,), recent=tuple(reversed(answers[::2])), suspected=("decode",))
    groups = (new, GroupStatus("gone", "decode"))
    second = report(1, 5, groups=groups, recent=tuple(reversed(answers)), suspected=("a", "decode"))
    status = merged_status([first, second])
    assert (status.workers, status.generated_tokens_total, status.requests_running) == (2, 15, 1)
    assert (status.max_running, status.max_queued, status.uptime_s) == (6, 8, 1.0)
    assert status.ttft_p50_s < status.ttft_p99_s == pytest.approx(1.0), "quantiles of both, no sums"
    assert merged_groups([first, second]) == status.groups == (new,)
    assert status.suspected == ("a", "decode")
    assert len(status.recent) == KEPT
    assert [answer.id for answer in status.recent[:3]] == ["63", "62", "62"]


def test_a_worker_labels_its_series() -> None:
    text = exposition(merged_metrics([report(1, 5), report(0, 10)], labelled=True)).decode()
    assert 'disagg_generated_tokens_total{worker="0"} 10.0' in text
    assert 'disagg_generated_tokens_total{worker="1"} 5.0' in text
    assert 'disagg_requests_total{outcome="ok",worker="1"} 1.0' in text
    assert 'disagg_time_to_first_token_seconds_bucket{le="0.25",worker="0"} 1.0' in text
    assert text.count("# TYPE disagg_generated_tokens_total counter") == 1
    alone = exposition(merged_metrics([report(0, 10)], labelled=False)).decode()
    assert "worker" not in alone
    assert "disagg_generated_tokens_total 10.0" in alone


def test_workers_read_the_reports_of_those_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.api.workers.REPLY_TIMEOUT_S", 0.2)
    workers = [Siblings(Share(worker, 4), tmp_path) for worker in range(4)]
    (tmp_path / "1").touch()  # left by a worker that was killed

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> None:
        async with (
            workers[0].listening(lambda: report(0, 10)),
            workers[1].listening(lambda: report(1, 5)),
            await asyncio.start_unix_server(silent, tmp_path / "2"),
        ):
            [found] = await workers[0].reports()
            assert (found.worker, found.status.generated_tokens_total, found.ttft) == (1, 5, {-10: 5})
            assert [one.worker for one in await workers[3].reports()] == [0, 1]

    asyncio.run(main())


def test_a_single_server_has_no_siblings() -> None:
    async def main() -> None:
        alone = Siblings(Share())
        async with alone.listening(lambda: report(0, 1)):
            assert await alone.reports() == []

    asyncio.run(main())
