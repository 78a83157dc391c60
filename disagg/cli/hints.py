"""Advice for an unknown flag: a flag with a similar name, the replacement of another server's flag, or a setting."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from disagg.core.config.read import Config

_TP = "--prefill-tp and --decode-tp set the ranks of a group (with --colocated: --tp)"
_GROUPS = "--set prefill.groups=N --set decode.groups=N set the groups (with --colocated: --groups)"
_MEMORY = "--set prefill.mem_fraction=0.88 --set decode.mem_fraction=0.88 set the used share of a GPU"
_CONTEXT = "--max-context-tokens N of serve and launch limits a prompt with its answer"
_TOKEN = "the variable HF_TOKEN holds the token for private models of the hub"
_IMAGES = "of multimodal checkpoints only the text part is served"
_TOOLS = "the chat template selects the parser; --set api.tool_parser=none, or a name, overrides it"
_REASONING = "the chat template selects the parser; --set api.reasoning_parser=none, or a name, overrides it"
_GRAPHS = "--set prefill.graphs=false --set decode.graphs=false turn CUDA graphs off"
_TLS = "the HTTP API has no TLS of its own: put a proxy in front"

OTHER_SERVERS: Mapping[str, str] = {
    "--tensor-parallel-size": _TP,
    "-tp": _TP,
    "--tp-size": _TP,
    "--pipeline-parallel-size": "pipeline stages are not supported; " + _TP,
    "-pp": "pipeline stages are not supported; " + _TP,
    "--data-parallel-size": _GROUPS,
    "-dp": _GROUPS,
    "--max-model-len": _CONTEXT,
    "--context-length": _CONTEXT,
    "--served-model-name": "--model-name NAME sets the model's name in the API",
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--max-num-seqs": "--set decode.max_requests=N limits the running requests of a group",
    "--max-num-batched-tokens": "--chunk-tokens N sets the prompt tokens of one step",
    "--enable-chunked-prefill": "prompts are always computed in chunks; --chunk-tokens N sets their size",
    "--block-size": "--prefill-page-size N and --decode-page-size N set the tokens of a page",
    "--num-gpu-blocks-override": "--set decode.pool_tokens=N sets the size of the KV pool",
    "--kv-cache-dtype": "--set model.kv_dtype=int8 (or float8_e4m3fn, float8_e5m2) sets the type of stored KV",
    "--enable-prefix-caching": "prefix caching is on by default",
    "--no-enable-prefix-caching": "--set prefill.prefix_cache=false --set decode.prefix_cache=false turn it off",
    "--swap-space": "--set decode.swap_bytes=4GiB sets the host memory for preempted requests",
    "--profiler-config": "--set metrics.profile_folder=/DIR lets `disagg profile` record traces of running ranks",
    "--seed": "--set model.seed=N sets the seed of random weights; requests have the field seed",
    "--enforce-eager": _GRAPHS,
    "--disable-cuda-graph": _GRAPHS,
    "--load-format": "--random-init NAME replaces `--load-format dummy`; checkpoints need no flag",
    "--quantization": "the checkpoint's config.json names its format; --set model.kv_dtype=int8 stores KV in 8 bits",
    "--trust-remote-code": "code of checkpoints is never run; `disagg models` lists the supported types",
    "--tokenizer": "the tokenizer is read from the model's folder",
    "--chat-template": "the chat template is read from the model's folder (chat_template.jinja)",
    "--api-key": "--api-key-file FILE has one key per line; the variable DISAGG_API_KEYS holds keys too",
    "--distributed-executor-backend": "--ray ADDRESS uses a running Ray cluster; without it, a private one",
    "--kv-transfer-config": "--prefill-tp and --decode-tp set both groups; KV moves without further settings",
    "--disaggregation-mode": "`disagg serve` starts prefill and decode groups; `disagg launch` starts them alone",
    "--api-server-count": "--workers N runs several router processes on one port",
    "--uvicorn-log-level": "--set log.level=warning sets the level of the log",
    "--log-level": "--set log.level=warning sets the level of the log",
    "--model-path": "--model MODEL, or the model as the first argument of serve",
    "--download-dir": "the variable HF_HUB_CACHE sets the folder of downloaded models",
    "--hf-token": _TOKEN,
    "--limit-mm-per-prompt": _IMAGES,
    "--language-model-only": _IMAGES,
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-call-parser": _TOOLS,
    "--reasoning-parser": _REASONING,
    "--enable-reasoning": _REASONING,
}
"""Flags of vLLM and SGLang, each with a sentence about its replacement here."""

_NEAR = 0.8
"""Least similarity (0 to 1) of a suggested flag. With less, `--tensor-parallel-size` would suggest
`--decode-page-size`."""


def advice(flag: str, own: Iterable[str], others: Mapping[str, Iterable[str]]) -> str:
    """Returns advice on how to replace the unknown `flag`; empty if there is none.

    `own`: flags of the command. `others`: flags of the other commands, by command.
    """
    flag = flag.split("=")[0]
    name = f"--{flag.lstrip('-').replace('_', '-')}" if flag.startswith("--") else flag
    own = [one for one in own if one.startswith("--")]
    if name in own:
        return f"write {name}"
    if name in OTHER_SERVERS:
        return OTHER_SERVERS[name]
    if settings := _settings(name.removeprefix("--").replace("-", "_")):
        return f"{' or '.join(f'--set {one}=VALUE' for one in settings)} changes that setting"
    if near := difflib.get_close_matches(name, own, n=1, cutoff=_NEAR):
        return f"did you mean {near[0]}?"
    if known := difflib.get_close_matches(name, OTHER_SERVERS, n=1, cutoff=_NEAR + 0.05):
        return OTHER_SERVERS[known[0]]
    if commands := [command for command, flags in others.items() if name in flags]:
        return f"{name} is a flag of {', '.join(f'`disagg {one}`' for one in commands[:3])}"
    return ""


def flags(command: Any) -> list[str]:
    """Returns the names of all flags of a typer command, including short names and `--no-` forms."""
    return [name for one in command.params for name in (*one.opts, *one.secondary_opts)]


def flags_of_commands(group: Any, path: str = "") -> dict[str, list[str]]:
    """Returns the flags of each command below `group`, by the words after `disagg`."""
    found: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= flags_of_commands(command, f"{path}{name} ")
        else:
            found[path + name] = flags(command)
    return found


def _settings(key: str) -> list[str]:
    """Returns the settings whose key is `key`, as `section.key`."""
    return [
        f"{section.name}.{key}"
        for section in msgspec.structs.fields(Config)
        if key in {field.name for field in msgspec.structs.fields(section.type)}
    ]
