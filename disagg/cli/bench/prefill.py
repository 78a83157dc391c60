"""`disagg bench prefill`: flags for `disagg.bench.engine.prefill`."""

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
class PrefillOptions:
    """Flags of `disagg bench prefill`."""

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
    tokens: Annotated[str, typer.Option("--tokens", metavar="N,...", help="Tokens of each step.")] = (
        "64,256,512,1024,2048"
    )
    cached_tokens: Annotated[
        int,
        typer.Option(
            "--cached-tokens", min=0, help="Tokens of the prompt that are in the KV cache before the step."
        ),
    ] = 0
    page_size: PageSizeFlag = 16
    recurrent_kernels: RecurrentFlag = "auto"
    repeats: RepeatsFlag = 9
    device: DeviceFlag = "auto"
    output: OutputFlags


@with_options(PrefillOptions)
def prefill(options: PrefillOptions) -> None:
    """Measure prefill steps of a whole model, launched kernel by kernel and recorded as CUDA graphs."""
    import torch

    from disagg.bench.engine.prefill import PrefillBench, run

    device = device_of(options.device)
    bench = PrefillBench(
        device,
        options.random_init or ("llama-3.1-8b" if device.type == "cuda" else "tiny-llama"),
        getattr(torch, options.dtype),
        parse_numbers("--tokens", options.tokens),
        options.cached_tokens,
        options.page_size,
        options.repeats,
        options.recurrent_kernels,
    )
    with progress() as update:
        results = run(bench, update)
    title = f"prefill steps in {options.dtype} on {name_of(device)}"
    show_results("prefill", title, results, options.output)
