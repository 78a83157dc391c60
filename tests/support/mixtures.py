"""Small mixtures of experts of each form, whose heads two or three ranks can share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from architectures import MLA, SIZES
from transformers import (
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JetMoeConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

SHARED: dict[str, Any] = SIZES | {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
}
INNER = 40  # three ranks get 8, 16 and 16
ROUTED: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
_GRANITE = {key: SHARED[key] for key in SHARED if key != "head_dim"} | {"intermediate_size": INNER}
_LATENT = SHARED | MLA | {"num_key_value_heads": 6, "moe_intermediate_size": INNER, "n_routed_experts": 8}

MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**SHARED | {"intermediate_size": INNER}, num_local_experts=5),
    "qwen2-moe": lambda: Qwen2MoeConfig(**SHARED, **ROUTED, shared_expert_intermediate_size=24),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SHARED, **ROUTED, norm_topk_prob=True),
    "deepseek-v2": lambda: DeepseekV2Config(**_LATENT, num_experts_per_tok=2, first_k_dense_replace=1),
    "deepseek-v3": lambda: DeepseekV3Config(
        **_LATENT, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=2
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **SHARED,
        num_experts_per_tok=2,
        moe_intermediate_size=INNER,
        n_routed_experts=4,
        first_k_dense_replace=1,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **SHARED | {"intermediate_size": INNER}, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    ),
    "granite": lambda: GraniteMoeHybridConfig(
        **_GRANITE,
        layer_types=["full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
        mamba_n_heads=6,
    ),
    "olmoe": lambda: OlmoeConfig(**_GRANITE, num_experts=4, num_experts_per_tok=2),
}

_UNSIZED = {
    key: SHARED[key] for key in SHARED if key not in ("head_dim", "intermediate_size", "num_hidden_layers")
}
OTHER_MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama4": lambda: Llama4TextConfig(
        **SHARED | {"intermediate_size": INNER},
        intermediate_size_mlp=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
    ),
    "longcat": lambda: LongcatFlashConfig(
        **_UNSIZED | MLA | {"num_key_value_heads": 6},
        num_layers=2,
        ffn_hidden_size=24,
        expert_ffn_hidden_size=INNER,
        n_routed_experts=3,
        zero_expert_num=2,
        moe_topk=2,
    ),
    "dbrx": lambda: DbrxConfig(
        d_model=48,
        n_heads=6,
        n_layers=2,
        max_seq_len=256,
        vocab_size=259,
        initializer_range=0.2,
        attn_config={"kv_n_heads": 6, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": INNER, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "jetmoe": lambda: JetMoeConfig(
        **_UNSIZED | {"num_key_value_heads": 3},
        num_hidden_layers=2,
        kv_channels=8,
        intermediate_size=INNER,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
"""Mixtures whose experts transformers does not mark with its decorator."""
