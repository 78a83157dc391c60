"""Draws a chaos run: requests over time, and a line for each stream with its pauses; faults are marked in both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from disagg.bench.chaos.report import ChaosReport, FaultLine, RequestLine

_COLORS = {"waiting": "#b9c7d6", "answering": "#3b6ea5", "pause": "#f59f00", "failed": "#c0392b"}
_FAULTS = {"kill": "#c0392b", "stop": "#e07b39", "hang": "#7048a8", "cut": "#2b8a3e"}
_BINS = 200


def write_chaos_chart(path: Path, report: ChaosReport) -> None:
    """Writes the chart of a run as a PNG file."""
    from matplotlib.figure import Figure

    streams = 1 + max((one.stream for one in report.requests), default=0)
    figure = Figure(figsize=(13, 3.6 + 0.3 * streams), layout="constrained")
    areas: dict[str, Any] = figure.subplot_mosaic(
        [["ends"], ["streams"]], sharex=True, height_ratios=[1, 1 + 0.18 * streams]
    )
    _answers(areas["ends"], report.requests, report.figures.seconds)
    _streams(areas["streams"], report.requests)
    for axis in areas.values():
        _faults(axis, report.faults, report.figures.seconds)
        axis.spines[["top", "right"]].set_visible(False)
        if report.requests:
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    areas["streams"].set_xlim(0, max(report.figures.seconds, 1e-3))
    found = report.figures
    figure.suptitle(
        f"{report.settings.get('model', '')}: {len(report.faults)} faults, {found.equal} of {found.requests} "
        "requests answered as in the quiet run",
        fontsize=11,
    )
    figure.savefig(path, dpi=140)


def _answers(axis: Any, requests: Sequence[RequestLine], seconds: float) -> None:
    """Draws the number of running requests over time, and the number of those that wait for an output."""
    edges = np.linspace(0.0, max(seconds, 1e-3), _BINS + 1)
    waiting = [(one.begun_s, one.ended_s if one.first_s is None else one.first_s) for one in requests]
    pauses = [pause for one in requests for pause in one.pauses]
    axis.stairs(
        _at_once([*waiting, *pauses], edges), edges, fill=True, color=_COLORS["pause"], label="without output"
    )
    whole = _at_once([(one.begun_s, one.ended_s) for one in requests], edges)
    axis.stairs(whole, edges, color=_COLORS["answering"], label="requests")
    axis.set_ylabel("requests")
    axis.set_ylim(bottom=0)


def _at_once(spans: Sequence[tuple[float, float]], edges: Any) -> Any:
    """Returns the mean number of spans that are open in each bin between two `edges`."""
    begins, ends = (np.array([span[side] for span in spans]) for side in (0, 1))
    open_s = np.zeros(len(edges) - 1)
    for bin_, (low, high) in enumerate(pairwise(edges)):
        open_s[bin_] = np.clip(np.minimum(ends, high) - np.maximum(begins, low), 0, None).sum() / (high - low)
    return open_s


def _streams(axis: Any, requests: Sequence[RequestLine]) -> None:
    stretches: dict[str, list[tuple[int, float, float]]] = {name: [] for name in _COLORS}
    for one in requests:
        first_s = one.ended_s if one.first_s is None else one.first_s
        stretches["waiting"].append((one.stream, one.begun_s, first_s))
        stretches["answering"].append((one.stream, first_s, one.ended_s))
        stretches["pause"] += [(one.stream, *pause) for pause in one.pauses]
    for name, lines in stretches.items():
        if lines:
            places, begin_s, end_s = zip(*lines, strict=True)
            axis.hlines(places, begin_s, end_s, color=_COLORS[name], lw=5, label=name)
    failed = [(one.ended_s, one.stream) for one in requests if one.error]
    if failed:
        axis.plot(*zip(*failed, strict=True), "x", color=_COLORS["failed"], ms=7, mew=2, label="failed")
    axis.set_xlabel("seconds")
    axis.set_ylabel("stream")
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.invert_yaxis()


def _faults(axis: Any, faults: Sequence[FaultLine], end_s: float) -> None:
    """Draws a line at each fault, and a band from the fault to full strength."""
    shown: set[str] = set()
    for one in faults:
        until_s = end_s if one.full_strength_s is None else one.at_s + one.full_strength_s
        axis.axvspan(one.at_s, until_s, color=_FAULTS[one.kind], alpha=0.08, lw=0)
        label = {} if one.kind in shown else {"label": one.kind}
        axis.axvline(one.at_s, color=_FAULTS[one.kind], lw=1, **label)
        shown.add(one.kind)
