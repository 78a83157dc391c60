"""The heads of each attention layer and the layer's place in the KV cache, read from the model's configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from disagg.core.errors import UnsupportedModelError
from disagg.model.spec.layer_types import attention_layers, layer_config, setting

_INDEXED = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
"""Model types whose indexers store one key per token."""
DOGE_ELEMENTS = 8
"""Number of elements that Doge's score adds to each key. The score needs one element; padding keeps the head size a
multiple of 16 bytes."""


class HeadShape(msgspec.Struct, frozen=True):
    """The attention heads of a layer."""

    q_heads: int
    kv_heads: int
    k_dim: int
    """Elements of a K head."""
    v_dim: int
    """Elements of a V head; 0 for index keys, which have neither V nor query heads."""


class LayerPlace(msgspec.Struct, frozen=True):
    """The layer of the KV cache that an attention layer reads."""

    layer: int
    """Index of the layer in the cache's order; see `KVLayout`."""
    shared: bool = False
    """Whether an earlier attention layer writes the K and V that this layer reads."""
    index: int = -1
    """Layer of the cache that holds this layer's index keys; -1 if the layer has no indexer."""


class CachePlan(NamedTuple):
    """The layers of a KV cache."""

    classes: tuple[tuple[HeadShape, int], ...]
    """Heads and number of layers of each layer class."""
    places: tuple[LayerPlace, ...]
    """Place of each attention layer in the cache; empty if the cache has all attention layers in order."""


def plan_cache(config: Any) -> CachePlan:
    """Returns the cache layers that a model with attention layers needs. Classes are ordered by their first
    layers."""
    layers = attention_layers(config)
    shapes, sources = [_shape(config, layer) for layer in layers], _sources(config, layers)
    owners: dict[HeadShape, list[int]] = {}
    for number, shape in enumerate(shapes):
        if sources[number] == number:
            owners.setdefault(shape, []).append(number)
    order = [number for numbers in owners.values() for number in numbers]
    classes = [(shape, len(one)) for shape, one in owners.items()]
    indexed = _indexed(config, layers)
    places = tuple(
        LayerPlace(order.index(s), s != n, len(order) + indexed.index(n) if n in indexed else -1)
        for n, s in enumerate(sources)
    )
    if indexed:
        classes.append((HeadShape(0, 1, setting(config, "index_head_dim"), 0), len(indexed)))
    plain = len(classes) == 1 and order == list(range(len(layers)))
    return CachePlan(tuple(classes), () if plain else places)


def unknown_indexers(config: Any) -> bool:
    """Returns whether the model has sparse layers whose indexer is unsupported."""
    types = getattr(config, "layer_types", None) or ()
    return "indexed_attention" in types and config.model_type not in _INDEXED


def _indexed(config: Any, layers: tuple[int, ...]) -> list[int]:
    """Returns the attention layers that have an indexer, as indices among the attention layers.

    A sparse layer without an indexer reads the tokens that the previous layer has chosen.
    """
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    return [
        n for n, layer in enumerate(layers) if types[layer] == "indexed_attention" and kinds[layer] == "full"
    ]


def _sources(config: Any, layers: tuple[int, ...]) -> list[int]:
    """Returns, for each attention layer, the index of the layer whose K and V it reads.

    Both are indices among the attention layers.
    """
    try:
        modes = getattr(config, "kv_sharing_modes", None) or [None] * config.num_hidden_layers
    except ValueError as exc:  # a layer reuses K and V, but no earlier layer of its type stores them
        raise UnsupportedModelError(f"{config.model_type} is not supported: {exc}") from exc
    stored = {config.layer_types[layer]: n for n, layer in enumerate(layers) if modes[layer] == "store"}
    return [
        stored[config.layer_types[layer]] if modes[layer] == "reuse" else n for n, layer in enumerate(layers)
    ]


def _shape(config: Any, layer: int) -> HeadShape:
    own = layer_config(config, layer)
    each = getattr(own, "num_attention_heads_per_layer", None)
    q_heads = each[layer] if each else own.num_attention_heads
    if getattr(own, "kv_lora_rank", None):  # latent attention: the cache has K and V of each query head
        return HeadShape(q_heads, q_heads, own.qk_nope_head_dim + own.qk_rope_head_dim, own.v_head_dim)
    k_dim = getattr(own, "head_dim", None) or own.hidden_size // q_heads
    if own.model_type == "falcon":
        return HeadShape(q_heads, _falcon_kv_heads(own), k_dim, k_dim)
    kv_heads = getattr(own, "num_key_value_heads", None) or q_heads
    if own.model_type == "doge":
        return HeadShape(q_heads, kv_heads, k_dim + DOGE_ELEMENTS, k_dim)
    if own.model_type == "diffllama":  # each K head is stored with the values of two heads
        return HeadShape(q_heads, kv_heads, k_dim, 2 * k_dim)
    if own.model_type == "mimo_v2_flash" and own.layer_types[layer] == "sliding_attention":
        kv_heads *= 2  # defined in the model's code, not in its configuration
    return HeadShape(q_heads, kv_heads, k_dim, getattr(own, "v_head_dim", None) or k_dim)


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)
