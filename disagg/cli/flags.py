"""Flags and groups of flags that several commands share. `Sets` names the settings that a flag overrides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from disagg.core.config.read import Mode
from disagg.core.errors import ConfigError


@dataclass(frozen=True)
class Sets:
    """The settings that a flag overrides."""

    keys: tuple[str, ...]
    """Names of the settings, as `section.key`; all of them get the flag's value."""
    mode: Mode | None = None
    """The only `cluster.mode` in which the flag is valid; None: valid in every mode."""
    convert: Callable[[Any], object] | None = None
    """Function that converts the flag's value to the value of the settings; None: no conversion."""


_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
"""Further values of `--dtype`, as other servers name the element types."""

ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Folder of a Hugging Face checkpoint, or ORGANIZATION/MODEL of the hub.",
    ),
    Sets(("model.path",)),
]
RevisionFlag = Annotated[
    str | None,
    typer.Option("--revision", metavar="NAME", help="Branch, tag or commit of a model on the hub [main]."),
    Sets(("model.revision",)),
]
RandomInitFlag = Annotated[
    str | None,
    typer.Option("--random-init", metavar="NAME", help="Random weights; e.g. llama-3.1-8b, qwen3-0.6b."),
    Sets(("model.random_init",)),
]
DTypeFlag = Annotated[
    str | None,
    typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", show_default=False),
    Sets(("model.dtype",), convert=lambda name: _DTYPES.get(name, name)),
]
DeterministicFlag = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="Answers are bitwise independent of the rest of the batch; a few per cent slower [off].",
        show_default=False,
    ),
    Sets(("model.deterministic",)),
]
ComparedDeterministicFlag = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="Answers are bitwise independent of the rest of the batch [on a GPU: on].",
        show_default=False,
    ),
    Sets(("model.deterministic",)),
]
"""`--deterministic` for commands that compare tokens. Without this flag, `comparable` in `disagg.reference.answers`
chooses the mode."""
DeviceFlag = Annotated[
    str | None,
    typer.Option("--device", help="auto, cpu or cuda, for all groups."),
    Sets(("prefill.device", "decode.device", "colocated.device")),
]
ChunkTokensFlag = Annotated[
    int | None,
    typer.Option(
        "--chunk-tokens", help="Prompt tokens of one prefill or colocated step [2048 on a GPU, else 256]."
    ),
    Sets(("prefill.chunk_tokens", "colocated.chunk_tokens")),
]
JoinFlag = Annotated[
    str | None,
    typer.Option("--join", metavar="tcp://HOST:5570", help="Address of the directory of a `disagg launch`."),
]
ApiKeyFlag = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="File whose first line is the server's API key."),
]


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags that select the model's weights."""

    model: ModelFlag = None
    revision: RevisionFlag = None
    random_init: RandomInitFlag = None
    dtype: DTypeFlag = None


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """Flags for the ranks of a split system."""

    prefill_tp: Annotated[
        int | None,
        typer.Option("--prefill-tp", help="Ranks of a prefill group [1 or 2, by the number of GPUs]."),
        Sets(("prefill.tp",), "split"),
    ] = None
    decode_tp: Annotated[
        int | None,
        typer.Option("--decode-tp", help="Ranks of a decode group [1]."),
        Sets(("decode.tp",), "split"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ConfigFlags:
    """Flags that can change any setting: the configuration file and `--set`."""

    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Configuration, TOML or YAML.")
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any setting, e.g. transfer.layer_groups=8; repeatable."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TransferFlags:
    """Flags for prefill steps, pages and the path between two groups."""

    chunk_tokens: ChunkTokensFlag = None
    prefill_page_size: Annotated[
        int | None,
        typer.Option("--prefill-page-size", help="Tokens in one page of the prefill pool [16]."),
        Sets(("prefill.page_size",), "split"),
    ] = None
    decode_page_size: Annotated[
        int | None,
        typer.Option("--decode-page-size", help="Tokens in one page of the decode pool [16]."),
        Sets(("decode.page_size",), "split"),
    ] = None
    ring_bytes: Annotated[
        str | None,
        typer.Option(
            "--ring-bytes", metavar="SIZE", help="Receive ring of a decode rank [derived from its memory]."
        ),
        Sets(("transfer.ring_bytes",), "split"),
    ] = None
    transport: Annotated[
        Literal["auto", "ucx"] | None,
        typer.Option(
            "--transport",
            help="ucx: always use staging and ring, even if peers can open each other's pools [auto].",
        ),
        Sets(("transport.peer_memory",), "split", lambda name: name == "auto"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """Flags of the commands that run groups until a signal: `disagg launch` and `disagg serve`."""

    weights: ModelFlags
    deterministic: DeterministicFlag = None
    ranks: RankFlags
    colocated: Annotated[
        bool,
        typer.Option("--colocated", help="Use groups that prefill and decode, instead of separate groups."),
        Sets(("cluster.mode",), convert=lambda on: "colocated" if on else None),
    ] = False
    tp: Annotated[
        int | None,
        typer.Option("--tp", metavar="N", help="With --colocated: ranks of each group [1]."),
        Sets(("colocated.tp",), "colocated"),
    ] = None
    groups: Annotated[
        int | None,
        typer.Option("--groups", metavar="K", help="With --colocated: number of groups [1]."),
        Sets(("colocated.groups",), "colocated"),
    ] = None
    max_context_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-context-tokens",
            "--max-model-len",
            metavar="N",
            help="Most tokens of a prompt with its answer [the model's limit].",
        ),
        Sets(("prefill.max_context_tokens", "decode.max_context_tokens", "colocated.max_context_tokens")),
    ] = None
    device: DeviceFlag = None
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="ADDRESS", help="Use a running Ray cluster: auto or HOST:PORT [a private one]."
        ),
        Sets(("cluster.ray",)),
    ] = None
    source: ConfigFlags
    transfer: TransferFlags


def required_join(join: str | None) -> str:
    """Returns the value of `--join`. Raises `ConfigError` if the flag is missing."""
    if join is None:
        raise ConfigError(
            "--join tcp://HOST:PORT is missing: `disagg launch` prints the address of its cluster"
        )
    return join
