"""Small checkpoints of many architectures, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AXK2Config,
    BailingHybridConfig,
    BambaConfig,
    DeepseekV32Config,
    Dots3NoteTextConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GraniteMoeHybridConfig,
    HYV4Config,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    MiMoV2FlashConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
    ZambaConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
ENCODER = {key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "head_dim")}
MLA = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 8,
}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 40,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 1.5 * i for i in range(8)],
}
"""Changes beyond 40 tokens; for `SIZES`."""


def save(config: PreTrainedConfig, directory: Path) -> Path:
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "proj_bias")):
            parameter.data.normal_()
    model.save_pretrained(directory)
    return directory


RECURRENT: dict[str, Any] = {key: SIZES[key] for key in SIZES if key != "head_dim"} | {"num_hidden_layers": 4}
_TWO = {"num_hidden_layers": 2}
"""Of models whose layers are all alike."""
_MIXED = ["linear_attention", "full_attention"] * 2
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_NO_ATTENTION = {
    key: RECURRENT[key]
    for key in RECURRENT
    if key
    not in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings")
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-next": lambda: Qwen3NextConfig(
        **RECURRENT, **_DELTA, **_EXPERTS, head_dim=16, shared_expert_intermediate_size=32, layer_types=_MIXED
    ),
    "falcon-h1": lambda: FalconH1Config(**RECURRENT | _TWO, **_MAMBA2, head_dim=16, mamba_d_ssm=128),
    "lfm2": lambda: Lfm2Config(**RECURRENT, layer_types=["conv", "full_attention"] * 2),
    "jamba": lambda: JambaConfig(
        **RECURRENT, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=8
    ),
    "zamba2": lambda: Zamba2Config(
        **RECURRENT | {"num_key_value_heads": 4},
        mamba_d_state=16,
        mamba_ngroups=1,
        chunk_size=16,
        time_step_min=0.05,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        num_mem_blocks=1,
    ),
    "mamba2": lambda: Mamba2Config(
        **_NO_ATTENTION | _TWO, num_heads=8, head_dim=16, state_size=16, n_groups=1, chunk_size=16
    ),
}
"""Small models with recurrent layers of every kind: delta rule, Mamba 2 beside attention, convolution, Mamba 1,
attention that several layers share, and no attention at all."""

_CLASSED: dict[str, Any] = SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": False}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20}
_GEMMA: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 259}
_LONGER: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}

_SPARSE: dict[str, Any] = (
    _CLASSED
    | MLA
    | {
        "index_topk": 12,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    }
)
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_SHARED_CHOICE = {"indexer_types": ["full", "shared"] * 2}

CLASSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma4": lambda: Gemma4TextConfig(
        **_CLASSED | _WINDOWS | _GEMMA,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    ),
    "gemma4-shared": lambda: Gemma4TextConfig(**_CLASSED | _WINDOWS | _GEMMA | _LONGER, global_head_dim=32),
    "mimo": lambda: MiMoV2FlashConfig(
        **_CLASSED | _WINDOWS | {"head_dim": 24},
        v_head_dim=16,
        mlp_layer_types=["dense", "sparse"] * 2,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
    ),
    "gemma3n": lambda: Gemma3nTextConfig(
        **_CLASSED | _WINDOWS | _GEMMA | _LONGER,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.0] * 3,
    ),
    "deepseek-3.2": lambda: DeepseekV32Config(**_SPARSE, **_ONE_GROUP),
    "glm-dsa": lambda: GlmMoeDsaConfig(**_SPARSE, **_ONE_GROUP, **_SHARED_CHOICE),
    "axk2": lambda: AXK2Config(**_SPARSE, **_ONE_GROUP),
    "hy-v4": lambda: HYV4Config(**_SPARSE, **_ONE_GROUP, **_SHARED_CHOICE),
    "dots3": lambda: Dots3NoteTextConfig(
        **_SPARSE | {"index_n_heads": 16},  # scores are hardly ever equal
        layer_types=["indexed_attention", "sliding_attention"] * 2,
        sliding_window=20,
        swa_num_attention_heads=8,
        swa_num_key_value_heads=8,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=8,
        swa_head_dim=16,
        swa_qk_nope_head_dim=8,
        swa_qk_rope_head_dim=8,
        swa_v_head_dim=16,
        shared_experts_intermediate_size=32,
    ),
}
"""Small models whose layers differ in their heads, take K and V from an earlier layer, or have index keys."""

_NO_EXPERT = {key: RECURRENT[key] for key in RECURRENT if key != "num_hidden_layers"}
_MLA = RECURRENT | MLA
_MLA_EXPERTS = {
    "layer_types": _MIXED,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}

MORE_HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3.5": lambda: Qwen3_5TextConfig(**RECURRENT, **_DELTA, head_dim=16, layer_types=_MIXED),
    "bamba": lambda: BambaConfig(**RECURRENT, **_MAMBA2, attn_layer_indices=[1, 3]),
    "granite": lambda: GraniteMoeHybridConfig(
        **RECURRENT, **_MAMBA2, layer_types=_MIXED, num_local_experts=4, num_experts_per_tok=2
    ),
    "nemotron-h": lambda: NemotronHConfig(
        **_NO_EXPERT,
        head_dim=16,
        layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=16,
        time_step_min=0.05,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "zamba": lambda: ZambaConfig(
        **RECURRENT | {"num_key_value_heads": 4, "num_hidden_layers": 6},
        mamba_d_state=8,
        mamba_dt_rank=8,
        layers_block_type=["linear_attention", "hybrid"] * 3,
    ),
    "olmo-hybrid": lambda: OlmoHybridConfig(
        **RECURRENT, layer_types=_MIXED, linear_key_head_dim=8, linear_value_head_dim=8
    ),
    "kimi-linear": lambda: KimiLinearConfig(
        **{key: _MLA[key] for key in _MLA if key != "head_dim"} | {"q_lora_rank": None},
        **_MLA_EXPERTS,
        linear_head_dim=8,
        linear_num_heads=4,
    ),
    "bailing": lambda: BailingHybridConfig(**_MLA | {"head_dim": 16}, **_MLA_EXPERTS, group_norm_size=1),
    "minimax": lambda: MiniMaxConfig(**RECURRENT, layer_types=_MIXED, num_local_experts=2, block_size=16),
    "mamba": lambda: MambaConfig(**_NO_ATTENTION, state_size=8),
    "falcon-mamba": lambda: FalconMambaConfig(**_NO_ATTENTION, state_size=8),
}
"""More of the same kinds."""

_THREE: dict[str, int] = {
    "num_attention_heads": 6,
    "hidden_size": 96,
    "attention_hidden_size": 192,
    "mamba_n_heads": 12,
    "mamba_d_ssm": 192,
    "mamba_headdim": 24,
}


def hybrid(name: str) -> PreTrainedConfig:
    """A model of `HYBRIDS` or `MORE_HYBRIDS`. With `/3` after its name it has 6 query heads, which 3 ranks and 2
    ranks share; 2 KV heads stay 2."""
    name, three, _ = name.partition("/3")
    config = (HYBRIDS | MORE_HYBRIDS)[name]()
    if not three or not hasattr(config, "num_attention_heads"):
        return config
    own = config.to_dict()
    changed = {key: value for key, value in _THREE.items() if key in own}
    if own["num_key_value_heads"] == own["num_attention_heads"]:
        changed["num_key_value_heads"] = 6
    if "attention_head_dim" in own:
        changed["attention_head_dim"] = 32
    return type(config)(**own | changed)
