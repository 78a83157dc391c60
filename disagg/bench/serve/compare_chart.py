"""Draws both systems of `disagg bench serve --compare` in one chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disagg.bench.serve.answer import OK
from disagg.bench.serve.chart import MIN_SHOWN_S
from disagg.bench.serve.compare_report import SYSTEMS, SystemsComparison, words
from disagg.bench.serve.report import Report

_COLORS = dict(zip(SYSTEMS, ("#3b6ea5", "#e07b39"), strict=True))
_SLO = "#c0392b"
_LEGEND: dict[str, Any] = {"fontsize": 8, "edgecolor": "none", "framealpha": 0.9}


def write_compare_chart(path: Path, found: SystemsComparison) -> None:
    """Writes a PNG: distributions of TTFT and ITL; with several rates also goodput and p99 ITL by rate."""
    from matplotlib.figure import Figure

    rates = [run.rate for run in found.runs if run.rate is not None]
    over_rates = len(rates) > 1
    figure = Figure(figsize=(11, 8 if over_rates else 4.6), layout="constrained")
    rows = [["ttft", "itl"], *([["goodput", "tail"]] if over_rates else [])]
    areas: dict[str, Any] = figure.subplot_mosaic(rows)
    _distributions(areas["ttft"], found, "time to first token, ms", found.slo.ttft_s, _first_s)
    _distributions(areas["itl"], found, "inter-token latency, ms", found.slo.itl_s, _gaps_s)
    if over_rates:
        _over_rates(areas, found, rates)
    systems = "   ".join(f"{name}: {words(config)}" for name, config in found.systems.items())
    figure.suptitle(f"{next(iter(found.runs[0].reports.values())).settings['model']}\n{systems}", fontsize=11)
    figure.savefig(path, dpi=140)


def _distributions(
    axis: Any, found: SystemsComparison, name: str, limit_s: float | None, values: Any
) -> None:
    """Draws a cumulative distribution for each system and rate; the line is stronger for a higher rate."""
    from matplotlib.ticker import LogLocator

    for number, run in enumerate(found.runs, 1):
        for system, report in run.reports.items():
            values_s = values(report)
            if values_s:
                at = "" if run.rate is None or len(found.runs) == 1 else f", {run.rate:g}/s"
                axis.ecdf(
                    [1e3 * max(value, MIN_SHOWN_S) for value in values_s],  # a log axis has no 0
                    color=_COLORS[system],
                    alpha=0.25 + 0.75 * number / len(found.runs),
                    lw=0.8 + number / len(found.runs),
                    label=f"{system}{at}",
                )
    if limit_s is not None:
        axis.axvline(1e3 * limit_s, color=_SLO, lw=1, ls="--", label=f"SLO {1e3 * limit_s:g} ms")
    axis.set_xlabel(name)
    axis.set_ylabel("share")
    axis.set_ylim(0, 1)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")  # labels of minor ticks would overlap within one decade
    axis.legend(loc="lower right", **_LEGEND)
    _plain(axis)


def _over_rates(areas: dict[str, Any], found: SystemsComparison, rates: list[float]) -> None:
    for system in SYSTEMS:
        reports = [run.reports[system] for run in found.runs]
        style = {"color": _COLORS[system], "marker": "o", "ms": 4, "label": system}
        areas["goodput"].plot(rates, [report.summary.goodput for report in reports], **style)
        tails_ms = [
            1e3 * report.summary.itl_s.p99 if report.summary.itl_s else float("nan") for report in reports
        ]
        areas["tail"].plot(rates, tails_ms, **style)
    areas["goodput"].plot(rates, rates, color="0.7", lw=1, ls=":", label="all")
    if found.slo.itl_s is not None:
        areas["tail"].axhline(1e3 * found.slo.itl_s, color=_SLO, lw=1, ls="--", label="SLO of the mean")
    for name, label in (("goodput", "goodput, requests/s"), ("tail", "p99 inter-token latency, ms")):
        areas[name].set_xlabel("requests/s offered")
        areas[name].set_ylabel(label)
        areas[name].set_ylim(bottom=0)
        areas[name].set_xticks(rates, [f"{rate:g}" for rate in rates])
        areas[name].legend(loc="best", **_LEGEND)
        _plain(areas[name])


def _plain(axis: Any) -> None:
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _first_s(report: Report) -> list[float]:
    return [row.ttft_s for row in report.rows if row.kind == OK and row.ttft_s is not None]


def _gaps_s(report: Report) -> list[float]:
    return [gap for row in report.rows if row.kind == OK for gap in row.gaps_s]
