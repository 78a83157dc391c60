"""`disagg bench router`: flags for `disagg.bench.router`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from disagg.cli.bench.common import OutputFlags, RepeatsFlag, parse_numbers, progress, show_results
from disagg.cli.options import with_options


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Flags of `disagg bench router`."""

    streams: Annotated[str, typer.Option("--streams", help="Open streams, comma-separated.")] = (
        "100,1000,10000"
    )
    groups: Annotated[str, typer.Option("--groups", help="Simulated groups, comma-separated.")] = "2,20,200"
    rate: Annotated[float, typer.Option("--rate", min=1.0, help="Tokens a second over all streams.")] = 5000.0
    window_tokens: Annotated[
        int, typer.Option("--window-tokens", min=1, help="Tokens of one measurement.")
    ] = 20_000
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of one measurement.")] = 500
    prompt_tokens: Annotated[int, typer.Option("--input-tokens", min=1, help="Tokens of a prompt.")] = 64
    repeats: RepeatsFlag = 3
    output: OutputFlags


@with_options(RouterOptions)
def router(options: RouterOptions) -> None:
    """Measure one router's CPU time per request and per token, with simulated groups and thousands of streams."""
    from disagg.bench.router.run import RouterBench, run

    bench = RouterBench(
        streams=parse_numbers("--streams", options.streams),
        groups=parse_numbers("--groups", options.groups),
        tokens_per_s=options.rate,
        window_tokens=options.window_tokens,
        requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        repeats=options.repeats,
    )
    with progress() as update:
        results = run(bench, update)
    show_results("router", "CPU time of one router", results, options.output)
