"""`disagg bench swap`: flags for `disagg.bench.kernels.swap`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from disagg.cli.bench.common import (
    DeviceFlag,
    LayersFlag,
    OutputFlags,
    PageSizeFlag,
    RepeatsFlag,
    device_of,
    name_of,
    progress,
    show_results,
)
from disagg.cli.options import with_options


@dataclass(frozen=True, kw_only=True)
class SwapOptions:
    """Flags of `disagg bench swap`."""

    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Tokens of the request [8192; 512 on a CPU].")
    ] = None
    kv_heads: Annotated[
        int, typer.Option("--kv-heads", min=1, help="KV heads of the rank, 128 x 2 bytes each.")
    ] = 8
    layers: LayersFlag = 32
    page_size: PageSizeFlag = 16
    repeats: RepeatsFlag = 9
    device: DeviceFlag = "auto"
    output: OutputFlags


@with_options(SwapOptions)
def swap(options: SwapOptions) -> None:
    """Measure swaps of a preempted request's pages to pinned host memory and back, as a share of a plain copy."""
    from disagg.bench.kernels.swap import SwapBench, run

    device = device_of(options.device)
    tokens = options.tokens or (8192 if device.type == "cuda" else 512)
    bench = SwapBench(device, tokens, options.kv_heads, options.layers, options.page_size, options.repeats)
    with progress() as update:
        results = run(bench, update)
    title = f"pages of {bench.nbytes >> 20} MiB out and back on {name_of(device)}"
    show_results("swap", title, results, options.output)
