"""`disagg bench overload`: flags for `disagg.bench.serve.overload`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.bench.common import progress
from disagg.cli.flags import ApiKeyFlag
from disagg.cli.options import with_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.bench.serve.overload import LoadPhase
    from disagg.bench.serve.summary import Spread


_TIMEOUT_S = 30.0
_FEWEST_TOKENS = 16
_COLUMNS = (
    "ms",
    "a second",
    "answered",
    "p50 / p99",
    "refused",
    "p50 / p99",
    "failed",
    "sent late, p99",
)


@dataclass(frozen=True, kw_only=True)
class OverloadOptions:
    """Flags of `disagg bench overload`."""

    url: Annotated[str, typer.Option("--url", help="Base URL of the API, with /v1.")]
    rate: Annotated[
        float,
        typer.Option(
            "--rate", min=0.1, help="Requests a second under overload, e.g. ten times the server's capacity."
        ),
    ]
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="Duration of each load.")] = 20.0
    idle_rate: Annotated[
        float, typer.Option("--idle-rate", min=0.1, help="Requests a second before and after the overload.")
    ] = 3.0
    prompt_tokens: Annotated[
        int, typer.Option("--input-tokens", min=1, help="Maximum length of prompts.")
    ] = 64
    answer_tokens: Annotated[int, typer.Option("--output-tokens", min=1, help="Tokens of each answer.")] = 16
    api_key_file: ApiKeyFlag = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of arrivals and prompts.")] = 0
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False


@with_options(OverloadOptions)
def overload(options: OverloadOptions) -> None:
    """Measure the latency of accepted and rejected requests when many more arrive than a server can answer.

    For comparison, the run has a light load before and after the overload.
    """
    import msgspec
    import uvloop

    from disagg.bench.serve.overload import slowdown

    phases = uvloop.run(_measure(options))
    if options.as_json:
        print(msgspec.json.encode(phases).decode())
        return
    _print(phases)
    times = slowdown(phases)
    if times is not None:
        print(f"an accepted request took {times:.2f} times as long as on the idle server (p50)")


async def _measure(options: OverloadOptions) -> list[LoadPhase]:
    from disagg.bench.serve.bench import check_url
    from disagg.bench.serve.client import ServeClient
    from disagg.bench.serve.load import RunClock
    from disagg.bench.serve.overload import Offer, run
    from disagg.core.key_file import first_key

    url = check_url(options.url)
    key = None if options.api_key_file is None else first_key("--api-key-file", options.api_key_file)
    async with ServeClient(url, key, False, _TIMEOUT_S, RunClock()) as client:
        model = await client.model()
    tokens = (min(_FEWEST_TOKENS, options.prompt_tokens), options.prompt_tokens)
    load = Offer(url, model, key, tokens, options.answer_tokens, options.seed)
    with progress() as update:
        return await run(load, options.rate, options.seconds, options.idle_rate, update)


def _print(phases: Sequence[LoadPhase]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "ms" else "right")
    for one in phases:
        late = "" if one.late_s is None else f"{1e3 * one.late_s.p99:.1f}"
        table.add_row(
            one.name,
            f"{one.rate:g}",
            str(one.answered),
            _short(one.answered_s),
            str(one.refused),
            _short(one.refused_s),
            str(one.failed),
            late,
        )
    Console(width=120).print(table)


def _short(spread: Spread | None) -> str:
    return "" if spread is None else f"{1e3 * spread.p50:.1f} / {1e3 * spread.p99:.1f}"
