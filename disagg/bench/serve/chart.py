"""Draws the latency distributions and request timelines of a `disagg bench serve` run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.bench.serve.answer import OK, REFUSED, RequestResult
from disagg.bench.serve.report import Report

_COLORS = {"waiting": "#b9c7d6", "answering": "#3b6ea5", "429": "#f59f00", "error": "#c0392b"}


MIN_SHOWN_S = 1e-5


def write_serve_chart(path: Path, report: Report) -> None:
    """Writes a PNG: the distribution functions of TTFT and ITL with their SLOs, and a line for each request."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    areas: dict[str, Any] = figure.subplot_mosaic([["ttft", "itl"], ["runs", "runs"]], height_ratios=[1, 1.4])
    right = [row for row in report.rows if row.kind == OK]
    first_s = [row.ttft_s for row in right if row.ttft_s is not None]
    draw_distribution(areas["ttft"], "time to first token, ms", first_s, report.slo.ttft_s)
    gaps_s = [gap for row in right for gap in row.gaps_s]
    draw_distribution(areas["itl"], "inter-token latency, ms", gaps_s, report.slo.itl_s)
    _runs(areas["runs"], report.rows)
    found = report.summary
    figure.suptitle(
        f"{report.settings['model']}: {found.ok} of {found.requests} requests, {found.request_rate:.3g}/s",
        fontsize=11,
    )
    figure.savefig(path, dpi=140)


def draw_distribution(axis: Any, name: str, values_s: Sequence[float], limit_s: float | None) -> None:
    """Draws the distribution function of `values_s` and the SLO `limit_s` on a log axis in ms."""
    from matplotlib.ticker import LogLocator

    if values_s:
        # A log axis cannot show 0, the interval between tokens that arrive together.
        axis.ecdf([1e3 * max(value, MIN_SHOWN_S) for value in values_s], color=_COLORS["answering"])
    if limit_s is not None:
        axis.axvline(1e3 * limit_s, color=_COLORS["error"], lw=1, label=f"SLO {1e3 * limit_s:g} ms")
        axis.legend(loc="lower right", frameon=False)
    axis.set_xlabel(name)
    axis.set_ylabel("share")
    axis.set_ylim(0, 1)
    axis.set_xscale("log")  # on a linear axis, a few long intervals would squeeze the curve
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _runs(axis: Any, rows: Sequence[RequestResult]) -> None:
    """Draws a line for each request: one colour from sending to the first token, another one to the end."""
    stretches: dict[str, list[tuple[int, float, float]]] = {name: [] for name in _COLORS}
    for row in rows:
        if row.kind != OK:
            kind = "429" if row.kind == REFUSED else "error"
            stretches[kind].append((row.index, row.sent_s, row.ended_s))
            continue
        first_s = row.ended_s if row.first_s is None else row.first_s
        stretches["waiting"].append((row.index, row.sent_s, first_s))
        stretches["answering"].append((row.index, first_s, row.ended_s))
    # Line width in points: the lines of many requests touch each other, those of few requests stay thin.
    height = max(0.6, min(4.0, 300 / len(rows)))
    for name, lines in stretches.items():
        if lines:
            places, begin_s, end_s = zip(*lines, strict=True)
            axis.hlines(places, begin_s, end_s, color=_COLORS[name], lw=height, label=name)
    axis.set_xlabel("seconds")
    axis.set_ylabel("request")
    axis.invert_yaxis()
    axis.legend(loc="upper right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
