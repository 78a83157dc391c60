"""Shared parts of the commands of `disagg bench`: flags, the device, the progress line, and the output of results."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.core.config.model import RecurrentName
from disagg.core.errors import ConfigError
from disagg.core.folders import make_folder, writing

if TYPE_CHECKING:
    from rich.table import Table

    from disagg.bench.common.report import Result


def _made(out: Path | None) -> Path | None:
    """Creates the folder of `--out` before the measurement, so that a bad path fails at once."""
    if out is not None:
        make_folder(out)
    return out


DeviceFlag = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
RepeatsFlag = Annotated[int, typer.Option("--repeats", min=1, help="Measurements of each figure.")]
LayersFlag = Annotated[int, typer.Option("--layers", min=1, help="Layers of the model.")]
PageSizeFlag = Annotated[int, typer.Option("--page-size", min=1, help="Tokens of a page.")]
RecurrentFlag = Annotated[
    RecurrentName,
    typer.Option("--recurrent-kernels", help="Implementation of recurrent layers (model.recurrent_kernels)."),
]
CheckpointFlag = Annotated[
    str | None, typer.Option("--model", metavar="DIR", help="Folder of a Hugging Face checkpoint.")
]
WeightsDTypeFlag = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
DEFINITIONS = "exact definitions of the figures: --definitions, or the JSON file of --out"
_LOG_COLUMNS = 150
"""Width of tables in characters when stdout is not a terminal. Every column fits."""


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Flags for the form and the folder of the results."""

    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the JSON file and the chart.", callback=_made),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False


@dataclass(frozen=True)
class Shown:
    """The results of a run in each output format, most of them as functions that produce it."""

    json: Callable[[], str]
    table: Callable[[], Table]
    lines: Iterable[str]
    """Lines of text below the table."""
    chart: Callable[[Path], None]
    """Writes the chart as a PNG to a path."""


def show(name: str, shown: Shown, output: OutputFlags) -> None:
    """Prints the table and the lines, or only the JSON. Writes `bench_NAME.json` and `.png` to the folder of `--out`.

    Raises `ConfigError` when the files cannot be written.
    """
    text = shown.json() if output.as_json or output.out is not None else ""
    if output.as_json:
        print(text)
    else:
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console = Console(width=_LOG_COLUMNS)
        console.print(shown.table())
        for line in shown.lines:
            print(line)
    if output.out is not None:
        figures, chart = (output.out / f"bench_{name}.{end}" for end in ("json", "png"))
        with writing("--out", output.out):
            figures.write_text(text + "\n")
            shown.chart(chart)
        print(f"figures: {figures}, chart: {chart}", file=sys.stderr if output.as_json else sys.stdout)


def show_results(
    name: str, title: str, results: Sequence[Result], output: OutputFlags, *, definitions: bool = True
) -> None:
    """Calls `show` with the table, chart and JSON of a micro-benchmark's results.

    `definitions`: whether to print the definitions of the figures below the table. The JSON always contains them.
    """
    from disagg.bench.common.report import as_json, definition_lines, results_table, write_chart

    shown = Shown(
        lambda: as_json(results),
        lambda: results_table(title, results),
        [f"- {line}" for line in definition_lines(results)] if definitions else [DEFINITIONS],
        lambda path: write_chart(path, title, results),
    )
    show(name, shown, output)


def parse_numbers(flag: str, text: str) -> tuple[int, ...]:
    """Parses a flag's list of whole numbers, such as `1,2,3`. Raises `ConfigError` for other text."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"{flag} {text}: give whole numbers separated by commas") from exc


def device_of(name: str) -> Any:
    """Returns the `torch.device` for a value of `--device`. Raises `ConfigError` if it is unknown or has no GPU."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {name}: give auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU; run `disagg doctor` for the reason")
    cuda = torch.cuda.is_available() and name != "cpu"
    return torch.device("cuda", 0) if cuda else torch.device("cpu")


def name_of(device: Any) -> str:
    """Returns the name of a `torch.device` for titles."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows the current measurement in a line on stderr. The yielded function sets the text of the line.

    Without a terminal, see `latest_lines`.
    """
    from rich.console import Console

    from disagg.core.config.read import LogConfig
    from disagg.core.log import configure

    configure(LogConfig(level="warning"))
    console = Console(stderr=True)
    if not console.is_terminal:
        with latest_lines(progress_lines()) as update:
            yield update
        return
    with console.status("starting") as status:
        yield lambda text: status.update(f"measuring: {text}")


def progress_lines() -> Callable[[str], None]:
    """Returns a function that prints a line to stderr, with the seconds since this call. Needs no terminal."""
    begun_s = time.monotonic()

    def report_line(text: str) -> None:
        print(f"{time.monotonic() - begun_s:7.1f} s  {text}", file=sys.stderr, flush=True)

    return report_line


@contextmanager
def latest_lines(report: Callable[[str], None], interval_s: float = 5.0) -> Iterator[Callable[[str], None]]:
    """Yields a function that takes the current text. A thread reports the text every `interval_s` if it has changed.

    So the last line of a command that hangs names the measurement in which it hangs.
    """
    latest = [""]
    ended = threading.Event()

    def report_changes() -> None:
        shown = ""
        while not ended.wait(interval_s):
            if latest[0] != shown:
                shown = latest[0]
                report(shown)

    def update(text: str) -> None:
        latest[0] = text

    thread = threading.Thread(target=report_changes, name="progress", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        ended.set()
        thread.join()
