"""Draws memory over time. Each group's chart stacks the kinds of memory, and marks preemptions and evictions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from disagg.stats.memory import KINDS, GroupSeries, Growth, Kind
from disagg.stats.tiers import TierSeries

KIND_STYLES: dict[Kind, tuple[str, str]] = {
    "weights": ("weights", "#495057"),
    "kv_tokens": ("KV of tokens", "#1c7ed6"),
    "kv_waste": ("KV waste", "#e03131"),
    "kv_cached": ("KV cached", "#74c0fc"),
    "kv_free": ("KV free", "#e7f5ff"),
    "state_used": ("states of requests", "#2f9e44"),
    "state_cached": ("states cached", "#8ce99a"),
    "state_free": ("state slots free", "#ebfbee"),
    "transfer_used": ("staging or ring in use", "#f08c00"),
    "transfer_free": ("staging or ring free", "#ffe8cc"),
}
"""Label and colour of each kind. Areas are stacked in the order of `KINDS`, the first one at the bottom."""
TIER_STYLES = (
    ("hits in the pool", "#74c0fc"),
    ("hits in host memory", "#8ce99a"),
    ("hits in the storage", "#ffd43b"),
)
"""Label and colour of the hits of each tier, in the order of `TierHits`."""
PREEMPTED, EVICTED = ("preempted", "v", "#c2255c"), ("pages evicted", "|", "#5f3dc4")
"""Label, marker and colour of each kind of event."""
LIMIT_IS_FAR = 3.0
"""A GPU limit above this multiple of the stack's height is shown as text. As a line, it would flatten the areas."""


def draw_memory(groups: Sequence[GroupSeries], path: str | os.PathLike[str], title: str = "") -> None:
    """Writes a PNG with a chart for each of `groups`, and another one for the lower tiers of its prefix cache.

    Raises `ValueError` if there is no group, and `OSError`.
    """
    if not groups:
        raise ValueError("no group to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tiered = [(group.name, group.tiers) for group in groups if group.tiers is not None]
    charts = len(groups) + len(tiered)
    figure = Figure(figsize=(12, 1.3 + 2.9 * charts), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(charts, 1, sharex=True, squeeze=False)[:, 0]
    for axis, group in zip(axes, groups, strict=False):
        _areas(axis, group)
        _marks(axis, group)
    for axis, (name, tiers) in zip(axes[len(groups) :], tiered, strict=True):
        _tiers(axis, name, tiers)
    axes[0].set_xlim(0, max(group.at_s[-1] for group in groups))
    figure.align_ylabels(list(axes))
    axes[-1].set_xlabel("time since the first sample (s)")
    figure.suptitle(title, x=0.01, ha="left")
    _legend(figure, groups)
    figure.savefig(path, dpi=120)


def _areas(axis: Any, group: GroupSeries) -> None:
    tops = [sum(at_once) for at_once in zip(*group.kinds.values(), strict=True)]
    unit, unit_bytes = _unit(max(tops))
    scaled = [[nbytes / unit_bytes for nbytes in group.kinds[kind]] for kind in KINDS]
    colors = [KIND_STYLES[kind][1] for kind in KINDS]
    axis.stackplot(group.at_s, scaled, colors=colors, linewidth=0)
    # The line marks the upper edge of the stack, whose topmost areas have light colours.
    axis.plot(group.at_s, [top / unit_bytes for top in tops], color="#868e96", linewidth=0.8)
    heading = group.name
    if group.device_bytes > LIMIT_IS_FAR * max(tops):
        heading += f"   (of {group.device_bytes / unit_bytes:,.0f} {unit} usable)"
    elif group.device_bytes:
        axis.axhline(group.device_bytes / unit_bytes, color="#212529", linewidth=1, linestyle="--")
    room = 26 if group.preempted else 16 if group.evicted else 6  # space for the marks, in points
    _frame(axis, heading, unit, room)
    axis.set_ylim(bottom=0)


def _tiers(axis: Any, name: str, tiers: TierSeries) -> None:
    """Draws the hits by tier as stacked areas, and the used share of host memory as a line, in percent."""
    shares = [[100 * hits[tier] for hits in tiers.hits] for tier in range(len(TIER_STYLES))]
    labels, colors = zip(*TIER_STYLES, strict=True)
    axis.stackplot(tiers.at_s, shares, labels=labels, colors=colors, linewidth=0)
    used = [100 * share for share in tiers.host_used]
    axis.plot(tiers.at_s, used, color="#212529", linewidth=1, label="host memory used")
    _frame(axis, f"{name}: prefix cache", "% of prompt tokens")
    axis.set_ylim(0, 105)
    axis.legend(loc="upper left", ncols=4, frameon=False, fontsize=8)


def _frame(axis: Any, heading: str, unit: str, room: float = 6) -> None:
    """Gives a chart its heading, `room` points above the chart, the label of its values and a grid."""
    axis.set_title(heading, loc="left", fontsize=10, fontweight="bold", pad=room)
    axis.set_ylabel(unit)
    axis.grid(axis="y", color="#ced4da", linewidth=0.5, alpha=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _unit(largest_bytes: int) -> tuple[str, int]:
    """Returns the name and the bytes of the unit for an axis: GiB, or MiB if `largest_bytes` is below 0.1 GiB."""
    return ("GiB", 1 << 30) if largest_bytes >= (1 << 30) / 10 else ("MiB", 1 << 20)


def _marks(axis: Any, group: GroupSeries) -> None:
    """Draws the marks of preemptions and evictions in a strip above the stack."""
    for (_, shape, color), happened, height in (
        (PREEMPTED, group.preempted, 1.1),
        (EVICTED, group.evicted, 1.04),
    ):
        if happened:
            axis.plot(
                [one.at_s for one in happened],
                [height] * len(happened),
                linestyle="none",
                marker=shape,
                color=color,
                markersize=7,
                transform=axis.get_xaxis_transform(),
                clip_on=False,
            )


def _legend(figure: Any, groups: Sequence[GroupSeries]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [kind for kind in KINDS if any(any(group.kinds[kind]) for group in groups)]
    handles: list[Any] = [
        Patch(facecolor=color, edgecolor="#868e96", linewidth=0.5, label=label)
        for label, color in (KIND_STYLES[kind] for kind in shown)
    ]
    if any(group.device_bytes for group in groups):
        handles.append(Line2D([], [], color="#212529", linewidth=1, linestyle="--", label="limit of the GPU"))
    for (label, shape, color), happened in (
        (PREEMPTED, [one for group in groups for one in group.preempted]),
        (EVICTED, [one for group in groups for one in group.evicted]),
    ):
        if happened:
            label = f"{label} ({_count(happened):,})"
            handles.append(Line2D([], [], linestyle="none", marker=shape, color=color, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def _count(happened: Sequence[Growth]) -> int:
    return sum(one.count for one in happened)
