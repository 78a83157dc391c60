"""`disagg bench decode`: flags for `disagg.bench.engine.decode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from disagg.cli.bench.common import (
    DeviceFlag,
    OutputFlags,
    PageSizeFlag,
    RecurrentFlag,
    RepeatsFlag,
    device_of,
    name_of,
    parse_numbers,
    progress,
    show_results,
)
from disagg.cli.options import with_options


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Flags of `disagg bench decode`."""

    random_init: Annotated[
        str | None,
        typer.Option(
            "--random-init", metavar="NAME", help="The model's shape [llama-3.1-8b; a small one on a CPU]."
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Element type of weights and KV."),
    ] = "bfloat16"
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests in the step.")] = 64
    context_tokens: Annotated[
        int | None,
        typer.Option("--context-tokens", min=1, help="Context of each request [2048; 128 on a CPU]."),
    ] = None
    max_context_tokens: Annotated[
        int,
        typer.Option(
            "--max-context-tokens",
            min=0,
            help="Context for which the block table is sized, as in a server [--context-tokens].",
        ),
    ] = 0
    page_size: PageSizeFlag = 16
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Also measure decode and prefill steps with model.deterministic."
        ),
    ] = False
    prefill_tokens: Annotated[
        int, typer.Option("--prefill-tokens", min=1, help="Tokens of a prefill step, with --deterministic.")
    ] = 4096
    prompt_tokens: Annotated[
        str,
        typer.Option(
            "--prompt-tokens",
            metavar="N,N,...",
            help="Also measure steps that compute N more tokens, of a new prompt.",
        ),
    ] = ""
    recurrent_kernels: RecurrentFlag = "auto"
    peer: Annotated[
        Literal["none", "transformers"],
        typer.Option("--peer", help="transformers: also measure transformers' own step, for comparison."),
    ] = "none"
    repeats: RepeatsFlag = 9
    device: DeviceFlag = "auto"
    output: OutputFlags


@with_options(DecodeOptions)
def decode(options: DecodeOptions) -> None:
    """Measure a decode step of a whole model: the rate at which weights and KV are read, as a share of a plain
    copy's rate."""
    import torch

    from disagg.bench.engine.decode import DecodeBench, run

    device = device_of(options.device)
    cuda = device.type == "cuda"
    bench = DecodeBench(
        device,
        options.random_init or ("llama-3.1-8b" if cuda else "tiny-llama"),
        getattr(torch, options.dtype),
        options.batch,
        options.context_tokens or (2048 if cuda else 128),
        options.page_size,
        options.repeats,
        options.deterministic,
        options.prefill_tokens,
        options.max_context_tokens,
        options.recurrent_kernels,
        options.peer,
        parse_numbers("--prompt-tokens", options.prompt_tokens) if options.prompt_tokens else (),
    )
    with progress() as update:
        results = run(bench, update)
    title = f"decode steps in {options.dtype} on {name_of(device)}"
    show_results("decode", title, results, options.output)
