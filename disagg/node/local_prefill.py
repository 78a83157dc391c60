"""Whether and how much a decode group computes prompts itself."""

from __future__ import annotations

from disagg.core.config.read import DecodeConfig, GroupConfig
from disagg.core.errors import ConfigError
from disagg.model.runner import ModelRunner

GPU_TOKENS = 256
"""Automatic value of `decode.local_prefill_tokens` on a GPU. A step of an 8B model with so many tokens takes little
longer than one of 64, because both are bound by reading the weights."""
MIN_PREFILL_TOKENS = 64
"""Smallest number of prompt tokens in a step, however many answers run."""


def local_prefill_tokens(group: GroupConfig, runner: ModelRunner) -> int:
    """Returns the tokens of a step in which the group also computes prompts; 0 if it never does.

    Raises `ConfigError` if `decode.local_prefill_tokens` is set for a model that does not allow it.
    """
    if not isinstance(group, DecodeConfig):
        return 0
    wanted, obstacle = group.local_prefill_tokens, _obstacle(group, runner)
    if wanted and obstacle:
        raise ConfigError(f"decode.local_prefill_tokens = {wanted} is not possible: {obstacle}; set it to 0")
    if obstacle:
        return 0
    return (GPU_TOKENS if runner.device.type == "cuda" else 0) if wanted is None else wanted


def _obstacle(group: DecodeConfig, runner: ModelRunner) -> str:
    """Returns why prompts must be computed by a prefill group; empty if they need not."""
    spec = runner.spec
    if spec.has_state or spec.whole_prompts:
        return "the model has recurrent layers"
    if group.kv_dtype != "model":
        return f"decode.kv_dtype = {group.kv_dtype} differs from the type with which prefill groups compute"
    return ""
