"""`disagg bench transfer`: flags for `disagg.bench.transfer.pools` and the comparison with NIXL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from disagg.cli.bench.common import (
    DeviceFlag,
    LayersFlag,
    OutputFlags,
    RepeatsFlag,
    device_of,
    name_of,
    parse_numbers,
    progress,
    show_results,
)
from disagg.cli.bench.path import PathFlags
from disagg.cli.options import with_options
from disagg.core.errors import ConfigError

if TYPE_CHECKING:
    from disagg.bench.transfer.pools import TransferBench


@dataclass(frozen=True, kw_only=True)
class PoolFlags:
    """Flags for the two groups and their KV pools."""

    prefill_tp: Annotated[int, typer.Option("--prefill-tp", min=1, help="Sending ranks.")] = 1
    decode_tp: Annotated[int, typer.Option("--decode-tp", min=1, help="Receiving ranks.")] = 1
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=1, help="KV heads of the whole model.")] = 8
    layers: LayersFlag = 32
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, help="Elements of one head.")] = 128
    dtype: Annotated[str, typer.Option("--dtype", help="Element type of the KV, by torch's name.")] = (
        "bfloat16"
    )
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Tokens of a request, comma-separated [128,4096; 128 on a CPU]."),
    ] = None
    prefill_page_size: Annotated[
        int, typer.Option("--prefill-page-size", min=1, help="Tokens in one page of the sender.")
    ] = 16
    decode_page_size: Annotated[
        int, typer.Option("--decode-page-size", min=1, help="Tokens in one page of the receiver.")
    ] = 16
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=2, help="Requests in flight in the back-to-back measurement.")
    ] = 8


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """Flags of `disagg bench transfer`."""

    pools: PoolFlags
    path: PathFlags
    peer: Annotated[
        Literal["none", "nixl"],
        typer.Option("--peer", help="nixl: also measure the same transfer by NIXL, for comparison."),
    ] = "none"
    nixl_threads: Annotated[
        int,
        typer.Option("--nixl-threads", min=0, help="Number of threads with which NIXL posts descriptors."),
    ] = 4
    repeats: RepeatsFlag = 9
    device: DeviceFlag = "auto"
    output: OutputFlags


@with_options(TransferOptions)
def transfer(options: TransferOptions) -> None:
    """Measure KV transfers from pool to pool between two groups, as a share of a plain copy between their devices."""
    from disagg.bench.nixl.peer import compare, require
    from disagg.bench.transfer.pools import run
    from disagg.core.types import DTYPE_BYTES

    pools = options.pools
    if pools.dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {pools.dtype}: give one of {', '.join(DTYPE_BYTES)}")
    if options.peer == "nixl":
        require()
    device = device_of(options.device)
    bench = _bench(options, device)
    with progress() as update:
        results = run(bench, update)
        if options.peer == "nixl":
            results = compare(bench, results, options.nixl_threads, update)
    title = f"pool to pool, TP {pools.prefill_tp} -> {pools.decode_tp}, {pools.dtype} on {name_of(device)}"
    show_results("transfer", title, results, options.output)


def _bench(options: TransferOptions, device: Any) -> TransferBench:
    from disagg.bench.transfer.pools import TransferBench
    from disagg.core.config.read import Config
    from disagg.core.types import KVLayout

    pools, path, cuda = options.pools, options.path, device.type == "cuda"
    return TransferBench(
        layout=KVLayout(pools.layers, pools.kv_heads, pools.head_dim, pools.dtype),
        tokens=parse_numbers("--tokens", pools.tokens or ("128,4096" if cuda else "128")),
        in_flight=pools.in_flight,
        repeats=options.repeats,
        cuda=cuda,
        prefill_tp=pools.prefill_tp,
        decode_tp=pools.decode_tp,
        prefill_page_size=pools.prefill_page_size,
        decode_page_size=pools.decode_page_size,
        config=Config(transfer=path.transfer_config(device), transport=path.transport_config()),
    )
