"""Draws the timeline of a run: a band for each rank, with a row and a colour for each kind of work.

The strip under a bar has the colour of the bar's request, which identifies the request on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from disagg.core.timeline import TimelineSpan

KIND_COLORS = {
    "compute": "#4c6ef5",
    "gather": "#f59f00",
    "send": "#e8590c",
    "receive": "#12b886",
    "scatter": "#0b7285",
    "write": "#d6336c",
    "land": "#0ca678",
    "decode": "#ae3ec9",
}
"""Colour by kind of work, in the order of a request's life. Other kinds are grey, in rows below."""
OTHER_COLOR = "#868e96"
STRIP_SHARE = 0.22
"""Share of a bar's height for the strip of the request."""
ROWS_PER_KIND = 3
"""Largest number of rows for overlapping spans of one kind and rank; further spans share the last row."""


class _Row(NamedTuple):
    """A row of bars. If a kind needs more than `ROWS_PER_KIND` rows, bars overlap in its last row."""

    lane: str
    kind: str
    spans: list[TimelineSpan]


def draw_timeline(spans: Sequence[TimelineSpan], path: str | os.PathLike[str], title: str = "") -> None:
    """Writes the timeline as a PNG, in ms since the earliest span. Raises `ValueError` when there is no span."""
    if not spans:
        raise ValueError("no span to draw: draining a timeline removes its spans")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = rows_of(spans)
    lanes = list(dict.fromkeys(row.lane for row in rows))
    tops = _tops(rows)
    figure = Figure(figsize=(15, 1.9 + 0.26 * (tops[-1] + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    requests = _request_colors(spans)
    origin_s = min(span.start_s for span in spans)
    for row, top in zip(rows, tops, strict=True):
        _bars(axes, row, top, origin_s, requests)
    _frame(axes, rows, tops, lanes, title)
    _legends(figure, {row.kind for row in rows}, requests)
    figure.savefig(path, dpi=130)


def rows_of(spans: Iterable[TimelineSpan]) -> list[_Row]:
    """Returns the rows, sorted by lane (role and rank), then by kind. Overlapping spans get separate rows."""
    groups: dict[tuple[str, str], list[TimelineSpan]] = {}
    for span in sorted(spans, key=lambda one: one.start_s):
        groups.setdefault((span.lane, span.name), []).append(span)
    rows: list[_Row] = []
    for lane, kind in sorted(groups, key=lambda key: (*_lane_order(key[0]), _kind_order(key[1]))):
        rows += [_Row(lane, kind, packed) for packed in pack(groups[lane, kind])]
    return rows


def pack(spans: list[TimelineSpan]) -> list[list[TimelineSpan]]:
    """Distributes spans, sorted by start, over the fewest rows without overlap, at most `ROWS_PER_KIND`."""
    rows: list[list[TimelineSpan]] = []
    for span in spans:
        free = next((row for row in rows if row[-1].stop_s <= span.start_s), None)
        if free is not None:
            free.append(span)
        elif len(rows) < ROWS_PER_KIND:
            rows.append([span])
        else:
            rows[-1].append(span)
    return rows


def _lane_order(lane: str) -> tuple[int, str, int]:
    """Returns a lane's sort key, for the order `prefill r2`, `prefill r10`, `decode r0`, other lanes."""
    role, _, rank = lane.rpartition(" r")
    if not rank.isdigit():
        return 2, lane, 0
    return (0 if role.startswith("prefill") else 1), role, int(rank)


def _kind_order(kind: str) -> int:
    kinds = list(KIND_COLORS)
    return kinds.index(kind) if kind in KIND_COLORS else len(kinds)


def _tops(rows: Sequence[_Row]) -> list[float]:
    """Returns the y position of each row's upper edge, in units of a row's height. Half a row separates two lanes."""
    tops: list[float] = []
    top = 0.0
    for row, before in zip(rows, [None, *rows], strict=False):
        top += 0.5 if before is not None and before.lane != row.lane else 0.0
        tops.append(top)
        top += 1.0
    return tops


def _request_colors(spans: Iterable[TimelineSpan]) -> dict[str, Any]:
    """Returns a colour for each request, in order of appearance."""
    from matplotlib import colormaps

    ordered = sorted(spans, key=lambda one: one.start_s)
    names = list(dict.fromkeys(span.request for span in ordered if span.request))
    if len(names) <= 10:
        return {name: colormaps["tab10"](i) for i, name in enumerate(names)}
    return {name: colormaps["turbo"](0.05 + 0.9 * i / (len(names) - 1)) for i, name in enumerate(names)}


def _bars(axes: Any, row: _Row, top: float, origin_s: float, requests: dict[str, Any]) -> None:
    bars = [((span.start_s - origin_s) * 1e3, span.seconds * 1e3) for span in row.spans]
    color = KIND_COLORS.get(row.kind, OTHER_COLOR)
    # An edge in the bar's colour keeps spans shorter than a pixel visible.
    axes.broken_barh(bars, (top + 0.08, 0.84), facecolors=color, edgecolors=color, linewidth=0.4)
    named = [(bar, requests[span.request]) for bar, span in zip(bars, row.spans, strict=True) if span.request]
    if named:
        strip = (top + 0.92 - STRIP_SHARE, STRIP_SHARE)
        colors = [one for _, one in named]
        axes.broken_barh(
            [bar for bar, _ in named], strip, facecolors=colors, edgecolors=colors, linewidth=0.4
        )


def _frame(axes: Any, rows: Sequence[_Row], tops: Sequence[float], lanes: Sequence[str], title: str) -> None:
    for number, lane in enumerate(lanes):
        of_lane = [top for row, top in zip(rows, tops, strict=True) if row.lane == lane]
        if number % 2 == 0:
            axes.axhspan(of_lane[0] - 0.2, of_lane[-1] + 1.2, color="#f1f3f5", zorder=0)
    axes.set_yticks([top + 0.5 for top in tops], [row.kind for row in rows], fontsize=8)
    for lane in lanes:
        of_lane = [top for row, top in zip(rows, tops, strict=True) if row.lane == lane]
        middle = (of_lane[0] + of_lane[-1] + 1) / 2
        axes.annotate(
            lane,
            xy=(0, middle),
            xycoords=("axes fraction", "data"),
            xytext=(-58, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_ylim(tops[-1] + 1.3, -0.3)
    axes.margins(x=0.01)
    axes.set_xlabel("time since the first span (ms)")
    axes.grid(axis="x", color="#ced4da", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, loc="left")


def _legends(figure: Any, kinds: set[str], requests: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    ordered = sorted(kinds, key=lambda kind: (_kind_order(kind), kind))
    work = [Patch(color=KIND_COLORS.get(kind, OTHER_COLOR), label=kind) for kind in ordered]
    shown = list(requests.items())[:12]
    strips = [Patch(color=color, label=name) for name, color in shown]
    if len(requests) > len(shown):
        strips.append(Patch(color="none", label=f"and {len(requests) - len(shown)} more"))
    figure.legend(
        handles=work + strips,
        loc="outside lower center",
        ncols=min(10, len(work + strips)),
        frameon=False,
        fontsize=9,
    )
