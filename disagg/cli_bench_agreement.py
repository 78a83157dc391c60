"""`disagg bench agreement`: flags, then over to `disagg.bench.agreement`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from disagg.cli_bench_common import (
    ComparedDeterministicFlag,
    DeviceFlag,
    JsonFlag,
    OutFlag,
    Shown,
    device_of,
    progress,
    show,
)
from disagg.core.errors import ConfigError

_GAIN = 0.8


def agreement(
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Folder of a Hugging Face checkpoint.")
    ] = None,
    random_init: Annotated[
        str | None,
        typer.Option(
            "--random-init", metavar="NAME", help="Random weights [llama-3.2-1b; tiny-llama on a CPU]."
        ),
    ] = None,
    init_gain: Annotated[
        float | None,
        typer.Option(
            "--init-gain",
            help=f"Standard deviation of random weights times the root of the hidden size [{_GAIN}]: with more, any "
            "difference grows from layer to layer; with much less, answers may repeat a token.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            "--dtype", help="Of the model and of the unquantized KV; in float32 little else rounds."
        ),
    ] = "auto",
    deterministic: ComparedDeterministicFlag = None,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="[32; 8 on a CPU]")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, help="Of each [256; 64 on a CPU].")
    ] = None,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Compared of each.")] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of prompts and random weights.")] = 0,
    device: DeviceFlag = "auto",
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """How long greedy answers agree when KV is kept in 8 bits (int8, fp8), and what that saves of pool and wire.

    Random weights choose among nearly equal tokens: give --model to learn about a model that was trained.
    """
    gain = _gain(model, random_init, init_gain)
    from disagg.bench.agreement import bench_of, run, source_of
    from disagg.bench.agreement_report import (
        agreement_json,
        agreement_lines,
        agreement_table,
        write_agreement_chart,
    )

    where = device_of(device)
    cuda = where.type == "cuda"
    name = random_init or ("llama-3.2-1b" if cuda else "tiny-llama")
    bench = bench_of(
        source_of(model, name, gain, seed),
        dtype,
        where,
        prompts=prompts or (32 if cuda else 8),
        prompt_tokens=prompt_tokens or (256 if cuda else 64),
        answer_tokens=answer_tokens,
        seed=seed,
        deterministic=cuda if deterministic is None else deterministic,
    )
    with progress() as tell:
        found = run(bench, tell)
    shown = Shown(
        lambda: agreement_json(found),
        lambda: agreement_table(found),
        agreement_lines(found),
        lambda path: write_agreement_chart(path, found),
    )
    show("agreement", shown, out, as_json)


def _gain(model: str | None, random_init: str | None, init_gain: float | None) -> float:
    """Raises `ConfigError` for flags that do not go together."""
    if model is not None:
        wrong = "--random-init" if random_init else "--init-gain" if init_gain is not None else None
        if wrong:
            raise ConfigError(
                f"--model and {wrong}: a checkpoint has weights of its own, leave one of them out"
            )
    if init_gain is not None and not 0 < init_gain <= 100:
        raise ConfigError(f"--init-gain {init_gain:g}: give a number above 0, at most 100")
    return _GAIN if init_gain is None else init_gain
