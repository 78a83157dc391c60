"""`disagg stats`: flags for `disagg.stats`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from disagg.cli.flags import ApiKeyFlag
from disagg.core.errors import ConfigError, DisaggError
from disagg.core.folders import writing
from disagg.core.key_file import first_key

if TYPE_CHECKING:
    from disagg.stats.memory import GroupSeries
    from disagg.top.client import StatusClient


_PLOT = "memory.png"


class StatsCommand(TyperCommand):
    """A command whose flag `--plot` has an optional value, which typer itself does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts the default file if `--plot` is the last argument or is followed by a flag."""
        pairs = zip(args, [*args[1:], "-"], strict=True)
        given = [[one, _PLOT] if one == "--plot" and after.startswith("-") else [one] for one, after in pairs]
        return super().parse_args(ctx, [one for ones in given for one in ones])


def stats(
    url: Annotated[str, typer.Option("--url", help="Base URL of the server.")] = "http://127.0.0.1:8000",
    api_key_file: ApiKeyFlag = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="[FILE.png]",
            help=f"Record for --seconds, then draw memory over time [{_PLOT}].",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Length of the recording; Ctrl-C ends it earlier.")
    ] = 60.0,
    interval_s: Annotated[float, typer.Option("--interval-s", help="Seconds between two samples.")] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with the recording.")
    ] = False,
) -> None:
    """Show how a server's memory is used: weights; KV used, cached and free; staging and rings."""
    if not 0.1 <= interval_s <= 3600:
        raise ConfigError(f"--interval-s {interval_s:g}: give 0.1 to 3600 seconds")
    if plot is not None:
        _require_drawable(plot, seconds, interval_s)
    from disagg.stats.memory import memory_now, memory_series
    from disagg.top.client import StatusClient

    api_key = None if api_key_file is None else first_key("--api-key-file", api_key_file)
    with StatusClient(url, api_key) as client:
        status = client.status()
        now = memory_now(status)
        if not as_json:
            from disagg.stats.tables import tables
            from disagg.top.watch import console

            console().print(tables(now))
        recorded = memory_series([status])
        if plot is not None:
            recorded = _record(client, plot, seconds, interval_s, f"{status.model}: memory by kind", as_json)
    if as_json:
        import msgspec

        print(msgspec.json.encode({"now": now, "series": recorded}).decode())


def _require_drawable(plot: Path, seconds: float, interval_s: float) -> None:
    if plot.suffix.lower() != ".png":
        raise ConfigError(f"--plot {plot}: the picture is a PNG; give a name that ends in .png")
    if not plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot {plot}: the folder {plot.absolute().parent} does not exist")
    if not interval_s <= seconds <= 86400:
        raise ConfigError(f"--seconds {seconds:g}: give one interval ({interval_s:g}) to 86400 seconds")


def _record(
    client: StatusClient, plot: Path, seconds: float, interval_s: float, title: str, quiet: bool
) -> list[GroupSeries]:
    from disagg.stats.draw import draw_memory
    from disagg.stats.memory import memory_series
    from disagg.stats.record import record

    with _progress(seconds) as looked:
        found = record(client, seconds, interval_s, looked)
    groups = memory_series(found.pictures)
    if not groups:
        raise DisaggError(f"--plot {plot}: no group has reported its memory, so there is nothing to draw")
    if len(found.pictures) == 1:
        raise DisaggError(
            f"--plot {plot}: the recording has one sample, and a plot needs two; record for longer"
        )
    with writing("--plot", plot):
        draw_memory(groups, plot, title)
    if found.failed:
        typer.echo(f"{found.failed} samples failed, the last with: {found.trouble}", err=True)
    passed_s = found.pictures[-1].unix_s - found.pictures[0].unix_s
    typer.echo(f"{plot.absolute()}: {len(found.pictures)} samples in {passed_s:.0f} s", err=quiet)
    return groups


@contextmanager
def _progress(seconds: float) -> Iterator[Callable[[float, str], None]]:
    """Shows a progress bar on stderr within the block. The yielded function takes elapsed seconds and an error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("recording"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=seconds, state="")
        yield lambda passed_s, trouble: bar.update(task, completed=passed_s, state=trouble)
