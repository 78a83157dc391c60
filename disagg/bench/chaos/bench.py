"""Runs a chaos bench on a cluster that it starts, or on the groups of a `disagg launch`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import structlog
import uvloop

from disagg.bench.chaos.joined import joined_system
from disagg.bench.chaos.report import ChaosReport, chaos_report
from disagg.bench.chaos.run import ChaosBench, ChaosResult, ReportLine, run_chaos
from disagg.bench.chaos.system import supervised_system
from disagg.bench.common.report import Label
from disagg.bench.serve.compare_report import words
from disagg.cluster.lifecycle import Cluster
from disagg.commands.local import local_cluster, with_model
from disagg.commands.signals import handlers_restored
from disagg.core.config.read import ClusterConfig, Config
from disagg.core.errors import DisaggError
from disagg.core.log import configure

log = structlog.get_logger(__name__)


class _NotPassed(Exception):  # noqa: N818 - no fault of this program
    """Raised inside the cluster's `with` block after a run that did not pass. A private Ray keeps the ranks' logs if
    the block ends with an exception."""

    def __init__(self, report: ChaosReport) -> None:
        super().__init__("the run did not pass")
        self.report = report


def chaos_config(config: Config, deterministic: bool | None, faults: int) -> Config:
    """Returns the configuration of the system under test.

    `deterministic`: None means true, also on a CPU. Without deterministic mode, rounding depends on the rest of the
    batch and can change a sampled token. If no model is configured, the small model of `with_model` is used, on the
    CPU unless a device is set. `cluster.restart` is true. Two settings change unless the user set them:
    `cluster.restart_backoff_s` becomes 0, and `cluster.restart_tries` grows by `faults`, because a fault soon after a
    restart counts as a failed try.
    """
    replace = msgspec.structs.replace
    if not (config.model.path or config.model.random_init):
        kinds = {"prefill": config.prefill, "decode": config.decode, "colocated": config.colocated}
        on_cpu = {
            role: replace(kind, device="cpu" if kind.device == "auto" else kind.device)
            for role, kind in kinds.items()
        }
        config = replace(config, **on_cpu)
    default, given = ClusterConfig(), config.cluster
    changed: dict[str, object] = {"restart": True}
    if given.restart_tries == default.restart_tries:
        changed["restart_tries"] = default.restart_tries + faults
    if given.restart_backoff_s == default.restart_backoff_s:
        changed["restart_backoff_s"] = 0.0
    model = replace(config.model, deterministic=deterministic is not False)
    return replace(config, model=model, cluster=replace(given, **changed))


def run_bench(
    config: Config, bench: ChaosBench, settings: Mapping[str, Label | None], report_line: ReportLine
) -> ChaosReport:
    """Starts the cluster of `config`, runs the bench and returns the report.

    Raises `DisaggError` when the cluster cannot start or fails during the quiet run.
    """
    configure(config.log)
    config = with_model(config, report_line)
    try:
        with handlers_restored(), local_cluster(config, report_line) as cluster:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(_run(cluster, bench, report_line))
            report = chaos_report(result, _settings(cluster.config) | dict(settings), _violation(cluster))
            report_line("stopping the cluster")
            if not report.passed:
                raise _NotPassed(report)
            return report
    except _NotPassed as found:
        return found.report


def run_joined_bench(
    config: Config,
    directory: str,
    bench: ChaosBench,
    settings: Mapping[str, Label | None],
    report_line: ReportLine,
) -> ChaosReport:
    """Runs the bench on the groups of a `disagg launch`, whose directory is at `directory`; returns the report.

    Raises the errors of `disagg.bench.chaos.joined.joined_system`. The ranks' invariants are not checked, because
    this process did not start the ranks.
    """
    configure(config.log)

    async def run() -> ChaosResult:
        needs_ranks = set(bench.schedule.kinds) != {"cut"}
        async with joined_system(config, directory, needs_ranks) as system:
            return await run_chaos(bench, system, report_line)

    with handlers_restored(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return chaos_report(runner.run(run()), {"join": directory} | dict(settings))


async def _run(cluster: Cluster, bench: ChaosBench, report_line: ReportLine) -> ChaosResult:
    async with supervised_system(cluster) as system:
        return await run_chaos(bench, system, report_line)


def _violation(cluster: Cluster) -> str:
    """Returns the error of the ranks' own checks; empty if all invariants hold."""
    try:
        cluster.check()
    except DisaggError as error:
        return str(error)
    return ""


def _settings(config: Config) -> dict[str, Label | None]:
    return {
        "model": config.model.path or config.model.random_init,
        "system": words(config),
        "deterministic": config.model.deterministic,
        "restart_backoff_s": config.cluster.restart_backoff_s,
        "peer_timeout_s": config.control.peer_timeout_s,
        "suspect_after_s": config.control.suspect_after_s,
    }
