"""`disagg bench overload`: flags, then over to `disagg.bench.serve.overload`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli_bench_common import JsonFlag, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.bench.serve.overload import Phase
    from disagg.bench.serve.summary import Spread


_TIMEOUT_S = 30.0
_FEWEST_TOKENS = 16


def overload(
    url: Annotated[str, typer.Option("--url", help="As clients have it, with /v1.")],
    rate: Annotated[
        float, typer.Option("--rate", min=0.1, help="Requests a second: ten times too many, say.")
    ],
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="Of each load.")] = 20.0,
    idle_rate: Annotated[
        float, typer.Option("--idle-rate", min=0.1, help="Requests a second before and after.")
    ] = 3.0,
    prompt_tokens: Annotated[int, typer.Option("--input-tokens", min=1, help="Most of a prompt.")] = 64,
    answer_tokens: Annotated[int, typer.Option("--output-tokens", min=1, help="Of each answer.")] = 16,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Its first line is the key.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals and prompts.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """What accepted and refused requests take when far more come than a server can answer.

    Before and after there is little load, in the same run: that is what the figures are to be compared with.
    """
    import msgspec
    import uvloop

    from disagg.bench.serve.bench import check_url
    from disagg.bench.serve.client import Client
    from disagg.bench.serve.load import Clock
    from disagg.bench.serve.overload import Offer, run, slowdown
    from disagg.core.key_file import first_key

    base = check_url(url)
    key = None if api_key_file is None else first_key("--api-key-file", api_key_file)

    async def measured() -> list[Phase]:
        async with Client(base, key, False, _TIMEOUT_S, Clock()) as client:
            model = await client.model()
        load = Offer(
            base, model, key, (min(_FEWEST_TOKENS, prompt_tokens), prompt_tokens), answer_tokens, seed
        )
        with progress() as say:
            return await run(load, rate, seconds, idle_rate, say)

    phases = uvloop.run(measured())
    if as_json:
        print(msgspec.json.encode(phases).decode())
        return
    _print(phases)
    times = slowdown(phases)
    if times is not None:
        print(f"an answer that was let in took {times:.2f} times as long as on the idle server (p50)")


def _print(phases: Sequence[Phase]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in (
        "ms",
        "a second",
        "answered",
        "p50 / p99",
        "refused",
        "p50 / p99",
        "failed",
        "sent late, p99",
    ):
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


def _short(found: Spread | None) -> str:
    return "" if found is None else f"{1e3 * found.p50:.1f} / {1e3 * found.p99:.1f}"
