"""`disagg bench agreement`: flags for `disagg.bench.agreement.run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from disagg.cli.bench.common import (
    CheckpointFlag,
    DeviceFlag,
    OutputFlags,
    Shown,
    device_of,
    progress,
    show,
)
from disagg.cli.flags import ComparedDeterministicFlag
from disagg.cli.options import with_options
from disagg.commands.early import check_model
from disagg.core.config.read import ModelConfig
from disagg.core.errors import ConfigError

if TYPE_CHECKING:
    from disagg.bench.agreement.run import AgreementBench

_GAIN = 0.8


@dataclass(frozen=True, kw_only=True)
class AgreementOptions:
    """Flags of `disagg bench agreement`."""

    model: CheckpointFlag = None
    random_init: Annotated[
        str | None,
        typer.Option(
            "--random-init", metavar="NAME", help="Random weights [llama-3.2-1b; tiny-llama on a CPU]."
        ),
    ] = None
    init_gain: Annotated[
        float | None,
        typer.Option(
            "--init-gain",
            help=f"Standard deviation of random weights times the root of the hidden size [{_GAIN}]. Larger values "
            "amplify differences from layer to layer; with much smaller values, answers may repeat one token.",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            "--dtype",
            help="Element type of model and unquantized KV. In float32, nearly all rounding is that of 8-bit KV.",
        ),
    ] = "auto"
    deterministic: ComparedDeterministicFlag = None
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="Number of prompts [32; 8 on a CPU].")
    ] = None
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, help="Tokens of each prompt [256; 64 on a CPU].")
    ] = None
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=1, help="Compared tokens of each answer.")
    ] = 64
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of prompts and random weights.")] = 0
    device: DeviceFlag = "auto"
    output: OutputFlags


@with_options(AgreementOptions)
def agreement(options: AgreementOptions) -> None:
    """Compare greedy answers with 8-bit KV (int8, fp8) and with unquantized KV; show the bytes saved.

    With random weights, the likeliest tokens have nearly equal probabilities, so answers differ more often. Use
    --model for the results of a trained model.
    """
    gain = _gain(options)
    check_model(ModelConfig(path=options.model))
    from disagg.bench.agreement.report import (
        agreement_json,
        agreement_lines,
        agreement_table,
        write_agreement_chart,
    )
    from disagg.bench.agreement.run import run

    bench = _bench(options, gain, device_of(options.device))
    with progress() as update:
        found = run(bench, update)
    shown = Shown(
        lambda: agreement_json(found),
        lambda: agreement_table(found),
        agreement_lines(found),
        lambda path: write_agreement_chart(path, found),
    )
    show("agreement", shown, options.output)


def _gain(options: AgreementOptions) -> float:
    """Returns the gain of random weights. Raises `ConfigError` for flags that contradict each other."""
    gain = options.init_gain
    if options.model is not None:
        other = "--random-init" if options.random_init else "--init-gain" if gain is not None else None
        if other:
            raise ConfigError(
                f"--model and {other}: a checkpoint has weights of its own, omit one of the flags"
            )
    if gain is not None and not 0 < gain <= 100:
        raise ConfigError(f"--init-gain {gain:g}: give a number above 0, at most 100")
    return _GAIN if gain is None else gain


def _bench(options: AgreementOptions, gain: float, device: Any) -> AgreementBench:
    from disagg.bench.agreement.run import bench_of, source_of

    cuda = device.type == "cuda"
    name = options.random_init or ("llama-3.2-1b" if cuda else "tiny-llama")
    return bench_of(
        source_of(options.model, name, gain, options.seed),
        options.dtype,
        device,
        prompts=options.prompts or (32 if cuda else 8),
        prompt_tokens=options.prompt_tokens or (256 if cuda else 64),
        answer_tokens=options.answer_tokens,
        seed=options.seed,
        deterministic=cuda if options.deterministic is None else options.deterministic,
    )
