"""`disagg doctor`, `plan`, `keys`, `version` and the flags of `disagg` itself: commands that start no server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.cli.options import with_options
from disagg.core.errors import ConfigError
from disagg.core.folders import writing

if TYPE_CHECKING:
    from disagg.core.config.tree import Config
    from disagg.core.types import KVLayout
    from disagg.plan.transfer import PlanRequest

GRACE_S, MAX_GRACE_S = 120.0, 30 * 86400.0
"""Default and maximum of `--grace-s`: seconds from the rotation of a key file to the first use of the fresh keys."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Check this machine; exit code 1 if a check fails."""
    import msgspec

    from disagg.doctor.findings import examine, findings_table, is_healthy
    from disagg.doctor.probes import all_probes

    findings = examine(all_probes())
    if as_json:
        print(json.dumps(msgspec.to_builtins(findings), indent=2))
    else:
        _show(findings_table(findings))
    if not is_healthy(findings):
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class ShapeFlags:
    """Flags for the shape of the KV cache: a model, or explicit numbers."""

    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Use the shape of this checkpoint.")
    ] = None
    random_init: Annotated[
        str | None, typer.Option("--random-init", metavar="NAME", help="Use the shape of this architecture.")
    ] = None
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="KV heads, without a model.")] = None
    layers: Annotated[int | None, typer.Option("--layers", help="Layers, without a model.")] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Flags of `disagg plan`."""

    prefill_tp: Annotated[int, typer.Option("--prefill-tp", help="Ranks of the prefill group.")]
    decode_tp: Annotated[int, typer.Option("--decode-tp", help="Ranks of the decode group.")]
    shape: ShapeFlags
    head_dim: Annotated[int, typer.Option("--head-dim", help="Elements of one head.")] = 128
    dtype: Annotated[str, typer.Option("--dtype", help="Element type of the KV cache, without a model.")] = (
        "bfloat16"
    )
    decode_kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--decode-kv-dtype", help="8-bit element type of the decode group's KV; the sender quantizes."
        ),
    ] = None
    tokens: Annotated[int, typer.Option("--tokens", help="Length of the prompt.")] = 8192
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", min=1, help="Tokens of one prefill step [256].")
    ] = None
    layer_groups: Annotated[
        int, typer.Option("--layer-groups", help="Layer groups of a chunk's transfer.")
    ] = 4
    ring_bytes: Annotated[
        str | None,
        typer.Option(
            "--ring-bytes", metavar="SIZE", help="Receive ring; a segment is at most a quarter of it [32MiB]."
        ),
    ] = None
    gpu_memory_gb: Annotated[
        float,
        typer.Option(
            "--gpu-memory-gb",
            metavar="GB",
            help="With a model: show the KV cache that fits GPUs of this size.",
        ),
    ] = 0.0
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.png", help="Also draw the plan to this file.")
    ] = None


@with_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show the bytes that a prompt moves between two groups, and the KV cache that fits their memory."""
    from disagg.plan.transfer import compute_plan, plan_lines

    out = options.out
    if out is not None and out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: the picture is a PNG; give a name that ends in .png")
    answer = compute_plan(_plan_request(options))
    print("\n".join(plan_lines(answer)))
    _show(_routes_table(answer))
    if out is not None:
        from disagg.plan.draw import draw_plan

        with writing("--out", out):
            draw_plan(answer, out)


def _plan_request(options: PlanOptions) -> PlanRequest:
    from disagg.core.config.read import TransferConfig
    from disagg.plan.transfer import PlanRequest

    config = _plan_config(options)
    size = config.transfer.sized(0).ring_bytes
    computed, layout, has_kv = _layouts(options, config)
    return PlanRequest(
        layout=layout,
        has_kv=has_kv,
        computed_dtype=computed.dtype if computed != layout else "",
        prefill_tp=options.prefill_tp,
        decode_tp=options.decode_tp,
        tokens=options.tokens,
        chunk_tokens=options.chunk_tokens or 256,
        layer_groups=options.layer_groups,
        max_segment_bytes=TransferConfig(ring_bytes=size, staging_bytes=size).segment_limit_bytes,
    )


def _plan_config(options: PlanOptions) -> Config:
    """Returns the configuration that `disagg serve` would have with the same flags, after the same checks."""
    from disagg.core.config.read import load_config

    shape = options.shape
    has_model = shape.model is not None or shape.random_init is not None
    settings = {
        "model.path": str(shape.model) if shape.model else None,
        "model.random_init": shape.random_init,
        "prefill.tp": options.prefill_tp,
        "prefill.chunk_tokens": options.chunk_tokens,
        "decode.tp": options.decode_tp,
        "decode.kv_dtype": options.decode_kv_dtype if has_model else None,
        "transfer.layer_groups": options.layer_groups,
        "transfer.ring_bytes": options.ring_bytes,
    }
    return load_config(overrides={name: value for name, value in settings.items() if value is not None})


def _layouts(options: PlanOptions, config: Config) -> tuple[KVLayout, KVLayout, bool]:
    """Returns the KV layouts of the prefill and the decode group, and whether KV is sent."""
    shape = options.shape
    if shape.model is not None or shape.random_init is not None:
        return _model_layouts(options.gpu_memory_gb, config)
    if shape.layers is None or shape.kv_heads is None:
        raise ConfigError("no model: give --model DIR or --random-init NAME, or --layers and --kv-heads")
    if options.gpu_memory_gb:
        raise ConfigError("--gpu-memory-gb needs a model's weights: give --model DIR or --random-init NAME")
    import msgspec

    from disagg.core.types import KVLayout

    computed = KVLayout(
        layers=shape.layers, kv_heads=shape.kv_heads, head_dim=options.head_dim, dtype=options.dtype
    )
    return computed, msgspec.structs.replace(computed, dtype=options.decode_kv_dtype or options.dtype), True


def _model_layouts(gpu_memory_gb: float, config: Config) -> tuple[KVLayout, KVLayout, bool]:
    """Returns the same values as `_layouts`, for a model. With `gpu_memory_gb`, also prints the memory plan."""
    from disagg.commands.early import check_model

    check_model(config.model)
    import torch

    from disagg.model.load.source import make_source
    from disagg.model.tensor_parallel import check_tp
    from disagg.plan.memory import memory_lines, plan_memory, planned_model

    # `disagg serve` makes the same check: a plan must be possible for groups.
    spec = make_source(config).spec(torch.float32)
    check_tp(spec, {"prefill": config.prefill.tp or 1, "decode": config.decode.tp or 1})
    if gpu_memory_gb:
        print("\n".join(memory_lines(plan_memory(config, int(gpu_memory_gb * 1e9)))))
    model = planned_model(config)
    if model.unknown_state:
        print(f"{model.unknown_state}; this plan leaves the state out")
    return model.prefill.layout, model.decode.layout, model.prefill.has_attention


def keys(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The key file. Unless an option is given, it must not exist."),
    ],
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Add fresh keys; the old ones stay valid.")
    ] = False,
    retire: Annotated[bool, typer.Option("--retire", help="Drop the old keys after a rotation.")] = False,
    grace_s: Annotated[
        float | None,
        typer.Option(
            "--grace-s",
            help="Seconds until the fresh keys are used. By then, every process must have the file "
            f"[{GRACE_S:g}].",
        ),
    ] = None,
) -> None:
    """Make, rotate or retire a cluster's keys for `control.key_file`."""
    from transport.keys.curve import make_keys
    from transport.keys.file import retire_keys, rotate_keys, save_keys

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
            f"{file}: generation {fresh.name}. A process with this file may join the cluster: keep it secret, copy "
            f"it to every host, and set control.key_file to it"
        )


def version() -> None:
    """Print the version."""
    from disagg import __version__

    print(f"disagg {__version__}")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def common(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Disaggregated LLM serving: prefill on one group of ranks, move the KV cache, decode on another."""


def _routes_table(answer: Any) -> Any:
    from rich.table import Table

    from disagg.plan.transfer import describe_bytes

    table = Table()
    layout = answer.request.layout
    for name in ("from", "to", "layers", "heads", "bytes", "segments"):
        table.add_column(name, justify="right")
    for total in answer.routes:
        route = total.route
        table.add_row(
            f"prefill r{route.src_rank}",
            f"decode r{route.dst_rank}",
            f"states {route.layers.shift(-layout.kv_layers)}"
            if layout.is_state(route.layers)
            else str(route.layers),
            str(route.heads),
            describe_bytes(total.nbytes),
            str(total.segments),
        )
    return table


def _show(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
