"""The report of `disagg bench serve`: a table, and JSON with every request."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from disagg.bench.common.report import Label, provenance, short
from disagg.bench.serve.answer import RequestResult
from disagg.bench.serve.summary import Slo, Spread, Summary, notes

if TYPE_CHECKING:
    from rich.table import Table


class Report(msgspec.Struct, frozen=True):
    """Settings and results of a run."""

    settings: dict[str, Label | None]
    """Settings of the run."""
    slo: Slo
    summary: Summary
    rows: list[RequestResult]

    @property
    def faultless(self) -> bool:
        """Whether every request was answered correctly, or refused with 429."""
        return not self.summary.errors


def latency_table(report: Report) -> Table:
    """Returns a table with a row for each latency, in ms."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = report.summary
    title = f"{found.ok} of {found.requests} requests answered correctly in {found.seconds:.4g} s"
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for name in ("ms", "mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="left" if name == "ms" else "right", no_wrap=True)
    for name, spread in _spreads(found):
        values = msgspec.structs.astuple(spread) if spread else ("-",) * 5
        table.add_row(name, *(one if isinstance(one, str) else short(1e3 * one) for one in values))
    return table


def lines(report: Report) -> Iterator[str]:
    """Yields rates, failures with an example of each kind, and notes on the figures."""
    found = report.summary
    yield (
        f"throughput: {short(found.request_rate)} requests/s, {short(found.input_token_rate)} input tokens/s, "
        f"{short(found.output_token_rate)} output tokens/s; at most {found.most_running} requests at once"
    )
    limits = {"TTFT": report.slo.ttft_s, "mean ITL": report.slo.itl_s}
    given = " and ".join(f"{name} <= {limit:g} s" for name, limit in limits.items() if limit is not None)
    if given:
        yield f"goodput: {short(found.goodput)} requests/s with {given}"
    if found.refused:
        yield f"refused with 429: {found.refused}"
    for kind, count in found.errors.items():
        first = next(row for row in report.rows if row.kind == kind)
        yield f"{kind}: {count}, the first is request {first.index}: {first.problem}"
    yield from (f"note: {note}" for note in notes(found))


def report_json(report: Report) -> str:
    """Returns all results as JSON, with the command, the client's machine and the time.

    Times are in seconds; times of requests are rounded to microseconds. Each request is one line.
    """
    content = {
        **provenance(),
        "client": client(),
        "settings": report.settings,
        "slo": report.slo,
        "summary": report.summary,
        "notes": notes(report.summary),
    }
    head = msgspec.json.format(msgspec.json.encode(content), indent=2).decode().removesuffix("\n}")
    rows = ",\n    ".join(msgspec.json.encode(rounded(row)).decode() for row in report.rows)
    return f'{head},\n  "requests": [\n    {rows}\n  ]\n}}'


def client() -> dict[str, Label]:
    """Returns the properties of this machine that determine the client's speed. Does not import torch."""
    import aiohttp
    import uvloop

    from disagg import __version__

    versions: dict[str, Label] = {
        "disagg": __version__,
        "python": platform.python_version(),
        "aiohttp": aiohttp.__version__,
        "uvloop": uvloop.__version__,
    }
    return versions | {"cpu": platform.machine(), "cpus": os.cpu_count() or 0}


def _spreads(found: Summary) -> Iterator[tuple[str, Spread | None]]:
    yield "time to first token", found.ttft_s
    yield "inter-token latency", found.itl_s
    yield "time per token after the first", found.token_s
    yield "end to end", found.latency_s
    if found.late_s is not None:
        yield "sent after it was due", found.late_s


def rounded(row: RequestResult) -> dict[str, Any]:
    """Returns a request's fields by name, with times rounded to microseconds."""

    def short_of(value: Any) -> Any:
        if isinstance(value, list):
            return [short_of(one) for one in value]
        return round(value, 6) if isinstance(value, float) else value

    return {name: short_of(value) for name, value in msgspec.structs.asdict(row).items()}
