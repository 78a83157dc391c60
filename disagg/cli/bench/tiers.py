"""`disagg bench tiers`: flags for `disagg.bench.tiers.run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

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
from disagg.cli.options import with_options
from disagg.commands.early import check_model
from disagg.core.config.read import Config, ModelConfig


@dataclass(frozen=True, kw_only=True)
class TiersModelFlags:
    """Flags for the model."""

    model: CheckpointFlag = None
    random_init: Annotated[
        str | None,
        typer.Option(
            "--random-init", metavar="NAME", help="Random weights [llama-3.1-8b; small-llama on a CPU]."
        ),
    ] = None
    dtype: WeightsDTypeFlag = "auto"


@dataclass(frozen=True, kw_only=True)
class TiersSizeFlags:
    """Flags for the sizes of the measured prompts and of the conversations."""

    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=64, help="Tokens of a cached beginning [4096; 512 on a CPU]."),
    ] = None
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Tokens of a prompt after the cached beginning.")
    ] = 64
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=1, help="Compared tokens of each answer.")
    ] = 16
    turns: Annotated[int, typer.Option("--turns", min=1, help="Turns of a conversation.")] = 10
    turn_tokens: Annotated[
        int | None,
        typer.Option("--turn-tokens", min=1, help="Tokens that each turn adds [256; 64 on a CPU]."),
    ] = None
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Conversations with a request under way.")
    ] = 4
    others: Annotated[
        int, typer.Option("--others", min=1, help="Part `others`: answers that run while other prompts hit.")
    ] = 4


@dataclass(frozen=True, kw_only=True)
class TiersFlags:
    """Flags of `disagg bench tiers`."""

    weights: TiersModelFlags
    sizes: TiersSizeFlags
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Folder on the disk of the storage [the system's folder for temporary files].",
        ),
    ] = None
    transport: Annotated[
        Literal["auto", "ucx", "tls"],
        typer.Option("--transport", help="Transport between two groups that share host memory."),
    ] = "auto"
    parts: Annotated[
        str,
        typer.Option(
            "--parts",
            metavar="PART,...",
            help="Parts to run: TTFT of hits in pool and host memory, of hits in the storage, of hits in another "
            "group, conversations, and the time between tokens of running answers while other prompts hit.",
        ),
    ] = "hits,storage,peer,conversations,others"
    repeats: RepeatsFlag = 5
    device: DeviceFlag = "auto"
    output: OutputFlags


@with_options(TiersFlags)
def tiers(options: TiersFlags) -> None:
    """Measure TTFT of hits in the KV pool, in host memory, in another group's host memory, in a storage, and of no
    hit; conversations whose histories have five times the tokens of the pool, with and without lower tiers; and the
    time between tokens of running answers while other prompts hit.

    One colocated rank runs in this process, and for hits in another group a second one with weights of its own. Every
    answer after a hit is compared with the answer to the same prompt without a hit, and all conversations are
    compared between the runs.
    """
    check_model(ModelConfig(path=options.weights.model))
    from disagg.bench.common.names import parse_names
    from disagg.bench.tiers.options import PARTS, TiersOptions  # imports torch
    from disagg.bench.tiers.results import results_of
    from disagg.bench.tiers.run import measure

    device = device_of(options.device)
    cuda, sizes = device.type == "cuda", options.sizes
    chosen = TiersOptions(
        config=Config(model=_model(options.weights, cuda)),
        cuda=cuda,
        folder=options.folder,
        tokens=sizes.tokens or (4096 if cuda else 512),
        new_tokens=sizes.new_tokens,
        answer_tokens=sizes.answer_tokens,
        turns=sizes.turns,
        turn_tokens=sizes.turn_tokens or (256 if cuda else 64),
        concurrency=sizes.concurrency,
        repeats=options.repeats,
        transport=options.transport,
        others=sizes.others,
        parts=parse_names("--parts", options.parts, PARTS),
    )
    with progress() as update:
        results = results_of(measure(chosen, update))
    title = f"tiers of the prefix cache, {chosen.tokens} cached tokens, on {name_of(device)}"
    show_results("tiers", title, results, options.output, definitions=False)


def _model(weights: TiersModelFlags, cuda: bool) -> ModelConfig:
    default = None if weights.model else "llama-3.1-8b" if cuda else "small-llama"
    return ModelConfig(
        path=weights.model,
        random_init=weights.random_init or default,
        dtype=cast("Any", weights.dtype),
        deterministic=True,  # tokens do not depend on the batch, so that runs can be compared
    )
