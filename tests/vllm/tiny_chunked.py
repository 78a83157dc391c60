"""Makes a small Llama 4 without experts: `python tiny_chunked.py DIRECTORY`.

Six of its eight layers attend within chunks of 128 tokens, and its greedy answers depend on the whole prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_files import save_tiny
from transformers import Llama4TextConfig

from disagg.model.load.tiny import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE


def make(path: Path) -> None:
    config = Llama4TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        intermediate_size_mlp=512,
        num_hidden_layers=8,
        layer_types=(["chunked_attention"] * 3 + ["full_attention"]) * 2,
        no_rope_layers=[1, 1, 1, 0] * 2,
        attention_chunk_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        num_local_experts=2,
        num_experts_per_tok=1,
        moe_layers=[],
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    save_tiny(config, path, interleave_moe_layer_step=0)  # transformers reads `moe_layers` instead


if __name__ == "__main__":
    make(Path(sys.argv[1]))
