"""The report of `disagg bench serve --compare`: a table of both systems at every load, and JSON with every
request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from disagg.bench.common.report import provenance, short
from disagg.bench.serve.equal import Equality
from disagg.bench.serve.report import Report, client, rounded
from disagg.bench.serve.summary import Slo, Spread, notes
from disagg.core.config.read import Config

if TYPE_CHECKING:
    from rich.table import Table

SYSTEMS = ("split", "colocated")
"""Names of the systems, in the order of their runs."""
Systems = dict[str, Config]
"""Configurations by the names of `SYSTEMS`."""
_COLUMNS = ("p50", "p90", "p99")


class Compared(msgspec.Struct, frozen=True):
    """Results of one load on both systems."""

    rate: float | None
    """Requests per second; None in a closed loop."""
    reports: dict[str, Report]


class SystemsComparison(msgspec.Struct, frozen=True):
    """Results of all loads on both systems."""

    systems: Systems
    slo: Slo
    runs: list[Compared]
    equal: Equality | None
    """Comparison of greedy answers; None if not requested."""

    @property
    def faultless(self) -> bool:
        """Whether every request was answered correctly, or refused with 429."""
        return all(report.faultless for run in self.runs for report in run.reports.values())

    @property
    def answered(self) -> bool:
        """Whether each system answered at least one request of each load correctly."""
        return all(report.summary.ok for run in self.runs for report in run.reports.values())


def words(config: Config) -> str:
    """Describes a system's groups, for example as `1 x prefill TP 2, 1 x decode TP 1`."""
    return ", ".join(f"{kind.groups} x {role} TP {kind.ranks}" for role, kind in config.kinds.items())


def comparison_table(found: SystemsComparison) -> Table:
    """Returns a table with two rows for each load; latencies in ms, rates per second."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title_justify="left")
    names = ["requests/s", "system", *(f"{kind} {p}" for kind in ("TTFT", "ITL") for p in _COLUMNS)]
    for name in (*names, "answered/s", "tokens/s", "goodput/s", "right"):
        table.add_column(name, justify="left" if name == "system" else "right", no_wrap=True)
    for run in found.runs:
        for number, (name, report) in enumerate(run.reports.items()):
            load = "" if number else "closed" if run.rate is None else f"{run.rate:g}"
            table.add_row(load, name, *_cells(report), end_section=number == len(run.reports) - 1)
    return table


def _cells(report: Report) -> Iterator[str]:
    summary = report.summary
    for spread in (summary.ttft_s, summary.itl_s):
        yield from _milliseconds(spread)
    for rate in (summary.request_rate, summary.output_token_rate, summary.goodput):
        yield short(rate)
    yield f"{summary.ok}/{summary.requests}"


def _milliseconds(spread: Spread | None) -> Iterator[str]:
    for name in _COLUMNS:
        yield "-" if spread is None else short(1e3 * getattr(spread, name))


def comparison_lines(found: SystemsComparison) -> Iterator[str]:
    """Yields the systems, failures, notes on the figures, and the comparison of answers."""
    for name, config in found.systems.items():
        yield f"{name}: {words(config)}"
    limits = {"TTFT": found.slo.ttft_s, "mean ITL": found.slo.itl_s}
    given = " and ".join(f"{name} <= {limit:g} s" for name, limit in limits.items() if limit is not None)
    yield f"goodput: answers with {given}" if given else "goodput: every correct answer, as no SLO is set"
    for run in found.runs:
        for name, report in run.reports.items():
            at = f"{name} at {run.rate:g}/s" if run.rate is not None else name
            for kind, count in report.summary.errors.items():
                first = next(row for row in report.rows if row.kind == kind)
                yield f"{at}: {kind}: {count}, the first is request {first.index}: {first.problem}"
            yield from (f"note: {at}: {note}" for note in notes(report.summary))
    if found.equal is not None:
        yield from equality_lines(found.equal)


def equality_lines(equal: Equality) -> Iterator[str]:
    """Yields the first difference of each pair of greedy answers, and whether rounding explains the differences."""
    if not equal.differences:
        yield f"all {equal.tokens} tokens of {equal.prompts} greedy answers are the same on both systems"
        return
    for one in equal.differences:
        said = " and ".join(
            f"{token or 'the end'} ({name})" for token, name in zip(one.tokens, SYSTEMS, strict=True)
        )
        yield f"answer {one.prompt} differs from token {one.position} on: {said}"
    differ = f"{len(equal.differences)} of {equal.prompts} greedy answers differ"
    if equal.within_rounding:
        largest = "the largest difference of one engine after the same tokens"
        yield f"{differ}, only where rounding decides; {largest}: {equal.rounding}"
    elif equal.rounding:
        yield f"{differ}, by more than rounding explains: {equal.rounding}"
    else:
        yield differ


def comparison_json(found: SystemsComparison) -> str:
    """Returns all results as JSON, with the command, the client's machine and the time. Times in seconds."""
    content: dict[str, Any] = {
        **provenance(),
        "client": client(),
        "systems": found.systems,
        "slo": found.slo,
        "equal": found.equal,
        "runs": [
            {"rate": run.rate, **{name: _report(report) for name, report in run.reports.items()}}
            for run in found.runs
        ],
    }
    return msgspec.json.encode(content).decode()


def _report(report: Report) -> dict[str, Any]:
    return {
        "settings": report.settings,
        "summary": report.summary,
        "notes": notes(report.summary),
        "requests": [rounded(row) for row in report.rows],
    }
