"""Finds a model's attention layers and recurrent layers by the layer types in its configuration."""

from __future__ import annotations

from typing import Any

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
_RECURRENT = {"linear_attention", "conv"}
_BOTH = {"hybrid"}
_NEITHER = {"moe", "mlp"}


def layer_config(config: Any, layer: int) -> Any:
    """Returns the configuration of one layer. In heterogeneous models, any value may differ between layers."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def setting(config: Any, name: str) -> Any:
    """Returns the value of a setting, or the largest value if layers differ. None if the setting is missing."""
    if not getattr(config, "is_heterogeneous", False):
        return getattr(config, name, None)
    each = (getattr(layer_config(config, layer), name, None) for layer in range(config.num_hidden_layers))
    return max((value for value in each if value is not None), default=None)


def attention_layers(config: Any) -> tuple[int, ...]:
    """Returns the indices of the layers with K and V, ascending. The KV pool has these layers in this order."""
    return _of_types(config, _ATTENTION | _BOTH)


def recurrent_layers(config: Any) -> tuple[int, ...]:
    """Returns the indices of the layers with a recurrent state (convolution, state space or linear attention),
    ascending."""
    return _of_types(config, _RECURRENT | _BOTH)


def unknown_types(config: Any) -> list[str]:
    """Returns the unsupported layer types, sorted."""
    return sorted(set(_types(config)) - _ATTENTION - _RECURRENT - _BOTH - _NEITHER)


def _of_types(config: Any, wanted: set[str]) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(_types(config)) if kind in wanted)


def _types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
