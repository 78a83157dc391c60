"""Whether and how much a decode group computes prompts itself."""

from __future__ import annotations

from disagg.core.config.read import Config, DecodeConfig, GroupConfig
from disagg.core.errors import ConfigError
from disagg.model.runner import ModelRunner

GPU_TOKENS = 128
"""Automatic value of `decode.local_prefill_tokens` on a GPU. On an H200, products of an 8B model take 4.0 ms for 64
tokens, 4.6 ms for 128, and 6.0 ms for 256."""


def local_prefill_tokens(config: Config, group: GroupConfig, runner: ModelRunner) -> int:
    """Returns the tokens of a step in which `group` also computes prompts; 0 if it never does.

    Raises `ConfigError` if `decode.local_prefill_tokens` is set and not possible.
    """
    if not isinstance(group, DecodeConfig):
        return 0
    wanted, obstacle = group.local_prefill_tokens, _obstacle(config, group, runner)
    if wanted and obstacle:
        raise ConfigError(f"decode.local_prefill_tokens = {wanted} is not possible: {obstacle}; set it to 0")
    if wanted is not None and wanted > group.chunk_tokens:
        raise ConfigError(
            f"decode.local_prefill_tokens = {wanted} is more than the largest step, "
            f"decode.chunk_tokens = {group.chunk_tokens}"
        )
    if obstacle:
        return 0
    automatic = min(GPU_TOKENS, group.chunk_tokens) if runner.device.type == "cuda" else 0
    return automatic if wanted is None else wanted


def tail_tokens(config: Config, group: GroupConfig, runner: ModelRunner) -> int:
    """Returns the most tokens of a prompt's tail that `group` computes in one step, while a prefill group computes
    the head; 0 if it never does.

    The KV of a head must not depend on the prompt's length, as it does with rotary frequencies that change with
    length (`ModelSpec.rope_switch_tokens`) and with sparse layers. And layers must be computed in the order of their
    numbers, which several classes of layers are not.
    """
    spec = runner.spec
    plain = len(spec.layout.classes) == 1 and not (spec.rope_switch_tokens or spec.cache_refused)
    return group.chunk_tokens if plain and local_prefill_tokens(config, group, runner) else 0


def _obstacle(config: Config, group: DecodeConfig, runner: ModelRunner) -> str:
    """Returns why prompts must be computed by a prefill group; empty if they need not."""
    spec = runner.spec
    if spec.has_state or spec.whole_prompts:
        return "the model has recurrent layers"
    if group.kv_dtype != "model":
        return f"decode.kv_dtype = {group.kv_dtype} differs from the type with which prefill groups compute"
    if config.model.deterministic and config.prefill.tp != group.tp:
        return (
            f"decode.tp ({group.tp}) differs from prefill.tp ({config.prefill.tp}), so tokens would depend on the "
            f"load, which model.deterministic excludes"
        )
    return ""
