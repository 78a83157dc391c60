"""Tables of a profile's summary, built with rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.core.profile.types import ProfilePart, TraceSummary
from disagg.top.words import plain


def profile_tables(summary: TraceSummary) -> RenderableType:
    """Returns the tables: steps and shares, kinds of kernels, the host during pauses, the longest pauses."""
    parts = [
        _overview(summary),
        _parts("Time by kind of kernel", "of the time", summary.groups, counted=True),
    ]
    if summary.pauses:
        parts.append(_parts("The step thread in all pauses", "of the pauses", summary.host_in_pauses))
        parts.append(_pauses(summary))
    return Group(*parts)


def _overview(summary: TraceSummary) -> Table:
    table = _table(f"{plain(summary.lane)} on {plain(summary.host)}", ("", "value"))
    missing = (
        ""
        if summary.steps >= summary.wanted_steps
        else f" of {summary.wanted_steps}: the time limit has passed"
    )
    device = "GPU" if summary.device == "cuda" else "operators"
    shortest = f"{summary.least_pause_ms * 1e3:.0f} us"
    rows = [
        ("steps", f"{summary.steps}{missing}"),
        ("a step, median", f"{summary.step_ms_p50:.3f} ms"),
        ("a step, p99", f"{summary.step_ms_p99:.3f} ms"),
        (
            "a step before the recording, median",
            f"{summary.plain_step_ms:.3f} ms" if summary.plain_step_ms else "-",
        ),
        (f"{device} busy", f"{summary.busy_share:.2%}"),
        ("  computes", f"{summary.compute_share:.2%}"),
        ("  copies", f"{summary.copy_share:.2%}"),
        (f"gaps below {shortest}", f"{summary.short_gap_share:.2%}"),
        (f"pauses of {shortest} or more", f"{summary.pause_share:.2%} ({summary.pause_count})"),
        ("steps waited for the profiler", f"{summary.start_s:.2f} s before, {summary.stop_s:.2f} s after"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _parts(title: str, share: str, parts: Sequence[ProfilePart], *, counted: bool = False) -> Table:
    table = _table(title, ("", "ms", share, *(("number",) if counted else ())))
    for part in parts:
        number = (f"{part.count:,}",) if counted else ()
        table.add_row(Text(plain(part.name)), f"{part.ms:.2f}", f"{part.share:.1%}", *number)
    return table


def _pauses(summary: TraceSummary) -> Table:
    table = _table("Longest pauses", ("at ms", "us", "the step thread"))
    for pause in summary.pauses:
        host = ", ".join(f"{plain(part.name)} {part.share:.0%}" for part in pause.host)
        table.add_row(f"{pause.at_ms:.2f}", f"{pause.ms * 1e3:.0f}", Text(host))
    return table


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(names):
        left = number == 0 or name == "the step thread"
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    return table
