"""`disagg profile`: flags for `disagg.top.client` and `disagg.report.profile`."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from disagg.cli.flags import ApiKeyFlag
from disagg.cli.options import with_options
from disagg.core.config.read import Role
from disagg.core.errors import ConfigError
from disagg.core.key_file import first_key
from disagg.core.profile.types import MAX_LIMIT_S, MAX_STEPS, TraceSummary

SUMMARY, PICTURE = "summary.json", "profile.png"


@dataclass(frozen=True, kw_only=True)
class ProfileFlags:
    """Flags of `disagg profile`."""

    url: Annotated[str, typer.Option("--url", help="Base URL of the server.")] = "http://127.0.0.1:8000"
    api_key_file: ApiKeyFlag = None
    role: Annotated[
        Role | None,
        typer.Option("--role", help="Record a group of this role [decode or colocated]."),
    ] = None
    group: Annotated[
        str | None, typer.Option("--group", metavar="NAME", help="Record this group, such as decode-2.")
    ] = None
    rank: Annotated[int, typer.Option("--rank", help="Rank of the group.")] = 0
    steps: Annotated[int, typer.Option("--steps", help="Steps to record.")] = 100
    limit_s: Annotated[float, typer.Option("--limit-s", help="Time within which the steps must come.")] = 60.0
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Summarize this trace instead; needs no server."),
    ] = None
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for summary, picture and trace.")
    ] = Path("profile")

    def check(self) -> None:
        """Raises `ConfigError` for values that no server accepts."""
        if not 1 <= self.steps <= MAX_STEPS:
            raise ConfigError(f"--steps {self.steps}: give 1 to {MAX_STEPS}")
        if not 0 < self.limit_s <= MAX_LIMIT_S:
            raise ConfigError(f"--limit-s {self.limit_s:g}: give up to {MAX_LIMIT_S:g} seconds")
        if self.role is not None and self.group is not None:
            raise ConfigError("--role and --group: give one of them")


@with_options(ProfileFlags)
def profile(options: ProfileFlags) -> None:
    """Record some steps of a running rank: how busy its GPU is, and what the host does in its pauses."""
    options.check()
    from disagg.core.folders import make_folder

    make_folder(options.out)
    if options.trace is None:
        _show(_recorded(options), options.out)
        return
    from disagg.core.profile.summary import summarize_file

    _show(summarize_file(options.trace), options.out)


def _recorded(options: ProfileFlags) -> TraceSummary:
    from disagg.top.client import StatusClient

    key_file = options.api_key_file
    api_key = None if key_file is None else first_key("--api-key-file", key_file)
    body = {name: getattr(options, name) for name in ("role", "group", "rank", "steps", "limit_s")}
    with StatusClient(options.url, api_key) as client, _steps_bar(options.steps) as recorded:
        return client.profile(body, recorded)


def _show(summary: TraceSummary, out: Path) -> None:
    from disagg.top.profile_table import profile_tables
    from disagg.top.watch import console

    console().print(profile_tables(summary))
    _write(summary, out)


def _write(summary: TraceSummary, out: Path) -> None:
    """Writes summary and picture to the folder, and copies the trace if it is on this host."""
    import msgspec

    from disagg.core.folders import writing
    from disagg.report.profile import draw_profile

    with writing("--out", out):
        text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(summary, picture=None)))
        (out / SUMMARY).write_bytes(text + b"\n")
        draw_profile(summary, out / PICTURE)
        trace = Path(summary.trace)
        local = summary.host == socket.gethostname() and trace.is_file()
        if local and trace.parent.resolve() != out.resolve():
            shutil.copyfile(trace, out / trace.name)
    where = str(out / trace.name) if local else f"{summary.host}:{summary.trace}"
    print(f"{out / SUMMARY}, {out / PICTURE}")
    print(f"{where} (open it at ui.perfetto.dev)")


@contextmanager
def _steps_bar(steps: int) -> Iterator[Callable[[int], None]]:
    """Shows progress on stderr within the block. The yielded function takes the number of recorded steps."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("waiting for the rank", total=steps)

        def show(recorded: int) -> None:
            bar.update(task, completed=recorded, description="recording" if recorded else "waiting for steps")

        yield show
