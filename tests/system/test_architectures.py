"""Models that are not split like a Llama, through the whole system: fused projections, MLA, norms over all heads,
sinks, other experts, parts held whole, long rotary tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from architectures import ENCODER, LONGROPE, MLA, RECURRENT, SIZES, save
from local_groups import Checkpoints, ask, local_groups, random_prompts, small_config
from slow_parameters import sampled
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Llama4TextConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhimoeConfig,
)

from disagg.core.errors import PromptTooLongError
from disagg.core.types import SamplingParams
from disagg.model.load.source import ModelSource
from disagg.router.router import Router

CONFIGS = {
    "phi3": lambda: Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=40),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "deepseek": lambda: DeepseekV3Config(**SIZES | MLA, n_routed_experts=8, moe_intermediate_size=32),
    # A hybrid without a recurrent layer, and a window that is never left.
    "granite": lambda: GraniteMoeHybridConfig(
        **RECURRENT, layer_types=["full_attention"] * 4, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt-oss": lambda: GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "phimoe": lambda: PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=256),
    "llama4": lambda: Llama4TextConfig(**SIZES, num_local_experts=4, attention_chunk_size=16),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "gpt-neox": lambda: GPTNeoXConfig(**ENCODER),
    "gpt2": lambda: GPT2Config(
        vocab_size=259, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2
    ),
}
FAST = ("phi3", "mixtral", "deepseek", "gpt-oss", "gpt2", "olmo2")


@pytest.mark.parametrize(
    ("name", "prefill_tp", "decode_tp"),
    sampled(
        ((name, *tp) for name in CONFIGS for tp in [(2, 1), (1, 2), (2, 2), (4, 2)]),
        lambda name, *tp: name in FAST and tp == ((2, 1), (1, 2))[FAST.index(name) % 2],
    ),
)
def test_tokens_are_those_of_generate(
    name: str, prefill_tp: int, decode_tp: int, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = ModelSource.from_directory(save(CONFIGS[name](), tmp_path))
    prompts = random_prompts(5, 33, 41, 90)  # Phi-3's tables change beyond 40 tokens
    with local_groups(small_config(prefill_tp, decode_tp, pool_tokens=256), source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=8))
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 8) for p in prompts]


def test_an_answer_that_would_change_its_rotary_table_is_refused(tmp_path: Path) -> None:
    source = ModelSource.from_directory(save(CONFIGS["phi3"](), tmp_path))
    with local_groups(small_config(1, 1, pool_tokens=256), source) as groups:

        async def work(router: Router) -> Any:
            with pytest.raises(PromptTooLongError, match="changes its rotary embedding"):
                await ask(router, "crosses", random_prompts(38)[0], SamplingParams(max_tokens=8))
            return await ask(router, "stays", random_prompts(38)[0], SamplingParams(max_tokens=3))

        assert len(groups.serve(work).tokens) == 3
