"""Configurations of real architectures by name, for random weights (benchmarks, and tests without a download)."""

from __future__ import annotations

from typing import Any

from disagg.core.errors import ConfigError

_LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_EXPERTS = ("num_experts", "num_local_experts")
_TINY = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "initializer_range": 0.2,
}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8-block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "fp8-channel": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "int8-channel": _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "int4-group": _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
    "mxfp4": {"quant_method": "mxfp4"},
}
"""`quantization_config` of the formats in which random weights can be drawn, by name."""


def _shape(hidden: int, mlp: int, layers: int, q_heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


_LLAMA3 = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_QWEN3 = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_MISTRAL = {
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_NEMOTRON_LAYERS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
"""Layers of Nemotron-H 8B by their letters. Its other settings are the defaults of its configuration class."""


def _granite_hybrid(hidden: int, mlp: int, layers: int, attention: range, heads: int) -> dict[str, Any]:
    """Returns the settings of a Granite 4 hybrid without experts: attention in the layers `attention`, Mamba 2 in all
    others."""
    kinds = ["attention" if layer in attention else "mamba" for layer in range(layers)]
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "shared_intermediate_size": mlp,
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "mamba_n_heads": heads,
        "mamba_d_head": 2 * hidden // heads,
        "mamba_n_groups": 1,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        **_shape(2880, 2880, layers, 64, 8, 64),
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_parameters": dict(_GPT_OSS_ROPE),
        "tie_word_embeddings": False,
        "bos_token_id": 199998,
        "eos_token_id": 200002,
    }


_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "LlamaConfig",
        {**_LLAMA3, **_shape(4096, 14336, 32, 32, 8, 128), "rope_parameters": _LLAMA31_ROPE},
    ),
    "llama-3.2-1b": (
        "LlamaConfig",
        {
            **_LLAMA3,
            **_shape(2048, 8192, 16, 32, 8, 64),
            "rope_parameters": {**_LLAMA31_ROPE, "factor": 32.0},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {**_QWEN3, **_shape(4096, 12288, 36, 32, 8, 128), "tie_word_embeddings": False},
    ),
    "qwen3-0.6b": (
        "Qwen3Config",
        {**_QWEN3, **_shape(1024, 3072, 28, 16, 8, 128), "tie_word_embeddings": True},
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {
            **_QWEN3,
            **_shape(2048, 6144, 48, 32, 4, 128),
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": ("GptOssConfig", _gpt_oss(layers=24, experts=32)),
    "gpt-oss-120b": ("GptOssConfig", _gpt_oss(layers=36, experts=128)),
    "mistral-7b": ("MistralConfig", {**_MISTRAL, **_shape(4096, 14336, 32, 32, 8, 128)}),
    "granite-4.0-h-micro": (
        "GraniteMoeHybridConfig",
        {
            **_granite_hybrid(2048, 8192, 40, range(5, 40, 10), 64),
            "vocab_size": 100352,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_d_state": 128,
            "mamba_chunk_size": 256,
            "rms_norm_eps": 1e-5,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
            "bos_token_id": 100257,
            "eos_token_id": 100257,
        },
    ),
    "nemotron-h-8b": (
        "NemotronHConfig",
        {
            "layers_block_type": [_NEMOTRON_LAYERS[letter] for letter in _NEMOTRON_H_8B],
            "max_position_embeddings": 8192,
        },
    ),
    "small-llama": (
        "LlamaConfig",
        {**_TINY, **_shape(512, 1408, 6, 8, 4, 64), "max_position_embeddings": 4096},
    ),
    "tiny-llama": ("LlamaConfig", {**_TINY, "num_key_value_heads": 4}),
    "tiny-qwen3": ("Qwen3Config", {**_TINY, "num_key_value_heads": 2}),
    "tiny-qwen3-moe": (
        "Qwen3MoeConfig",
        {
            **_TINY,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "tiny-granite-h": (
        "GraniteMoeHybridConfig",
        {
            **_TINY,
            **_granite_hybrid(96, 100, 4, range(1, 4, 2), 12),
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
            "max_position_embeddings": 1024,
        },
    ),
    "tiny-mistral": ("MistralConfig", {**_TINY, "num_key_value_heads": 6, "sliding_window": 32}),
}

NAMES = tuple(_MODELS)
"""Names that `named_config` accepts."""


def require_named(name: str) -> None:
    """Raises ConfigError for an unknown architecture or weight format, without importing transformers."""
    architecture, colon, form = name.lower().partition(":")
    if architecture not in _MODELS:
        raise ConfigError(f"unknown architecture {architecture!r}; choose one of {', '.join(NAMES)}")
    if colon and form not in QUANTIZATIONS:
        raise ConfigError(f"unknown weight format {form!r}; choose one of {', '.join(QUANTIZATIONS)}")
    if form == "mxfp4" and not any(_MODELS[architecture][1].get(key) for key in _EXPERTS):
        raise ConfigError(f"the weight format mxfp4 is one of experts, and {architecture} has none")


def named_config(name: str) -> Any:
    """Returns the transformers configuration of a named architecture; see `require_named`.

    After a colon, the name may have a format of `QUANTIZATIONS`, in which linear layers and experts are quantized.
    """
    import transformers

    require_named(name)
    architecture, _, form = name.lower().partition(":")
    class_name, values = _MODELS[architecture]
    config = getattr(transformers, class_name)(**values)
    config.architectures = [class_name.replace("Config", "ForCausalLM")]
    if form:
        config.quantization_config = QUANTIZATIONS[form]
    return config
