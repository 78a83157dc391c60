"""Whether a group may have a prefix cache for its model."""

from __future__ import annotations

from disagg.model.spec.model_spec import ModelSpec


def cache_refusal(spec: ModelSpec, role: str, deterministic: bool) -> str:
    """Returns why a group of `role` has no prefix cache for this model; empty if it may have one."""
    if role == "decode" and spec.has_state and deterministic:
        return "the bits of the model's KV depend on where the prefill group ends a prompt's last chunk"
    if role == "decode" and not spec.has_attention:
        return "the model has no KV, and a decode group receives the recurrent states"
    return spec.cache_refused
