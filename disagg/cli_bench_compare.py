"""`disagg bench serve --compare`: its flags, and what is printed and written; the progress of both kinds of run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from disagg.cli_bench_common import Shown, show
from disagg.cli_run import configuration
from disagg.core.errors import ConfigError

if TYPE_CHECKING:
    from disagg.bench.serve.bench import ServeBench
    from disagg.bench.serve.compare import Tell
    from disagg.bench.serve.load import Counts

CompareFlag = Annotated[
    Literal["colocated"] | None,
    typer.Option(
        "--compare",
        help="Start a split system here, then a colocated one of as many ranks, and put the same load on both.",
    ),
]
RatesFlag = Annotated[
    str | None,
    typer.Option("--rates", metavar="R,R,...", help="With --compare: an open loop at each of these rates."),
]
ColocatedTpFlag = Annotated[
    int | None,
    typer.Option("--colocated-tp", min=1, help="With --compare: ranks of a colocated group [--decode-tp]."),
]
CheckEqualFlag = Annotated[
    bool,
    typer.Option(
        "--check-equal",
        help="With --compare: greedy answers of both must be equal, but for rounding without --deterministic; "
        "else exit code 1.",
    ),
]
FLAGS = (
    "deterministic",
    "rates",
    "colocated_tp",
    "check_equal",
    "random_init",
    "dtype",
    "prefill_tp",
    "decode_tp",
    "device",
    "chunk_tokens",
    "config",
    "settings",
)
"""Parameters of `bench serve` that need --compare."""


def check_flags(given: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for parameters, by name, that are for another kind of run."""
    if given["compare"] is None:
        wrong = [name for name in FLAGS if given[name] or (name == "deterministic" and given[name] is False)]
        if wrong:
            flag = "set" if wrong[0] == "settings" else wrong[0].replace("_", "-")
            raise ConfigError(f"--{flag} needs --compare: without it a server that runs already is asked")
    elif given["url"] is not None or given["api_key_file"] is not None:
        raise ConfigError("--compare starts its own servers: leave --url and --api-key-file out")


def parse_rates(text: str) -> list[float]:
    """`1,2.5,4` in ascending order. Raises `ConfigError`."""
    try:
        rates = sorted({float(one) for one in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not 0 < rates[0] <= rates[-1] < float("inf"):
        raise ConfigError(f"--rates {text}: give numbers above 0 with commas between them, as 1,2,4")
    return rates


@contextmanager
def progress() -> Iterator[Tell]:
    """A bar while requests are under way; of unknown length in a closed loop that ends by time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    words, state = TextColumn("{task.description}"), TextColumn("{task.fields[state]}")
    columns = (words, BarColumn(), MofNCompleteColumn(), state, TimeElapsedColumn())
    # Drawn twice a second only: it takes time from the client, and with it from its clock's truth.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=None, state="")

        def tell(what: str, counts: Counts | None, total: int | None) -> None:
            ended, state = 0, ""
            if counts is not None:
                ended = counts.ended
                state = f"{counts.running} running, {counts.refused} refused, {counts.failed} failed"
            bar.update(task, completed=ended, total=total, description=what, state=state)

        yield tell


def run_compare(given: Mapping[str, Any], loads: list[ServeBench]) -> int:
    """The command's exit code. `given` are its parameters by name; `loads` in the order in which they run."""
    from disagg.bench.serve.compare import CompareBench, both_systems, compare
    from disagg.bench.serve.compare_chart import write_compare_chart
    from disagg.bench.serve.compare_report import comparison_json, comparison_lines, comparison_table
    from disagg.bench.serve.served import served
    from disagg.reference import comparable

    config = configuration(dict(given))
    if given["check_equal"]:
        config = comparable(config, given["deterministic"])
    systems = both_systems(config, given["colocated_tp"])
    bench = CompareBench(systems, tuple(loads), given["check_equal"])
    with progress() as tell:
        found = compare(bench, served, tell)
    shown = Shown(
        lambda: comparison_json(found),
        lambda: comparison_table(found),
        comparison_lines(found),
        lambda path: write_compare_chart(path, found),
    )
    show("compare", shown, given["out"], given["as_json"])
    equal = found.equal
    differ = equal is not None and bool(equal.differences) and not equal.within_rounding
    return 1 if not found.answered or differ or (given["strict"] and not found.faultless) else 0
