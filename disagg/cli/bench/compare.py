"""`disagg bench serve --compare`: flags and output. Also the progress bar of `disagg bench serve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from disagg.cli.bench.common import OutputFlags, Shown, latest_lines, progress_lines, show
from disagg.cli.flags import (
    ChunkTokensFlag,
    ConfigFlags,
    DeterministicFlag,
    DeviceFlag,
    DTypeFlag,
    RandomInitFlag,
    RankFlags,
)
from disagg.cli.options import flag_values
from disagg.cli.settings import configuration
from disagg.core.errors import ConfigError

if TYPE_CHECKING:
    from disagg.bench.serve.bench import ServeBench
    from disagg.bench.serve.compare import ReportProgress
    from disagg.bench.serve.load import LoadProgress


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """`--compare`, and the flags that are valid only with `--compare`, for the systems that it starts."""

    compare: Annotated[
        Literal["colocated"] | None,
        typer.Option(
            "--compare",
            help="Start a split system, then a colocated one with as many ranks; run the same load on both.",
        ),
    ] = None
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates", metavar="R,R,...", help="With --compare: an open loop at each of these rates."
        ),
    ] = None
    check_equal: Annotated[
        bool,
        typer.Option(
            "--check-equal",
            help="With --compare: exit code 1 if greedy answers of the systems differ. Without --deterministic, "
            "rounding may explain a difference.",
        ),
    ] = False
    random_init: RandomInitFlag = None
    dtype: DTypeFlag = None
    deterministic: DeterministicFlag = None
    ranks: RankFlags
    colocated_tp: Annotated[
        int | None,
        typer.Option(
            "--colocated-tp", min=1, help="With --compare: ranks of a colocated group [as --decode-tp]."
        ),
    ] = None
    device: DeviceFlag = None
    chunk_tokens: ChunkTokensFlag = None
    source: ConfigFlags


def check_without_compare(flags: CompareFlags) -> None:
    """Raises `ConfigError` for a flag that needs `--compare`; called if `--compare` is missing."""
    for one in flag_values(flags):
        if not one.is_default:
            raise ConfigError(f"{one.flag} needs --compare: without it, the servers at --url run already")


def parse_rates(text: str) -> list[float]:
    """Parses rates in requests a second, such as `1,2.5,4`; returns them in ascending order. Raises `ConfigError`."""
    try:
        rates = sorted({float(one) for one in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not 0 < rates[0] <= rates[-1] < float("inf"):
        raise ConfigError(f"--rates {text}: give numbers above 0, separated by commas, as 1,2,4")
    return rates


@contextmanager
def progress() -> Iterator[ReportProgress]:
    """Shows a progress bar within the block; yields a function that updates it.

    In a closed loop that is limited by time, the bar has no total. Without a terminal, see `latest_lines`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        with latest_lines(progress_lines()) as show_line:
            yield lambda phase, counts, total: show_line(_line(phase, counts, total))
        return
    words, state = TextColumn("{task.description}"), TextColumn("{task.fields[state]}")
    columns = (words, BarColumn(), MofNCompleteColumn(), state, TimeElapsedColumn())
    # Two frames a second are enough: drawing takes CPU time from the client, which distorts its measurements.
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=None, state="")

        def update(phase: str, counts: LoadProgress | None, total: int | None) -> None:
            ended = counts.ended if counts is not None else 0
            bar.update(task, completed=ended, total=total, description=phase, state=_state(counts))

        yield update


def _state(counts: LoadProgress | None) -> str:
    if counts is None:
        return ""
    return f"{counts.running} running, {counts.refused} refused, {counts.failed} failed"


def _line(phase: str, counts: LoadProgress | None, total: int | None) -> str:
    if counts is None:
        return phase
    ended = str(counts.ended) if total is None else f"{counts.ended} of {total}"
    return f"{phase}: {ended} ended, {_state(counts)}"


def run_compare(
    flags: CompareFlags, model: str, loads: list[ServeBench], output: OutputFlags, strict: bool
) -> int:
    """Runs each of the `loads` on both systems, and shows the comparison; returns the command's exit code.

    `model` is a checkpoint's folder; empty for the configured model.
    """
    from disagg.bench.serve.compare import CompareBench, both_systems, compare
    from disagg.bench.serve.compare_chart import write_compare_chart
    from disagg.bench.serve.compare_report import comparison_json, comparison_lines, comparison_table
    from disagg.bench.serve.served import served
    from disagg.reference.answers import comparable

    config = configuration(flags.source, flags, {"model.path": model} if model else {})
    if flags.check_equal:
        config = comparable(config, flags.deterministic)
    bench = CompareBench(both_systems(config, flags.colocated_tp), tuple(loads), flags.check_equal)
    with progress() as update:
        found = compare(bench, served, update)
    shown = Shown(
        lambda: comparison_json(found),
        lambda: comparison_table(found),
        comparison_lines(found),
        lambda path: write_compare_chart(path, found),
    )
    show("compare", shown, output)
    equal = found.equal
    differ = equal is not None and bool(equal.differences) and not equal.within_rounding
    return 1 if not found.answered or differ or (strict and not found.faultless) else 0
