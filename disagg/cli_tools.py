"""`disagg doctor`, `plan`, `keys` and `version`: the commands that serve nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg.core.config import parse_bytes
from disagg.core.errors import ConfigError
from disagg.core.folders import writing

GRACE_S, MAX_GRACE_S = 120.0, 30 * 86400.0
"""Between the rotation of a key file and the first use of the fresh keys."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON list.")] = False,
) -> None:
    """Check this machine; exit code 1 if something fails."""
    import msgspec

    from disagg.doctor import all_probes, examine, findings_table, is_healthy

    findings = examine(all_probes())
    if as_json:
        print(json.dumps(msgspec.to_builtins(findings), indent=2))
    else:
        _show(findings_table(findings))
    if not is_healthy(findings):
        raise typer.Exit(1)


def plan(
    prefill_tp: Annotated[int, typer.Option("--prefill-tp", help="Ranks that prefill.")],
    decode_tp: Annotated[int, typer.Option("--decode-tp", help="Ranks that decode.")],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Take the shape of this checkpoint.")
    ] = None,
    random_init: Annotated[
        str | None, typer.Option("--random-init", metavar="NAME", help="Take the shape of this architecture.")
    ] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="KV heads, without a model.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Layers, without a model.")] = None,
    prefill_pp: Annotated[
        int, typer.Option("--prefill-pp", help="Pipeline stages of the prefill group.")
    ] = 1,
    decode_pp: Annotated[int, typer.Option("--decode-pp", help="Pipeline stages of the decode group.")] = 1,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Elements of one head.")] = 128,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Element type of the KV cache, without a model.")
    ] = "bfloat16",
    decode_kv_dtype: Annotated[
        str | None,
        typer.Option("--decode-kv-dtype", help="Of the decode group, in 8 bits; quantized where it is sent."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Length of the prompt.")] = 8192,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of one prefill step.")] = 256,
    layer_groups: Annotated[int, typer.Option("--layer-groups", help="Groups a chunk is sent in.")] = 4,
    ring_bytes: Annotated[
        str, typer.Option("--ring-bytes", metavar="SIZE", help="Receive ring; a segment takes a quarter.")
    ] = "32MiB",
    gpu_memory_gb: Annotated[
        float,
        typer.Option("--gpu-memory-gb", metavar="GB", help="With a model: the KV cache that fits such GPUs."),
    ] = 0.0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.png", help="Draw it, too.")] = None,
) -> None:
    """Show what a prompt moves between two groups, and what fits their memory."""
    import msgspec

    from disagg.core.config import TransferConfig
    from disagg.core.types import KVLayout
    from disagg.plan import PlanRequest, compute_plan, plan_lines

    if out is not None and out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: the picture is a PNG; give a name that ends in .png")
    size = parse_bytes(ring_bytes)
    if model is not None or random_init is not None:
        named = {"model.path": str(model) if model else None, "model.random_init": random_init}
        sizes = {"prefill.tp": prefill_tp, "decode.tp": decode_tp, "decode.kv_dtype": decode_kv_dtype}
        computed, layout = _model_plan({**named, **sizes}, gpu_memory_gb)
    elif layers is None or kv_heads is None:
        raise ConfigError("no model: give --model DIR or --random-init NAME, or --layers and --kv-heads")
    elif gpu_memory_gb:
        raise ConfigError("--gpu-memory-gb needs a model's weights: give --model DIR or --random-init NAME")
    else:
        computed = KVLayout(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        layout = msgspec.structs.replace(computed, dtype=decode_kv_dtype or dtype)
    request = PlanRequest(
        layout=layout,
        computed_dtype=computed.dtype if computed != layout else "",
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        tokens=tokens,
        chunk_tokens=chunk_tokens,
        layer_groups=layer_groups,
        max_segment_bytes=TransferConfig(ring_bytes=size, staging_bytes=size).segment_limit_bytes,
    )
    answer = compute_plan(request)
    print("\n".join(plan_lines(answer)))
    _show(_routes_table(answer))
    if out is not None:
        from disagg.plan_draw import draw_plan

        with writing("--out", out):
            draw_plan(answer, out)


def _model_plan(flags: Mapping[str, object], gpu_memory_gb: float) -> Any:
    """The model's layouts in both groups; prints what fits the GPUs, when they are given."""
    from disagg.core.config import load_config
    from disagg.plan_memory import memory_lines, model_layouts, plan_memory

    config = load_config(overrides={name: value for name, value in flags.items() if value is not None})
    if gpu_memory_gb:
        print("\n".join(memory_lines(plan_memory(config, int(gpu_memory_gb * 1e9)))))
    return model_layouts(config)


def keys(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The key file; must not exist without an option.")
    ],
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Add fresh keys; the old ones stay valid.")
    ] = False,
    retire: Annotated[bool, typer.Option("--retire", help="Drop the old keys after a rotation.")] = False,
    grace_s: Annotated[
        float | None,
        typer.Option(
            "--grace-s",
            help="Seconds in which every process must have the rotated file, before the fresh generation is used "
            f"[{GRACE_S:g}].",
        ),
    ] = None,
) -> None:
    """Make, rotate or retire a cluster's keys for `control.key_file`."""
    from transport.key_file import retire_keys, rotate_keys, save_keys
    from transport.keys import make_keys

    if rotate and retire:
        raise ConfigError(
            "--rotate and --retire: rotate first, retire when every process has the rotated file"
        )
    if grace_s is not None and not (rotate and 0 <= grace_s <= MAX_GRACE_S):
        raise ConfigError(f"--grace-s {grace_s:g}: from 0 to {MAX_GRACE_S:g} seconds, with --rotate")
    if rotate:
        seconds = GRACE_S if grace_s is None else grace_s
        keys = rotate_keys(file, seconds)
        print(
            f"{file}: generation {keys.generations(0)[1].name} is used in {seconds:g} s, {keys.current.name} stays "
            f"valid; copy the file to every host now, and run `disagg keys --retire` when all of them have it"
        )
    elif retire:
        keys = retire_keys(file)
        print(f"{file}: only generation {keys.current.name} is valid; copy the file to every host")
    else:
        fresh = make_keys()
        save_keys(fresh, file)
        print(
            f"{file}: who can read it may join the cluster; copy it to every host, set control.key_file to it "
            f"(generation {fresh.name})"
        )


def version() -> None:
    """Print the version."""
    from disagg import __version__

    print(f"disagg {__version__}")


def _routes_table(answer: Any) -> Any:
    from rich.table import Table

    from disagg.plan import describe_bytes

    table = Table()
    for name in ("from", "to", "layers", "KV heads", "bytes", "segments"):
        table.add_column(name, justify="right")
    for total in answer.routes:
        route = total.route
        table.add_row(
            f"prefill r{route.src_rank}",
            f"decode r{route.dst_rank}",
            str(route.layers),
            str(route.heads),
            describe_bytes(total.nbytes),
            str(total.segments),
        )
    return table


def _show(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
