"""The same load on two systems with the same number of ranks, one after the other: split, and colocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import msgspec

from disagg.bench.serve.bench import ServeBench, run
from disagg.bench.serve.compare_report import SYSTEMS, Compared, Comparison, Systems
from disagg.bench.serve.equal import Answers, ask_answers, compare_answers
from disagg.bench.serve.judge import judge
from disagg.bench.serve.load import Counts
from disagg.bench.serve.report import Report
from disagg.core.config import Config, GroupConfig
from disagg.core.errors import ConfigError, DisaggError

WARM_SEED, CHECK_SEED = 1 << 20, 1 << 21
"""Added to the seed: what warms up or is compared shares no prompt with what is measured."""
WARM_REQUESTS = 4
"""For each rank."""

Serve = Callable[[Config, float], AbstractContextManager[str]]
"""`serve(config, request_timeout_s)`: a server for as long as the block lasts; its URL."""
Tell = Callable[[str, Counts | None, int | None], None]
"""`tell(what, counts, total)`: what happens now, and how far it is."""


@dataclass(frozen=True)
class CompareBench:
    """What to do."""

    systems: Systems
    loads: tuple[ServeBench, ...]
    """In this order on each system. Their `url` is void."""
    check_equal: bool
    """Whether greedy answers are compared, token by token."""


def both_systems(config: Config, colocated_tp: int | None = None) -> Systems:
    """The split system as configured, and a colocated one of as many ranks.

    Its groups are of `colocated_tp` ranks, by default as many as a decode group has; they are like the decode groups
    (pool, batch, pages), and `chunk_tokens` is that of the prefill groups; what is set of `colocated` wins. Raises
    `ConfigError` when the ranks do not make whole groups.
    """
    for name, group in (("prefill", config.prefill), ("decode", config.decode)):
        if group.tp is None:
            raise ConfigError(f"--compare needs --{name}-tp: how many ranks both systems have depends on it")
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
    like = change(decode, chunk_tokens=prefill.chunk_tokens)
    group = change(like, **{**_set(config.colocated), "tp": tp, "groups": ranks // tp})
    cluster = change(config.cluster, mode="colocated")
    return {
        "split": change(config, cluster=change(config.cluster, mode="split")),
        "colocated": change(config, cluster=cluster, colocated=group),
    }


def _set(group: GroupConfig) -> dict[str, object]:
    default = msgspec.structs.asdict(GroupConfig())
    return {name: value for name, value in msgspec.structs.asdict(group).items() if value != default[name]}


def compare(bench: CompareBench, serve: Serve, tell: Tell) -> Comparison:
    """Starts each system, warms it up, puts the loads on it, stops it.

    Raises `DisaggError` when one cannot be started, or answers wrongly before anything is measured.
    """
    found: dict[str, list[Report]] = {}
    answers: dict[str, Answers] = {}
    for name in SYSTEMS:
        tell(f"{name}: starting", None, None)
        with serve(bench.systems[name], bench.loads[0].timeout_s) as url:
            loads = [replace(load, url=url) for load in bench.loads]
            tell(f"{name}: warming up", None, None)
            _warm_up(loads[0], sum(kind.ranks * kind.groups for kind in bench.systems[name].kinds.values()))
            if bench.check_equal:
                answers[name] = ask_answers(_with_seed(loads[0], CHECK_SEED))
            found[name] = [_measure(name, load, tell) for load in loads]
            tell(f"{name}: stopping", None, None)
    runs = [
        Compared(load.arrivals.rate if load.arrivals else None, {name: found[name][i] for name in SYSTEMS})
        for i, load in enumerate(bench.loads)
    ]
    equal = None
    if bench.check_equal:
        both = [answers[name] for name in SYSTEMS]
        tell("comparing answers", None, None)
        equal = judge(bench.systems, both, compare_answers(*both))
    return Comparison(bench.systems, bench.loads[0].slo, runs, equal)


def _measure(name: str, load: ServeBench, tell: Tell) -> Report:
    at = f" at {load.arrivals.rate:g}/s" if load.arrivals else ""
    return run(load, lambda counts, total: tell(f"{name}{at}", counts, total))


def _warm_up(load: ServeBench, ranks: int) -> None:
    """All at once, so that every group of the system gets some."""
    count = WARM_REQUESTS * ranks
    warm = replace(
        _with_seed(load, WARM_SEED), arrivals=None, concurrency=count, requests=count, duration_s=None
    )
    report = run(warm)
    wrong: Sequence[str] = [row.problem for row in report.rows if row.kind in report.summary.errors]
    if wrong:
        raise DisaggError(f"{len(wrong)} of {count} requests to warm up failed: {wrong[0]}")


def _with_seed(load: ServeBench, added: int) -> ServeBench:
    return replace(load, workload=replace(load.workload, seed=load.workload.seed + added))
