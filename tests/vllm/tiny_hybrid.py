"""Makes a small model with Mamba-2 layers and attention layers: `python tiny_hybrid.py DIRECTORY`.

Its greedy answers depend on the whole prompt. vLLM 0.32's kernels for a CPU need prompts that fit one chunk of the
layers' scan (`mamba_chunk_size`), and one block with a prefix cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_files import save_tiny
from transformers import GraniteMoeHybridConfig

from disagg.model.load.tiny import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE


def make(path: Path) -> None:
    config = GraniteMoeHybridConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        shared_intermediate_size=512,
        num_hidden_layers=8,
        layer_types=["mamba", "mamba", "mamba", "attention"] * 2,
        num_attention_heads=8,
        num_key_value_heads=4,
        position_embedding_type="rope",
        max_position_embeddings=8192,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=16,
        mamba_n_groups=2,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=2048,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    save_tiny(config, path)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
