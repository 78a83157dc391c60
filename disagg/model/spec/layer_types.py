"""Which layers of a model keep K and V, and which keep a recurrent state, by the types in its configuration."""

from __future__ import annotations

from typing import Any

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
_RECURRENT = {"linear_attention", "conv"}
_BOTH = {"hybrid"}
_NEITHER = {"moe", "mlp"}


def layer_config(config: Any, layer: int) -> Any:
    """The configuration as one layer sees it: any value of it may differ from layer to layer."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def setting(config: Any, name: str) -> Any:
    """A value of a configuration, None without it; where layers differ, the largest of theirs."""
    if not getattr(config, "is_heterogeneous", False):
        return getattr(config, name, None)
    each = (getattr(layer_config(config, layer), name, None) for layer in range(config.num_hidden_layers))
    return max((value for value in each if value is not None), default=None)


def attention_layers(config: Any) -> tuple[int, ...]:
    """Layers with K and V, ascending: the layers of the KV pool are these, in this order."""
    return _of_types(config, _ATTENTION | _BOTH)


def recurrent_layers(config: Any) -> tuple[int, ...]:
    """Layers with a recurrent state (of a convolution, a state space model or linear attention), ascending."""
    return _of_types(config, _RECURRENT | _BOTH)


def unknown_types(config: Any) -> list[str]:
    """Types of layers that we cannot serve, sorted."""
    return sorted(set(_types(config)) - _ATTENTION - _RECURRENT - _BOTH - _NEITHER)


def _of_types(config: Any, wanted: set[str]) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(_types(config)) if kind in wanted)


def _types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
