"""Finds a server's goodput: the highest Poisson rate at which enough requests and tokens meet their latency limits.

The measure is DistServe's (Zhong et al., 2024), with two shares: the share of all requests whose first token came in
time, and the share of all intervals between tokens that were short enough. A request that failed or was refused
misses its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from disagg.bench.common.report import Label, provenance, short
from disagg.bench.serve.answer import OK, RequestResult
from disagg.bench.serve.report import Report, client
from disagg.bench.serve.summary import Spread, notes

if TYPE_CHECKING:
    from rich.table import Table


class GoodputTarget(msgspec.Struct, frozen=True):
    """Limits, and the share of requests and of intervals that must meet them."""

    ttft_s: float
    itl_s: float
    share: float


class RateResult(msgspec.Struct, frozen=True):
    """Results of one rate."""

    rate: float
    """Requests per second that were sent."""
    requests: int
    failed: int
    """Requests that were refused, failed, or had a wrong answer."""
    in_time: float
    """Share of the requests whose first token came in time after the scheduled send."""
    steady: float
    """Share of the intervals between tokens that were short enough; 1 without intervals."""
    ttft_s: Spread | None
    itl_s: Spread | None
    output_token_rate: float
    notes: list[str]
    met: bool
    """Whether both shares reached the target."""


class GoodputReport(msgspec.Struct, frozen=True):
    """Settings and results of a search."""

    settings: dict[str, Label | None]
    target: GoodputTarget
    rates: list[RateResult]
    """Results in the order of the measurements."""

    @property
    def goodput(self) -> float | None:
        """The highest rate that met the target, below the lowest one that missed it; None if no rate did."""
        missed = min((one.rate for one in self.rates if not one.met), default=math.inf)
        return max((one.rate for one in self.rates if one.met and one.rate < missed), default=None)

    @property
    def bounded(self) -> bool:
        """Whether some rate missed the target, so that the goodput is not only a lower bound."""
        return not all(one.met for one in self.rates)


def rate_result(rate: float, report: Report, target: GoodputTarget) -> RateResult:
    """Returns whether and by how much a run at `rate` met the target."""
    found = report.summary
    in_time = sum(_in_time(row, target.ttft_s) for row in report.rows) / len(report.rows)
    gaps_s = [gap for row in report.rows if row.kind == OK for gap in row.gaps_s]
    steady = sum(gap <= target.itl_s for gap in gaps_s) / len(gaps_s) if gaps_s else 1.0
    return RateResult(
        rate=rate,
        requests=found.requests,
        failed=found.requests - found.ok,
        in_time=in_time,
        steady=steady,
        ttft_s=found.ttft_s,
        itl_s=found.itl_s,
        output_token_rate=found.output_token_rate,
        notes=notes(found),
        met=min(in_time, steady) >= target.share,
    )


def _in_time(row: RequestResult, limit_s: float) -> bool:
    """Returns whether the first token came in time after the request's scheduled send.

    From the actual send, a client that is too slow to send at the rate would make the server look fast.
    """
    due_s = row.sent_s if row.due_s is None else row.due_s
    first_s = row.ended_s if row.first_s is None else row.first_s
    return row.kind == OK and first_s - due_s <= limit_s


def search(
    measure: Callable[[float], RateResult], start: float, least: float, most: float, resolution: float
) -> list[RateResult]:
    """Measures rates from `start` until the highest one that meets the target is known to within `resolution`.

    The rate is doubled while it meets the target and halved while it misses it, between `least` and `most`. Then the
    interval between the last met and the first missed rate is halved, on a logarithmic scale, until its ends differ
    by at most `resolution`, a fraction of the lower end. Returns all results in the order of the measurements.
    """
    results = [measure(start)]
    met, missed = (start, math.inf) if results[0].met else (0.0, start)
    while not (met and missed <= met * (1 + resolution)):
        if missed == math.inf:
            rate = min(2 * met, most)
        elif met == 0.0:
            rate = max(missed / 2, least)
        else:
            rate = math.sqrt(met * missed)
        if rate in (met, missed):  # one of the ends of the range
            break
        results.append(measure(rate))
        met, missed = (rate, missed) if results[-1].met else (met, rate)
    return results


def goodput_table(report: GoodputReport) -> Table:
    """Returns a table with a row for each measured rate, in ascending order."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    target = report.target
    table = Table(box=SIMPLE_HEAD)
    names = ("TTFT p50 / p99, ms", f"<= {1e3 * target.ttft_s:g} ms")
    gaps = ("ITL p50 / p99, ms", f"<= {1e3 * target.itl_s:g} ms")
    for name in ("requests/s", "requests", "failed", *names, *gaps, "tokens/s", ""):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    for one in sorted(report.rates, key=lambda result: result.rate):
        table.add_row(
            short(one.rate),
            str(one.requests),
            str(one.failed),
            _short(one.ttft_s),
            f"{100 * one.in_time:.2f} %",
            _short(one.itl_s),
            f"{100 * one.steady:.2f} %",
            short(one.output_token_rate),
            "met" if one.met else "missed",
        )
    return table


def _short(spread: Spread | None) -> str:
    return "-" if spread is None else f"{short(1e3 * spread.p50)} / {short(1e3 * spread.p99)}"


def goodput_lines(report: GoodputReport) -> Iterator[str]:
    """Yields the result, and notes on single rates."""
    target, found = report.target, report.goodput
    limits = (
        f"{100 * target.share:g} % of the requests have their first token within {1e3 * target.ttft_s:g} ms, and "
        f"{100 * target.share:g} % of the tokens follow within {1e3 * target.itl_s:g} ms"
    )
    if found is None:
        yield f"goodput: below {short(min(one.rate for one in report.rates))} requests/s; the target: {limits}"
    else:
        yield f"goodput: {'' if report.bounded else 'at least '}{short(found)} requests/s, at which {limits}"
    for one in report.rates:
        yield from (f"note: at {short(one.rate)} requests/s {note}" for note in one.notes)


def goodput_json(report: GoodputReport) -> str:
    """Returns all results as JSON, with the command, the client's machine and the time. Times are in seconds."""
    content = {
        **provenance(),
        "client": client(),
        "settings": report.settings,
        "target": report.target,
        "goodput": report.goodput,
        "bounded": report.bounded,
        "rates": report.rates,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def write_goodput_chart(path: Path, report: GoodputReport) -> None:
    """Writes a PNG: both shares by rate, with the target and the result."""
    from matplotlib.figure import Figure

    results = sorted(report.rates, key=lambda one: one.rate)
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axis: Any = figure.subplots()
    rates = [one.rate for one in results]
    _line(
        axis, rates, [one.in_time for one in results], f"first token within {1e3 * report.target.ttft_s:g} ms"
    )
    _line(axis, rates, [one.steady for one in results], f"next token within {1e3 * report.target.itl_s:g} ms")
    axis.axhline(100 * report.target.share, color="#c0392b", lw=1, ls="--", label="target")
    if report.goodput is not None:
        axis.axvline(report.goodput, color="0.6", lw=1, ls=":", label=f"goodput {short(report.goodput)}/s")
    axis.set_xlabel("requests/s, Poisson arrivals")
    axis.set_ylabel("% in time")
    axis.set_ylim(top=100.5)
    axis.set_xlim(left=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, edgecolor="none")
    figure.savefig(path, dpi=140)


def _line(axis: Any, rates: Sequence[float], shares: Sequence[float], label: str) -> None:
    axis.plot(rates, [100 * share for share in shares], marker="o", ms=4, label=label)
