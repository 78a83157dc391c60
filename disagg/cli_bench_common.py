"""What the commands of `disagg bench` share: flags, the device, progress, what is printed and written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.core.errors import ConfigError
from disagg.core.folders import make_folder, writing

if TYPE_CHECKING:
    from rich.table import Table


def _made(out: Path | None) -> Path | None:
    """Before anything is measured: a folder that cannot be had would cost the whole run."""
    if out is not None:
        make_folder(out)
    return out


OutFlag = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder for the JSON file and the chart.", callback=_made),
]
DeviceFlag = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="For machines: print the figures as JSON.")]
ComparedDeterministicFlag = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="A request's answer is the same bits whatever else is in the batch [on a GPU: on].",
        show_default=False,
    ),
]
"""Of commands that compare tokens; what it means when left out: `disagg.reference.comparable`."""
_LOG_COLUMNS = 150
"""A log has room for every column."""


@dataclass(frozen=True)
class Shown:
    """What a run found, in each form that it is shown in."""

    json: Callable[[], str]
    table: Callable[[], Table]
    lines: Iterable[str]
    """Below the table."""
    chart: Callable[[Path], None]
    """Writes a PNG."""


def show(name: str, found: Shown, out: Path | None, print_json: bool) -> None:
    """Prints table and lines, or the JSON alone; with `out`, a folder, writes `bench_NAME.json` and `.png` there.

    Raises `ConfigError` when they cannot be written.
    """
    text = found.json() if print_json or out is not None else ""
    if print_json:
        print(text)
    else:
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console = Console(width=_LOG_COLUMNS)
        console.print(found.table())
        for line in found.lines:
            print(line)
    if out is not None:
        figures, chart = out / f"bench_{name}.json", out / f"bench_{name}.png"
        with writing("--out", out):
            figures.write_text(text + "\n")
            found.chart(chart)
        print(f"figures: {figures}, chart: {chart}", file=sys.stderr if print_json else sys.stdout)


def device_of(name: str) -> Any:
    """The `torch.device` that `--device` names. Raises `ConfigError`."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {name}: give auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; `disagg doctor` says why")
    cuda = torch.cuda.is_available() and name != "cpu"
    return torch.device("cuda", 0) if cuda else torch.device("cpu")


def name_of(device: Any) -> str:
    """What the machine calls a `torch.device`."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line that says what is being measured now, while it is. Logs go to stderr too: stdout has the results."""
    from rich.console import Console

    from disagg.core.config import LogConfig
    from disagg.core.log import configure

    configure(LogConfig(level="warning"))
    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(f"measuring: {text}")
