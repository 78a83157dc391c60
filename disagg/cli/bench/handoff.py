"""`disagg bench handoff`: flags for `disagg.bench.handoff.run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer

from disagg.cli.bench.common import (
    CheckpointFlag,
    DeviceFlag,
    OutputFlags,
    RepeatsFlag,
    WeightsDTypeFlag,
    device_of,
    name_of,
    progress,
    show_results,
)
from disagg.cli.bench.path import PathFlags
from disagg.cli.flags import ComparedDeterministicFlag
from disagg.cli.options import with_options
from disagg.commands.early import check_model
from disagg.core.config.read import Config, ModelConfig


@dataclass(frozen=True, kw_only=True)
class HandoffModelFlags:
    """Flags for the model and its groups."""

    model: CheckpointFlag = None
    random_init: Annotated[
        str | None,
        typer.Option(
            "--random-init", metavar="NAME", help="Random weights [llama-3.1-8b; a small one on a CPU]."
        ),
    ] = None
    dtype: WeightsDTypeFlag = "auto"
    deterministic: ComparedDeterministicFlag = None
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-dtype", help="Element type of the KV in both groups and on the wire (model.kv_dtype)."
        ),
    ] = "auto"
    decode_kv_dtype: Annotated[
        str,
        typer.Option(
            "--decode-kv-dtype",
            help="Element type of the KV in the decode group and on the wire (decode.kv_dtype).",
        ),
    ] = "model"
    prefill_tp: Annotated[int, typer.Option("--prefill-tp", min=1, help="Ranks of the prefill group.")] = 1
    decode_tp: Annotated[int, typer.Option("--decode-tp", min=1, help="Ranks of the decode group.")] = 1


@dataclass(frozen=True, kw_only=True)
class HandoffSizeFlags:
    """Flags for the sizes of the measured requests, and of the requests that decode at the same time."""

    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Tokens of a prompt [8192; 512 on a CPU].")
    ] = None
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=2, help="Compared tokens of each answer.")
    ] = 8
    chunk_tokens: Annotated[
        int | None,
        typer.Option("--chunk-tokens", min=1, help="Tokens of one prefill step [2048; 128 on a CPU]."),
    ] = None
    decoders: Annotated[
        int, typer.Option("--decoders", min=1, help="Requests that decode while others arrive.")
    ] = 4
    decoder_tokens: Annotated[
        int | None,
        typer.Option(
            "--decoder-tokens", min=1, help="Prompt tokens of the decoding requests [1024; 64 on a CPU]."
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=2, help="Tokens that each decoding request generates [512; 256 on a CPU]."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class HandoffFlags:
    """Flags of `disagg bench handoff`."""

    weights: HandoffModelFlags
    sizes: HandoffSizeFlags
    path: PathFlags
    repeats: RepeatsFlag = 5
    device: DeviceFlag = "auto"
    definitions: Annotated[
        bool, typer.Option("--definitions", help="Print the exact definition of each figure below the table.")
    ] = False
    output: OutputFlags


@with_options(HandoffFlags)
def handoff(options: HandoffFlags) -> None:
    """Measure the cost of the KV transfer with a whole model, from a prefill group to a decode group; check the
    answers.

    Every byte of the moved KV is compared. With --deterministic, equal ranks on both sides and float32, every token
    must be equal. Otherwise, in 16 bits and with 8-bit KV, rounding must explain the first difference of an answer:
    the benchmark compares both sides' logits after the same tokens. With 8-bit KV in the decode group only, the first
    token of each answer is compared, and the moved bytes are compared with the prefill group's KV after quantization.
    """
    check_model(ModelConfig(path=options.weights.model))
    from disagg.bench.handoff.run import HandoffBench, HandoffOptions, run  # imports torch

    device = device_of(options.device)
    cuda = device.type == "cuda"
    weights, sizes = options.weights, options.sizes
    chosen = HandoffOptions(
        cuda=cuda,
        prefill_tp=weights.prefill_tp,
        decode_tp=weights.decode_tp,
        decode_kv_dtype=weights.decode_kv_dtype,
        tokens=sizes.tokens or (8192 if cuda else 512),
        answer_tokens=sizes.answer_tokens,
        chunk_tokens=sizes.chunk_tokens or (2048 if cuda else 128),
        decoders=sizes.decoders,
        decoder_tokens=sizes.decoder_tokens or (1024 if cuda else 64),
        steps=sizes.steps or (512 if cuda else 256),
        repeats=options.repeats,
    )
    bench = HandoffBench.of(_config(options, device), chosen)
    with progress() as update:
        results = run(bench, update)
    ranks = f"TP {weights.prefill_tp} -> {weights.decode_tp}"
    title = f"hand-over of {bench.sizes.tokens} tokens, {ranks}, on {name_of(device)}"
    show_results("handoff", title, results, options.output, definitions=options.definitions)


def _config(options: HandoffFlags, device: Any) -> Config:
    weights, cuda = options.weights, device.type == "cuda"
    default = "llama-3.1-8b" if cuda and not weights.model else None
    model = ModelConfig(
        path=weights.model,
        random_init=weights.random_init or default,
        dtype=cast("Any", weights.dtype),
        kv_dtype=cast("Any", weights.kv_dtype),
        deterministic=cuda if weights.deterministic is None else weights.deterministic,
    )
    path = options.path
    return Config(model=model, transfer=path.transfer_config(device), transport=path.transport_config())
