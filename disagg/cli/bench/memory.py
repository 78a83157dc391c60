"""`disagg bench memory`: flags for `disagg.bench.engine.memory`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from disagg.cli.bench.common import OutputFlags, PageSizeFlag, RepeatsFlag, progress, show_results
from disagg.cli.options import with_options


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Flags of `disagg bench memory`."""

    page_size: PageSizeFlag = 16
    cached_tokens: Annotated[
        int, typer.Option("--cached-tokens", min=1, help="Tokens in the prefix cache.")
    ] = 100_000
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens of a prompt; half of them are cached.")
    ] = 4096
    eviction: Annotated[
        Literal["lru", "lfu", "fifo"], typer.Option("--eviction", help="Policy of the prefix cache.")
    ] = "lru"
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests that decode together.")] = 256
    input_tokens: Annotated[
        str,
        typer.Option(
            "--input-tokens", help="Prompts of these requests: 512, 128-1024, lognormal:MEAN,SIGMA,MAX."
        ),
    ] = "sharegpt-like"
    output_tokens: Annotated[
        str,
        typer.Option("--output-tokens", help="Answers of these requests, in the notation of --input-tokens."),
    ] = "sharegpt-like"
    repeats: RepeatsFlag = 9
    output: OutputFlags


@with_options(MemoryOptions)
def memory(options: MemoryOptions) -> None:
    """Measure the host time of KV management, and the share of slots that pages waste. Needs no device."""
    from disagg.bench.engine.memory import MemoryBench, run
    from disagg.bench.serve.lengths import parse_lengths

    bench = MemoryBench(
        page_size=options.page_size,
        cached_tokens=options.cached_tokens,
        prompt_tokens=options.prompt_tokens,
        requests=options.requests,
        input=parse_lengths("--input-tokens", options.input_tokens),
        output=parse_lengths("--output-tokens", options.output_tokens),
        eviction=options.eviction,
        repeats=options.repeats,
    )
    with progress() as update:
        results = run(bench, update)
    sizes = f"{options.prompt_tokens} of {options.cached_tokens} cached tokens"
    title = f"KV memory, pages of {options.page_size}: {sizes}; decode of {options.requests}"
    show_results("memory", title, results, options.output)
