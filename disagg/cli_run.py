"""`disagg demo` and `disagg generate`: flags to a `Config` and `RunOptions`, then over to `disagg.demo`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from disagg.cli_bench_common import ComparedDeterministicFlag
from disagg.core.config import Config, Mode, load_config
from disagg.core.errors import ConfigError, DisaggError
from disagg.core.types import SamplingParams
from disagg.run_options import RunOptions, demo_prompts

ModelFlag = Annotated[
    str | None, typer.Option("--model", metavar="DIR", help="Folder of a Hugging Face checkpoint.")
]
RandomInitFlag = Annotated[
    str | None,
    typer.Option("--random-init", metavar="NAME", help="Random weights; e.g. llama-3.1-8b, qwen3-0.6b."),
]
DTypeFlag = Annotated[
    str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", show_default=False)
]
DeterministicFlag = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="A request's answer is the same bits whatever else is in the batch; slower by some per cent [off].",
        show_default=False,
    ),
]
PrefillTpFlag = Annotated[int | None, typer.Option("--prefill-tp", help="Ranks that prefill [2].")]
DecodeTpFlag = Annotated[int | None, typer.Option("--decode-tp", help="Ranks that decode [1].")]
ColocatedFlag = Annotated[
    bool, typer.Option("--colocated", help="Groups that prefill and decode, instead of groups for each.")
]
TpFlag = Annotated[
    int | None, typer.Option("--tp", metavar="N", help="With --colocated: ranks of each group [1].")
]
GroupsFlag = Annotated[
    int | None, typer.Option("--groups", metavar="K", help="With --colocated: how many of them [1].")
]
DeviceFlag = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda, for all groups.")]
PromptFlag = Annotated[
    list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; repeat for more requests.")
]
PromptArgument = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPT...", help="The prompt; several are answered one by one.")
]
MaxTokensFlag = Annotated[int, typer.Option("--max-tokens", help="Tokens to answer each prompt with.")]
ConfigFlag = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Configuration, TOML or YAML.")
]
SetFlag = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. transfer.layer_groups=8; repeatable."),
]
OutFlag = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder for the timeline and the report.")
]
ChunkTokensFlag = Annotated[
    int | None,
    typer.Option("--chunk-tokens", help="Prompt tokens of one prefill step; all of a colocated one [256]."),
]
PrefillPageFlag = Annotated[
    int | None, typer.Option("--prefill-page-size", help="Tokens in one page of the prefill pool [16].")
]
DecodePageFlag = Annotated[
    int | None, typer.Option("--decode-page-size", help="Tokens in one page of the decode pool [16].")
]
RingBytesFlag = Annotated[
    str | None,
    typer.Option("--ring-bytes", metavar="SIZE", help="Receive ring of a decode rank [by its memory]."),
]
TransportFlag = Annotated[
    Literal["auto", "ucx"] | None,
    typer.Option(
        "--transport", help="ucx: always through staging and ring, also where pools can be opened [auto]."
    ),
]
RayFlag = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="auto or HOST:PORT: a Ray cluster that runs already [one of our own].",
    ),
]
JoinFlag = Annotated[
    str | None,
    typer.Option("--join", metavar="tcp://HOST:5570", help="Where `disagg launch` tells of its groups."),
]
TemperatureFlag = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopKFlag = Annotated[int, typer.Option("--top-k", help="Choose among the k likeliest tokens; 0 is off.")]
TopPFlag = Annotated[float, typer.Option("--top-p", help="Choose among the likeliest tokens of mass p.")]
DemoSeedFlag = Annotated[
    int | None,
    typer.Option(
        "--seed", min=0, help="Of random weights, and of the order of words in the demo's own prompts [0]."
    ),
]
SeedFlag = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
StopFlag = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends an answer; repeatable.")]

FLAG_KEYS: dict[str, tuple[str, ...]] = {
    "model": ("model.path",),
    "random_init": ("model.random_init",),
    "dtype": ("model.dtype",),
    "deterministic": ("model.deterministic",),
    "prefill_tp": ("prefill.tp",),
    "decode_tp": ("decode.tp",),
    "tp": ("colocated.tp",),
    "groups": ("colocated.groups",),
    "device": ("prefill.device", "decode.device", "colocated.device"),
    "chunk_tokens": ("prefill.chunk_tokens", "colocated.chunk_tokens"),
    "prefill_page_size": ("prefill.page_size",),
    "decode_page_size": ("decode.page_size",),
    "ring_bytes": ("transfer.ring_bytes",),
    "host": ("api.host",),
    "port": ("api.port",),
    "api_key_file": ("api.key_file",),
    "model_name": ("api.model_name",),
    "ray": ("cluster.ray",),
    "demo_seed": ("model.seed",),
}
"""Parameters of commands that are short for settings."""
_MODE_FLAGS: dict[Mode, tuple[str, ...]] = {
    "split": ("prefill_tp", "decode_tp", "prefill_page_size", "decode_page_size", "ring_bytes", "transport"),
    "colocated": ("tp", "groups"),
}
"""Parameters that mean nothing with another `cluster.mode`."""


def demo(
    model: ModelFlag = None,
    random_init: RandomInitFlag = None,
    dtype: DTypeFlag = None,
    deterministic: ComparedDeterministicFlag = None,
    prefill_tp: PrefillTpFlag = None,
    decode_tp: DecodeTpFlag = None,
    device: DeviceFlag = None,
    prompt: PromptFlag = None,
    max_tokens: MaxTokensFlag = 32,
    config: ConfigFlag = None,
    settings: SetFlag = None,
    out: OutFlag = None,
    chunk_tokens: ChunkTokensFlag = None,
    prefill_page_size: PrefillPageFlag = None,
    decode_page_size: DecodePageFlag = None,
    ring_bytes: RingBytesFlag = None,
    transport: TransportFlag = None,
    demo_seed: DemoSeedFlag = None,
) -> None:
    """Serve a few prompts on this machine and check the answers."""
    given = dict(locals())  # the flags by parameter name, before anything else is assigned
    options = RunOptions(
        prompts=tuple(prompt or demo_prompts(demo_seed or 0)),
        sampling=SamplingParams(max_tokens=max_tokens),
        out_dir=str(out) if out else None,
        deterministic=deterministic,
    )
    settled = configuration(given)
    _runner().run_demo(settled, options)


def generate(
    prompt: PromptArgument = None,
    model: ModelFlag = None,
    random_init: RandomInitFlag = None,
    dtype: DTypeFlag = None,
    deterministic: DeterministicFlag = None,
    prefill_tp: PrefillTpFlag = None,
    decode_tp: DecodeTpFlag = None,
    device: DeviceFlag = None,
    max_tokens: MaxTokensFlag = 64,
    temperature: TemperatureFlag = 0.0,
    top_k: TopKFlag = 0,
    top_p: TopPFlag = 1.0,
    seed: SeedFlag = None,
    stop: StopFlag = None,
    config: ConfigFlag = None,
    settings: SetFlag = None,
    chunk_tokens: ChunkTokensFlag = None,
    prefill_page_size: PrefillPageFlag = None,
    decode_page_size: DecodePageFlag = None,
    ring_bytes: RingBytesFlag = None,
    transport: TransportFlag = None,
) -> None:
    """Answer prompts and print the answers."""
    given = dict(locals())  # the flags by parameter name, before anything else is assigned
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    options = RunOptions(prompts=tuple(prompt or ()), sampling=sampling)
    settled = configuration(given)
    _runner().run_generate(settled, options)


def configuration(given: Mapping[str, Any]) -> Config:
    """The settings that a command's parameters, by name, ask for beside file and environment."""
    overrides: dict[str, object] = {}
    for text in given["settings"] or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"flag --set {text}: write section.key=value, e.g. prefill.tp=2")
        overrides[key.strip()] = value
    # A flag with a name of its own wins over --set of the same key.
    for name, keys in FLAG_KEYS.items():
        overrides.update({key: given[name] for key in keys if given.get(name) is not None})
    if given.get("transport") is not None:
        overrides["transport.peer_memory"] = given["transport"] == "auto"
    if given.get("colocated"):
        overrides["cluster.mode"] = "colocated"
    config = load_config(given["config"], os.environ, overrides)
    _check_mode(given, config.cluster.mode)
    return config


def _check_mode(given: Mapping[str, Any], mode: Mode) -> None:
    for other, names in _MODE_FLAGS.items():
        wrong = [f"--{name.replace('_', '-')}" for name in names if given.get(name) is not None]
        if wrong and other != mode:
            how = "give --colocated, or leave it out" if other == "colocated" else "leave one of them out"
            raise ConfigError(f"{wrong[0]} is for {other} groups, and cluster.mode is {mode}: {how}")


def _runner() -> ModuleType:
    """`disagg.demo`, imported only now: it brings torch, Ray and transformers along."""
    try:
        return importlib.import_module("disagg.demo")
    except ModuleNotFoundError as exc:
        if exc.name != "disagg.demo":
            raise
        raise DisaggError("this installation has no module disagg.demo: install disagg anew") from exc
