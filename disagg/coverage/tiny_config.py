"""Makes a tiny configuration of any model type: sets the same small sizes, under the setting names of the type."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from disagg.coverage.settings import OWN_SETTINGS

LAYERS = 4
WINDOW_TOKENS = 8
CONTEXT_TOKENS = 256
VOCAB_SIZE = 96

_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 4, 2, 16
_SIZES: tuple[tuple[int, str], ...] = (
    (VOCAB_SIZE, "vocab_size"),
    (CONTEXT_TOKENS, "max_position_embeddings n_positions max_seq_len context_length"),
    (WINDOW_TOKENS, "sliding_window sliding_window_size local_attention attention_window_size"),
    (_HIDDEN, "hidden_size n_embd d_model embedding_size emb_dim"),
    (96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dim_ff ffn_hidden_size"),
    (96, "intermediate_size_mlp dense_intermediate_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    (LAYERS, "num_decoder_layers num_encoder_layers"),
    (_HEADS, "num_attention_heads n_head n_heads num_heads attention_heads linear_num_heads index_n_heads"),
    (_HEADS, "decoder_attention_heads encoder_attention_heads linear_num_value_heads"),
    (_HEADS, "num_decoder_attention_heads num_encoder_attention_heads"),
    (_KV_HEADS, "num_key_value_heads linear_num_key_heads"),
    (_HEAD_DIM, "head_dim kv_channels kv_lora_rank q_lora_rank qk_nope_head_dim index_head_dim rotary_dim"),
    (
        _HEAD_DIM,
        "mamba_d_head mamba_head_dim mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size",
    ),
    (8, "v_head_dim qk_rope_head_dim index_topk linear_key_head_dim linear_value_head_dim linear_head_dim"),
    (8, "mamba_n_heads mamba_num_heads mamba_dt_rank"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk moe_k n_shared_experts"),
    (1, "n_group topk_group first_k_dense_replace num_dense_layers n_groups mamba_n_groups mamba_ngroups"),
    (1, "num_shared_experts moe_num_shared_experts bos_token_id"),
    (0, "pad_token_id"),
)
"""Pairs of a value and the names of all settings that get this value."""
_BY_NAME = {name: size for size, names in _SIZES for name in names.split()}
_LATENT = {"head_dim": 8, "num_key_value_heads": _HEADS}
_BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
"""Settings with one entry per layer."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Returns a configuration of a few thousand parameters, with every kind of layer that the type's default has.

    The configuration has no end token, so answers end by length only.
    """
    return _tiny(CONFIG_MAPPING[model_type])


def _tiny(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    own = OWN_SETTINGS.get(kind.model_type, {})
    names = {field.name: field for field in dataclasses.fields(kind)}
    settings: dict[str, Any] = {name: size for name, size in _BY_NAME.items() if name in names}
    settings |= {
        name: True for name in ("is_decoder",) if name in names
    }  # a causal model of an encoder's type
    if "kv_lora_rank" in names:  # latent attention: one K and V head per query head, rotated in part
        settings |= {name: size for name, size in _LATENT.items() if name in names}
    settings |= {name: _tiny(part) for name, part in _parts(kind, own).items()}
    settings |= _layer_kinds(kind, names)
    config = kind(**settings | own)
    for name in ("eos_token_id", "forced_eos_token_id"):
        if name in names:
            setattr(config, name, None)
    return config


def _parts(kind: type[PreTrainedConfig], own: dict[str, Any]) -> dict[str, type[PreTrainedConfig]]:
    """Returns, by name, the default classes of the nested configurations that `own` does not set."""
    wanted = [name for name in kind.sub_configs if name not in own]
    whole = kind() if wanted else None
    found = {name: type(getattr(whole, name, None)) for name in wanted}
    return {name: part for name, part in found.items() if issubclass(part, PreTrainedConfig)}


def _layer_kinds(kind: type[PreTrainedConfig], names: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the per-layer settings: lists that cycle through the kinds of the type's default configuration."""
    listed = [name for name in _BY_LAYER if name in names]
    if not listed:
        return {}
    whole = kind()
    found = {name: list(dict.fromkeys(getattr(whole, name, None) or ())) for name in listed}
    return {name: [kinds[i % len(kinds)] for i in range(LAYERS)] for name, kinds in found.items() if kinds}
