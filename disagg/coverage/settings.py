"""Settings that individual model types need, in addition to the common sizes of all tiny models."""

from __future__ import annotations

from typing import Any

_GEMMA3N = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
_GEMMA4 = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 2,
}
_NO_PER_LAYER_INPUT = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_QWEN4 = {
    "ple_layer_ids": [],
    "hc_count": 2,
    "hc_lowrank": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_UNTIED = {"tie_word_embeddings": False}  # with tied embeddings, these models repeat one token
_WINDOWS: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 8,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}

OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "ctrl": _UNTIED,
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"layer_types": _WINDOWS["layer_types"]},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": _GEMMA3N,
    "gemma4_assistant": {"text_config": _NO_PER_LAYER_INPUT},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": _MIXED,
    "hrm_text": {"num_hidden_layers": 2},  # the stacks of two layers run eight times
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "laguna": {"layer_types": _WINDOWS["layer_types"]},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": _WINDOWS["layer_types"]},
    "moshi": {"sliding_window": 256},  # as long as the context, like moshi's default
    "phimoe": {"sliding_window": 256},
    "qwen2": _WINDOWS,
    "qwen3": _WINDOWS,
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 16)},
    "roformer": _UNTIED,
    "smollm3": _WINDOWS,
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16} | _UNTIED,
}
"""Settings by model type. Keys may also be the types of nested configurations."""
