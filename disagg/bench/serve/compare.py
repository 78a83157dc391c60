"""Runs the same load on a disaggregated (split) system, then on a colocated system with the same number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import msgspec

from disagg.bench.serve.bench import ServeBench, run
from disagg.bench.serve.compare_report import SYSTEMS, Compared, Systems, SystemsComparison
from disagg.bench.serve.equal import Answers, compare_answers, request_answers
from disagg.bench.serve.judge import judge
from disagg.bench.serve.load import LoadProgress
from disagg.bench.serve.report import Report
from disagg.core.config.read import ColocatedConfig, Config
from disagg.core.errors import ConfigError, DisaggError

WARM_SEED, CHECK_SEED = 1 << 20, 1 << 21
"""Offsets of the seed for warm-up and comparison, so that neither shares a prompt with the measurement."""
WARM_REQUESTS = 4
"""Warm-up requests per rank."""

Serve = Callable[[Config, float], AbstractContextManager[str]]
"""Context manager `serve(config, request_timeout_s)`: runs a server for the duration of the block, and yields its
URL."""
ReportProgress = Callable[[str, LoadProgress | None, int | None], None]
"""Callback `report_progress(phase, counts, total)`; `counts` and `total` are None in a phase without progress."""


@dataclass(frozen=True)
class CompareBench:
    """Settings of a comparison."""

    systems: Systems
    loads: tuple[ServeBench, ...]
    """The loads that run on each system, in this order. Their `url` is ignored."""
    check_equal: bool
    """Whether greedy answers are compared, token by token."""


def both_systems(config: Config, colocated_tp: int | None = None) -> Systems:
    """Returns the configured split system, and a colocated system with the same number of ranks.

    Each colocated group has `colocated_tp` ranks, by default as many as a decode group. The other settings are copied
    from the decode groups, but `chunk_tokens` from the prefill groups; explicit settings of `colocated` take
    precedence. Raises `ConfigError` when the ranks cannot be divided into whole groups.
    """
    for name, group in (("prefill", config.prefill), ("decode", config.decode)):
        if group.tp is None:
            raise ConfigError(f"--compare needs --{name}-tp, which determines both systems' number of ranks")
    prefill, decode = config.prefill, config.decode
    ranks = prefill.ranks * prefill.groups + decode.ranks * decode.groups
    tp = colocated_tp or decode.ranks
    if ranks % tp:
        sizes = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise ConfigError(
            f"{ranks} ranks (prefill {prefill.groups} x {prefill.ranks}, decode {decode.groups} x {decode.ranks}) do "
            f"not make colocated groups of {tp}: choose --colocated-tp out of {sizes}"
        )
    change = msgspec.structs.replace
    like = {name: getattr(decode, name) for name in ColocatedConfig.__struct_fields__}
    like |= {"chunk_tokens": prefill.chunk_tokens, **_set(config.colocated), "tp": tp, "groups": ranks // tp}
    cluster = change(config.cluster, mode="colocated")
    return {
        "split": change(config, cluster=change(config.cluster, mode="split")),
        "colocated": change(config, cluster=cluster, colocated=ColocatedConfig(**like)),
    }


def _set(group: ColocatedConfig) -> dict[str, object]:
    default = msgspec.structs.asdict(ColocatedConfig())
    return {name: value for name, value in msgspec.structs.asdict(group).items() if value != default[name]}


def compare(bench: CompareBench, serve: Serve, report_progress: ReportProgress) -> SystemsComparison:
    """Starts each system, warms it up, runs the loads, and stops the system.

    Raises `DisaggError` when a system cannot be started, or fails a warm-up request.
    """
    found: dict[str, list[Report]] = {}
    answers: dict[str, Answers] = {}
    for name in SYSTEMS:
        report_progress(f"{name}: starting", None, None)
        with serve(bench.systems[name], bench.loads[0].timeout_s) as url:
            loads = [replace(load, url=url) for load in bench.loads]
            report_progress(f"{name}: warming up", None, None)
            _warm_up(loads[0], sum(kind.ranks * kind.groups for kind in bench.systems[name].kinds.values()))
            if bench.check_equal:
                answers[name] = request_answers(_with_seed(loads[0], CHECK_SEED))
            found[name] = [_measure(name, load, report_progress) for load in loads]
            report_progress(f"{name}: stopping", None, None)
    runs = [
        Compared(load.arrivals.rate if load.arrivals else None, {name: found[name][i] for name in SYSTEMS})
        for i, load in enumerate(bench.loads)
    ]
    equal = None
    if bench.check_equal:
        both = [answers[name] for name in SYSTEMS]
        report_progress("comparing answers", None, None)
        equal = judge(bench.systems, both, compare_answers(*both))
    return SystemsComparison(bench.systems, bench.loads[0].slo, runs, equal)


def _measure(name: str, load: ServeBench, report_progress: ReportProgress) -> Report:
    at = f" at {load.arrivals.rate:g}/s" if load.arrivals else ""
    return run(load, lambda counts, total: report_progress(f"{name}{at}", counts, total))


def _warm_up(load: ServeBench, ranks: int) -> None:
    """Sends all warm-up requests at once, so that the router distributes them over all groups of the system."""
    count = WARM_REQUESTS * ranks
    warm = replace(
        _with_seed(load, WARM_SEED), arrivals=None, concurrency=count, requests=count, duration_s=None
    )
    report = run(warm)
    wrong: Sequence[str] = [row.problem for row in report.rows if row.kind in report.summary.errors]
    if wrong:
        raise DisaggError(f"{len(wrong)} of {count} warm-up requests failed; the first: {wrong[0]}")


def _with_seed(load: ServeBench, added: int) -> ServeBench:
    return replace(load, workload=replace(load.workload, seed=load.workload.seed + added))
