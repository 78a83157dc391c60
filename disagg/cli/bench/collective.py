"""`disagg bench collective`: flags for `disagg.bench.engine.collective`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from disagg.cli.bench.common import OutputFlags, RepeatsFlag, parse_numbers, progress, show_results
from disagg.cli.options import with_options


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """Flags of `disagg bench collective`."""

    ranks: Annotated[int, typer.Option("--ranks", min=2, help="Number of ranks, each a process.")] = 2
    sizes: Annotated[str, typer.Option("--sizes", help="Bytes of a tensor, comma-separated.")] = (
        "8192,65536,1048576,16777216"
    )
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32"
    repeats: RepeatsFlag = 5
    output: OutputFlags


@with_options(CollectiveOptions)
def collective(options: CollectiveOptions) -> None:
    """Measure all-reduces over CPU ranks, in shared memory and with gloo."""
    from disagg.bench.engine.collective import CollectiveBench, run

    sizes = parse_numbers("--sizes", options.sizes)
    bench = CollectiveBench(options.ranks, sizes, options.dtype, options.repeats)
    with progress() as update:
        results = run(bench, update)
    title = f"all-reduce of {options.dtype} over {options.ranks} ranks on the CPU"
    show_results("collective", title, results, options.output)
