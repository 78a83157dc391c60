"""Draws a profile: the streams of the device and the step thread over a few steps, pauses, and shares of the time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from disagg.core.profile.kinds import COPIES, KINDS, OTHER
from disagg.core.profile.types import ProfileLane, ProfilePicture, TraceSummary

KIND_FILLS = {
    "communication": "#e8590c",
    "attention": "#ae3ec9",
    "recurrent": "#7048e8",
    "experts": "#1098ad",
    "norms": "#f59f00",
    "matrix products": "#4c6ef5",
    "rotary and KV": "#12b886",
    "sampling": "#d6336c",
    COPIES: "#0b7285",
    "elementwise": "#94d82d",
    OTHER: "#868e96",
}
"""Colour of each kind of kernel."""
HOST_FILLS = ("#a98467", "#dda15e", "#fefae0", "#606c38", "#e9c46a")
"""Colours of the step thread's parts, in order of appearance."""
PAUSE_FILL = "#ffc9c9"
NAMED_PAUSES = 6
"""Number of pauses with their length in the picture."""
MAX_LANES = 8
"""Most streams that are drawn; further ones have little work."""


def draw_profile(summary: TraceSummary, path: str | os.PathLike[str]) -> None:
    """Writes a PNG. Raises `ValueError` for a summary without a picture, and `OSError`."""
    if summary.picture is None:
        raise ValueError("the summary has no picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = summary.picture
    lanes = (
        picture.lanes if len(picture.lanes) <= MAX_LANES else [*picture.lanes[:MAX_LANES], picture.lanes[-1]]
    )
    figure = Figure(figsize=(15, 3.4 + 0.5 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[1.0 + 0.5 * len(lanes), 1.1])
    _steps(above, picture, lanes)
    _shares(below, summary)
    figure.suptitle(_title(summary), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=130)


def _title(summary: TraceSummary) -> str:
    what = "the GPU computes or copies" if summary.device == "cuda" else "operators run"
    return (
        f"{summary.lane}, {summary.steps} steps, {summary.step_ms_p50:.2f} ms each: {what} in "
        f"{summary.busy_share:.1%} of the time; {summary.pause_share:.1%} pauses, "
        f"{summary.short_gap_share:.1%} gaps below {summary.least_pause_ms * 1e3:.0f} us"
    )


def _steps(axes: Any, picture: ProfilePicture, lanes: Sequence[ProfileLane]) -> None:
    longest = sorted(picture.pauses, key=lambda pause: -pause.ms)
    for pause in longest:
        axes.axvspan(pause.at_ms, pause.at_ms + pause.ms, color=PAUSE_FILL, linewidth=0, zorder=0)
    for pause in longest[:NAMED_PAUSES]:
        axes.annotate(
            f"{pause.ms * 1e3:.0f} us",
            xy=(pause.at_ms + pause.ms / 2, -0.05),
            ha="center",
            va="bottom",
            fontsize=7,
            color="#c92a2a",
        )
    for at_ms in picture.steps_ms:
        axes.axvline(at_ms, color="#495057", linewidth=0.7, linestyle=":")
    for top, lane in enumerate(lanes):
        _bars(axes, lane, top)
    axes.set_yticks([top + 0.5 for top in range(len(lanes))], [lane.name for lane in lanes], fontsize=8)
    axes.set_ylim(len(lanes) + 0.1, -0.5)
    axes.set_xlim(0, picture.ms)
    axes.set_xlabel(f"ms of {len(picture.steps_ms)} steps (dotted: a step begins; red: pauses of the device)")
    _plain(axes)
    kinds = {kind for lane in lanes for kind in lane.kinds if kind in KIND_FILLS}
    _legend(axes, [(kind, KIND_FILLS[kind]) for kind in KINDS if kind in kinds] + _host_fills(lanes))


def _bars(axes: Any, lane: ProfileLane, top: float) -> None:
    fills = KIND_FILLS | dict(_host_fills([lane]))
    bars = [(start, stop - start) for start, stop in zip(lane.starts_ms, lane.stops_ms, strict=True)]
    axes.broken_barh(bars, (top + 0.1, 0.8), facecolors=[fills[kind] for kind in lane.kinds], linewidth=0)


def _host_fills(lanes: Sequence[ProfileLane]) -> list[tuple[str, str]]:
    parts = dict.fromkeys(kind for lane in lanes for kind in lane.kinds if kind not in KIND_FILLS)
    return [(part, HOST_FILLS[number % len(HOST_FILLS)]) for number, part in enumerate(parts)]


def _shares(axes: Any, summary: TraceSummary) -> None:
    """Draws the kinds of kernels, as shares of the window; kernels of parallel streams count twice."""
    left = 0.0
    bars = [
        (group.name, group.share, KIND_FILLS.get(group.name, KIND_FILLS[OTHER])) for group in summary.groups
    ]
    for name, share, fill in bars:
        axes.barh(0, share, left=left, color=fill, height=0.6)
        if share > 0.04:
            axes.annotate(
                f"{name} {share:.0%}",
                xy=(left + share / 2, 0),
                ha="center",
                va="center",
                fontsize=8,
                color="white",
            )
        left += share
    idle = max(0.0, 1.0 - summary.busy_share)
    axes.barh(1, summary.busy_share, color="#2b8a3e", height=0.6)
    axes.barh(1, idle, left=summary.busy_share, color=PAUSE_FILL, height=0.6)
    axes.annotate(f"busy {summary.busy_share:.1%}", xy=(0.01, 1), va="center", fontsize=8, color="white")
    axes.set_yticks([0, 1], ["by kind", "device"], fontsize=8)
    axes.set_xlim(0, max(1.0, left))
    axes.set_xlabel("share of the time from the first to the last step")
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(axes: Any, fills: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=fill, label=name) for name, fill in fills]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=10,
        frameon=False,
        fontsize=8,
        borderpad=0,
    )
