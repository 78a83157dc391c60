"""KV cache groups from vLLM's specifications of them (`KVCacheSpec`), which may differ between versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.core.errors import ConfigError
from disagg.vllm.groups import CacheGroup
from disagg.vllm.states import RecurrentLayers, StateTensor

_FREEING = {"SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec"}
"""vLLM's specifications of groups whose blocks it frees early. Their subclasses are not supported."""


def cache_groups(groups: Sequence[Any], whole_blocks: bool, head_groups: int) -> tuple[CacheGroup, ...]:
    """Returns the KV cache groups of a `KVCacheConfig`. Raises ConfigError for groups that are not supported.

    `whole_blocks`: see `EngineFacts`; `head_groups`: see `RecurrentLayers`.
    """
    found = tuple(_group_of(group, whole_blocks, head_groups, alone=len(groups) == 1) for group in groups)
    attention = [group for group in found if group.recurrent is None]
    if not attention:
        raise ConfigError("the model has recurrent layers only; DisaggConnector needs attention layers too")
    sizes = sorted({group.block_size for group in attention})
    if whole_blocks and len(sizes) > 1:
        raise ConfigError(
            f"the KV cache groups have blocks of {', '.join(map(str, sizes))} tokens; on a CPU, DisaggConnector "
            "needs one size: start vLLM with --disable-hybrid-kv-cache-manager"
        )
    if all(group.chunk or group.window == 1 for group in attention):
        raise ConfigError(
            "all layers of the model have chunked local attention, so that there is no KV to move at the end of a "
            "chunk; DisaggConnector does not support this: start vLLM with --disable-hybrid-kv-cache-manager"
        )
    return found


def _group_of(group: Any, whole_blocks: bool, head_groups: int, *, alone: bool) -> CacheGroup:
    size, layers = group.kv_cache_spec.block_size, tuple(getattr(group, "layer_names", ()))
    # Layers of different heads can have a group together, with a specification for each layer.
    spec, *others = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
    match type(spec).__name__:
        case "SlidingWindowSpec":
            # vLLM keeps more tokens for some ways of speculative decoding.
            return CacheGroup(
                size, layers, window=spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
            )
        case "ChunkedLocalAttentionSpec":
            return CacheGroup(size, layers, chunk=spec.attention_chunk_size)
        case "FullAttentionSpec":
            return CacheGroup(size, layers)
        case "MambaSpec":
            _check_recurrent(spec, others)
            tensors = tuple(map(StateTensor, map(tuple, spec.shapes), spec.dtypes))
            kind = str(getattr(spec.mamba_type, "name", spec.mamba_type))
            found = RecurrentLayers(
                kind, tensors, head_groups, getattr(spec, "tp_replicated", False), whole_blocks
            )
            return CacheGroup(size, layers, recurrent=found)
    if not alone or _FREEING & {base.__name__ for base in type(spec).__mro__}:
        raise ConfigError(
            f"the model has a KV cache group of {type(spec).__name__}; DisaggConnector supports groups of full "
            "attention, sliding windows, chunked local attention and recurrent layers. Start vLLM with "
            "--disable-hybrid-kv-cache-manager, if it runs the model so"
        )
    return CacheGroup(size, layers)


def _check_recurrent(spec: Any, others: Sequence[Any]) -> None:
    """Raises ConfigError for recurrent layers whose states the connector cannot find in their blocks."""
    if any(
        (one.shapes, one.dtypes, one.mamba_type) != (spec.shapes, spec.dtypes, spec.mamba_type)
        for one in others
    ):
        problem = "recurrent layers with different states in one KV cache group"
    elif spec.mamba_cache_mode not in ("none", "align"):
        problem = f"mamba_cache_mode {spec.mamba_cache_mode}, only none and align"
    elif spec.num_speculative_blocks:
        problem = "speculative decoding with recurrent layers"
    else:
        return
    raise ConfigError(f"DisaggConnector does not support {problem}")
