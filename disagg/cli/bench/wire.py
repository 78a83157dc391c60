"""`disagg bench wire`: flags for `disagg.bench.transfer.wire`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from disagg.cli.bench.common import OutputFlags, RepeatsFlag, parse_numbers, progress, show_results
from disagg.cli.options import with_options
from disagg.core.config.read import parse_bytes


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """Flags of `disagg bench wire`."""

    sizes: Annotated[
        str, typer.Option("--sizes", help="Sizes of a message, comma-separated, such as 64KiB.")
    ] = "64KiB,1MiB,16MiB,64MiB"
    lanes: Annotated[str, typer.Option("--lanes", help="Numbers of TLS connections, comma-separated.")] = (
        "1,2"
    )
    most: Annotated[str, typer.Option("--most", metavar="SIZE", help="Bytes of one measurement.")] = "512MiB"
    repeats: RepeatsFlag = 5
    output: OutputFlags


@with_options(WireOptions)
def wire(options: WireOptions) -> None:
    """Measure the KV transports TLS and UCX between two processes, in host memory, with plain TCP as the ceiling."""
    from disagg.bench.transfer.wire import WireBench, run

    bench = WireBench(
        tuple(parse_bytes(size.strip()) for size in options.sizes.split(",")),
        parse_numbers("--lanes", options.lanes),
        parse_bytes(options.most),
        options.repeats,
    )
    with progress() as update:
        results = run(bench, update)
    title = "messages between two processes of this host, host memory"
    show_results("wire", title, results, options.output)
