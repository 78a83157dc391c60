"""Whether a group may have a prefix cache for its model, and a second tier of it in host memory."""

from __future__ import annotations

from disagg.core.config.groups import GroupConfig
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.host_memory import HostCacheSize


def cache_refusal(spec: ModelSpec, role: str, deterministic: bool) -> str:
    """Returns why a group of `role` has no prefix cache for this model; empty if it may have one."""
    if role == "decode" and spec.has_state and deterministic:
        return "the bits of the model's KV depend on where the prefill group ends a prompt's last chunk"
    if role == "decode" and not spec.has_attention:
        return "the model has no KV, and a decode group receives the recurrent states"
    return spec.cache_refused


def configured_host_cache(
    group: GroupConfig, spec: ModelSpec, deterministic: bool, *, on_gpu: bool
) -> HostCacheSize | None:
    """Returns the size of the second tier on each rank that settings, model and device determine.

    None if each rank chooses the size (`automatic_host_cache`): on a GPU, or because the group has a third tier,
    which needs a second one. On a CPU the pool itself is in host memory.
    """
    refused = cache_refusal(spec, group.role, deterministic)
    if refused or not group.prefix_cache:
        return HostCacheSize(0, f"no prefix cache: {refused or f'{group.role}.prefix_cache'}")
    if not spec.has_attention:
        return HostCacheSize(0, "the model has no KV")
    if group.host_cache_bytes is not None:
        return HostCacheSize(group.host_cache_bytes, "set")
    if on_gpu or has_third_tier(group):
        return None
    return HostCacheSize(0, "automatic: none on a CPU without a storage")


def has_third_tier(group: GroupConfig) -> bool:
    """Returns whether the group has a tier behind host memory."""
    return bool(group.storage) or group.host_cache_shared


def repeats_pool(group: GroupConfig) -> bool:
    """Returns whether a small second tier would only repeat KV that the pool has cached too.

    False with write-back, because the tier then gets only evicted KV, and with a third tier, which needs a second
    tier of any size.
    """
    return group.host_cache_write != "back" and not has_third_tier(group)
