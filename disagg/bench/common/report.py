"""Reports of benchmarks: a table, a JSON file and a chart. All functions are pure, except `write_chart`."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Label = str | int | float


@dataclass(frozen=True)
class Measurement:
    """Repeated measurements of one quantity."""

    name: str
    unit: str
    """Unit of the values: `GB/s` (10^9 bytes per second), `us`, ..."""
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)

    def __str__(self) -> str:
        return f"{short(self.median)} {self.unit} ({short(self.low)} - {short(self.high)})"


@dataclass(frozen=True)
class Result:
    """One line of a report."""

    title: str
    measured: Measurement
    ceiling: Measurement | None = None
    """The hardware's ceiling in the same unit, measured in the same run; None for a latency."""
    labels: dict[str, Label] = field(default_factory=dict)
    """Values of the varied parameters."""
    definition: str = ""
    """Exact definition of the figure; empty if the title is sufficient."""
    ours: Measurement | None = None
    """This project's time for the same work, in the same unit and run, if the result is another library's time; else
    None."""

    @property
    def ratio(self) -> float | None:
        """The other library's median time divided by this project's median time; None if `ours` is None."""
        return None if self.ours is None else self.measured.median / self.ours.median

    @property
    def share(self) -> float | None:
        """The measured median divided by the ceiling's median; None without a ceiling."""
        return None if self.ceiling is None else self.measured.median / self.ceiling.median


def without_ceilings(results: Sequence[Result]) -> list[Result]:
    """Returns the results without ceilings, for a machine on which the measured rate is no upper bound."""
    return [replace(result, ceiling=None) for result in results]


def results_table(title: str, results: Sequence[Result]) -> Table:
    """Returns a table with a row for each result."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    compared = any(result.ours for result in results)
    for name in ("what", "median (min - max)", "ceiling", "share", *(["x ours"] if compared else [])):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    for result in results:
        ceiling = result.ceiling
        limit = f"{ceiling.name} {short(ceiling.median)} {ceiling.unit}" if ceiling else ""
        share = "" if result.share is None else f"{result.share:.1%}"
        times = [_times(result)] if compared else []
        table.add_row(result.title, str(result.measured), limit, share, *times)
    return table


def definition_lines(results: Sequence[Result]) -> list[str]:
    """Returns 'title: definition' of each result with a definition."""
    return [f"{result.title}: {result.definition}" for result in results if result.definition]


def as_json(results: Sequence[Result]) -> str:
    """Returns all results as JSON, with the command, the machine and the time."""
    content = {
        **provenance(),
        "machine": machine(),
        "results": [_as_dict(result) for result in results],
    }
    return json.dumps(content, indent=2)


def write_chart(path: Path, title: str, results: Sequence[Result]) -> None:
    """Writes `chart` as a PNG."""
    chart(title, results).savefig(path, dpi=140)


def chart(title: str, results: Sequence[Result]) -> Figure:
    """Draws a bar for each median, whiskers from the lowest to the highest value, and a mark at each ceiling.

    Each unit has an axis of its own.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.34 * len(results)), layout="constrained")
    units = sorted({result.measured.unit for result in results})
    shown = [[result for result in results if result.measured.unit == unit] for unit in units]
    heights = [1 + len(lines) for lines in shown]
    axes = figure.subplots(len(units), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, unit, lines in zip(axes, units, shown, strict=True):
        _draw(axis, lines)
        axis.set_xlabel(unit)
    axes[0].set_title(title, loc="left", fontsize=11)
    return figure


def provenance() -> dict[str, str]:
    """Returns the command and the time, with which every report begins."""
    return {
        "command": "disagg " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Label]:
    """Returns the properties of the machine and the software that the figures depend on."""
    import torch

    from disagg import __version__

    found: dict[str, Label] = {
        "disagg": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(0),
            "gpus": torch.cuda.device_count(),
            "cuda": str(torch.version.cuda),
        }
    else:
        found["cpu"] = platform.machine()
    return found


def _draw(axis: Any, results: Sequence[Result]) -> None:
    places = range(len(results))
    medians = [result.measured.median for result in results]
    reach = [
        [r.measured.median - r.measured.low for r in results],
        [r.measured.high - r.measured.median for r in results],
    ]
    axis.barh(places, medians, xerr=reach, color="#3b6ea5", ecolor="#222222", height=0.6, capsize=2)
    for place, result in zip(places, results, strict=True):
        if result.ceiling is not None:
            axis.plot([result.ceiling.median] * 2, [place - 0.38, place + 0.38], color="#c0392b", lw=2)
        if result.ours is not None:
            axis.annotate(
                f" {_times(result)} x ours",
                (result.measured.high, place),
                va="center",
                fontsize=8,
                color="#c0392b",
            )
    axis.set_yticks(places, [result.title for result in results], fontsize=8)
    axis.invert_yaxis()
    if any(result.ours for result in results):
        axis.margins(x=0.15)  # space for the text at the end of the longest bar
    axis.set_xlim(left=0)
    axis.spines[["top", "right"]].set_visible(False)


def _as_dict(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = {"title": result.title, "labels": result.labels, **_numbers(result.measured)}
    if result.definition:
        found["definition"] = result.definition
    if result.ceiling is not None:
        found |= {"ceiling": {"name": result.ceiling.name, **_numbers(result.ceiling)}, "share": result.share}
    if result.ours is not None:
        found |= {"ours": _numbers(result.ours), "ratio": result.ratio}
    return found


def _numbers(found: Measurement) -> dict[str, Any]:
    numbers = {"median": found.median, "low": found.low, "high": found.high, "values": list(found.values)}
    return {"measured": found.name, "unit": found.unit, **numbers}


def _times(result: Result) -> str:
    return "" if result.ratio is None else short(result.ratio)


def short(value: float) -> str:
    """Formats a number with three significant digits; digits before the decimal point are never rounded."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
