"""`disagg demo` and `disagg generate`: convert flags to a `Config` and `RunOptions` for `disagg.commands.demo`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from disagg.cli.flags import (
    ComparedDeterministicFlag,
    ConfigFlags,
    DeterministicFlag,
    DeviceFlag,
    ModelFlags,
    RankFlags,
    Sets,
    TransferFlags,
)
from disagg.cli.imports import heavy_imports
from disagg.cli.options import with_options
from disagg.cli.settings import configuration
from disagg.commands.early import check_run
from disagg.commands.run_options import RunOptions, demo_prompts
from disagg.core.errors import DisaggError
from disagg.core.types import SamplingParams

MaxTokensFlag = Annotated[int, typer.Option("--max-tokens", help="Maximum number of tokens in an answer.")]


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Flags of `disagg demo`."""

    weights: ModelFlags
    deterministic: ComparedDeterministicFlag = None
    ranks: RankFlags
    device: DeviceFlag = None
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; repeat for more requests.")
    ] = None
    max_tokens: MaxTokensFlag = 32
    source: ConfigFlags
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the timeline and the report.")
    ] = None
    transfer: TransferFlags
    demo_seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, help="Seed of random weights and of the word order in the built-in prompts [0]."
        ),
        Sets(("model.seed",)),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags for the sampling of an answer's tokens."""

    temperature: Annotated[
        float, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")
    ] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the k likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Sample from the likeliest tokens whose probabilities add up to p."),
    ] = 1.0
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the sampling, for repeatable answers.")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends an answer; repeatable.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Flags of `disagg generate`."""

    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT...", help="The prompt; several are answered one by one."),
    ] = None
    weights: ModelFlags
    deterministic: DeterministicFlag = None
    ranks: RankFlags
    device: DeviceFlag = None
    max_tokens: MaxTokensFlag = 64
    sampling: SamplingFlags
    source: ConfigFlags
    transfer: TransferFlags


@with_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Serve a few prompts on this machine and check the answers."""
    run = RunOptions(
        prompts=tuple(options.prompt or demo_prompts(options.demo_seed or 0)),
        sampling=SamplingParams(max_tokens=options.max_tokens),
        out_dir=str(options.out) if options.out else None,
        deterministic=options.deterministic,
    )
    config = configuration(options.source, options)
    check_run(config)
    _runner().run_demo(config, run)


@with_options(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Answer prompts and print the answers."""
    flags = options.sampling
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        seed=flags.seed,
        stop=tuple(flags.stop or ()),
    )
    run = RunOptions(
        prompts=tuple(options.prompt or ()),
        sampling=sampling,
        prompts_from='as an argument: disagg generate --model DIR "PROMPT"',
    )
    config = configuration(options.source, options)
    check_run(config)
    _runner().run_generate(config, run)


def _runner() -> ModuleType:
    """Imports `disagg.commands.demo` and returns it. The import is late because it loads torch, Ray and
    transformers."""
    try:
        with heavy_imports():
            return importlib.import_module("disagg.commands.demo")
    except ModuleNotFoundError as exc:
        if exc.name != "disagg.commands.demo":
            raise
        raise DisaggError("this installation has no module disagg.commands.demo: reinstall disagg") from exc
