"""Small models whose attention disagg adapts, with random weights, and what `generate()` answers with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from plain_greedy import confirmed_greedy
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    BloomConfig,
    CodeGenConfig,
    DiffLlamaConfig,
    DogeConfig,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXJapaneseConfig,
    JetMoeConfig,
    Llama4TextConfig,
    MegatronBertConfig,
    MptConfig,
    NemotronConfig,
    OpenAIGPTConfig,
    PreTrainedConfig,
    RemBertConfig,
    RoFormerConfig,
    StableLmConfig,
    XGLMConfig,
)

WINDOW_TOKENS = 16
TOKENS: dict[str, Any] = {
    "vocab_size": 259,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
"""Of every model; tied, a random model repeats its input."""
GPT = TOKENS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_FALCON = TOKENS | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_FALCON |= {"ffn_hidden_size": 64, "max_position_embeddings": 256, "bias": True}

BLOOM = TOKENS | {"hidden_size": 60, "n_layer": 2, "n_head": 6}
MPT = TOKENS | {"d_model": 60, "n_layers": 2, "n_heads": 6, "max_seq_len": 256}
_WIDTH = TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GQA = _WIDTH | {"num_key_value_heads": 2}
LLAMA4 = GQA | {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": WINDOW_TOKENS,
    "floor_scale": 8,
}
"""Full attention, tuned by position, between two layers of chunks."""

ADAPTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "falcon": lambda: FalconConfig(**_FALCON),
    "falcon-old": lambda: FalconConfig(**_FALCON, multi_query=False, parallel_attn=False),
    "falcon-new": lambda: FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-alibi": lambda: FalconConfig(
        **_FALCON | {"num_attention_heads": 2, "hidden_size": 40}, alibi=True, multi_query=False
    ),
    "bloom": lambda: BloomConfig(**BLOOM),
    "mpt": lambda: MptConfig(**MPT, attn_config={"clip_qkv": 3.0}),
    "gptj": lambda: GPTJConfig(**GPT, rotary_dim=8),
    "codegen": lambda: CodeGenConfig(**GPT | {"n_head": 8}, n_ctx=256, rotary_dim=4),
    "gpt-neo": lambda: GPTNeoConfig(
        **TOKENS,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=256,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW_TOKENS,
    ),
    "llama4": lambda: Llama4TextConfig(**LLAMA4),
    "stablelm": lambda: StableLmConfig(**GQA, qk_layernorm=True, use_qkv_bias=True),
    "nemotron": lambda: NemotronConfig(**GQA),
    "biogpt": lambda: BioGptConfig(**_WIDTH),
    "jetmoe": lambda: JetMoeConfig(
        **{key: GQA[key] for key in GQA if key not in ("num_attention_heads", "num_hidden_layers")},
        num_hidden_layers=2,
        kv_channels=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "diffllama": lambda: DiffLlamaConfig(**GQA),
    "doge": lambda: DogeConfig(**GQA, keep_window_size=256),
    "doge-window": lambda: DogeConfig(**GQA, keep_window_size=256, sliding_window=WINDOW_TOKENS),
    "xglm": lambda: XGLMConfig(
        **TOKENS,
        init_std=0.2,
        d_model=64,
        num_layers=2,
        attention_heads=4,
        ffn_dim=64,
        max_position_embeddings=256,
        pad_token_id=1,
    ),
    "gpt-neox-japanese": lambda: GPTNeoXJapaneseConfig(**_WIDTH, intermediate_multiple_size=1),
    "megatron-bert": lambda: MegatronBertConfig(**_WIDTH, is_decoder=True),
    "rembert": lambda: RemBertConfig(
        **_WIDTH, is_decoder=True, input_embedding_size=32, output_embedding_size=32
    ),
    "roformer": lambda: RoFormerConfig(**_WIDTH, is_decoder=True, rotary_value=True),
    "openai-gpt": lambda: OpenAIGPTConfig(**GPT),
}
"""ALiBi with numbers of heads that are a power of two and that are not, heads whose size has no whole root."""


def save_adapted(config: PreTrainedConfig, directory: Path) -> Path:
    """A checkpoint whose biases and norms are no zeros and ones, so that one left out shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


def greedy(
    directory: Path, prompts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """What transformers answers, with the attention that it chooses by itself; see `confirmed_greedy`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # answers end by length
    both = zip(prompts, drafts, strict=True)
    return [confirmed_greedy(model, prompt, draft, tokens) for prompt, draft in both]
