"""Small checkpoints of many architectures, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    FalconH1Config,
    JambaConfig,
    Lfm2Config,
    PreTrainedConfig,
    Qwen3NextConfig,
    Zamba2Config,
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
        if name.endswith("sinks"):
            parameter.data.normal_()
    model.save_pretrained(directory)
    return directory


RECURRENT: dict[str, Any] = {key: SIZES[key] for key in SIZES if key != "head_dim"} | {"num_hidden_layers": 4}
_MIXED = ["linear_attention", "full_attention"] * 2
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
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
    "falcon-h1": lambda: FalconH1Config(**RECURRENT, **_MAMBA2, head_dim=16, mamba_d_ssm=128),
    "lfm2": lambda: Lfm2Config(**RECURRENT, layer_types=["conv", "full_attention"] * 2),
    "jamba": lambda: JambaConfig(
        **RECURRENT, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=8
    ),
    "zamba2": lambda: Zamba2Config(
        **RECURRENT | {"num_key_value_heads": 4},
        mamba_d_state=16,
        mamba_ngroups=1,
        chunk_size=16,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        num_mem_blocks=1,
    ),
}
"""Small models with recurrent layers of every kind: delta rule, Mamba 2 beside attention, convolution, Mamba 1,
and attention that several layers share."""
