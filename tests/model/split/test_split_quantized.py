"""Quantized layers that ranks share by heads and by inner elements, and slices that a format does not allow."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import HYBRIDS, MLA, SIZES, save
from mixtures import OTHER_MIXTURES, SHARED
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from quantized_checkpoints import FORMATS, WeightFormat, compressed, packed_in, quantize_checkpoint
from transformers import DeepseekV3Config, Glm4MoeConfig, LlamaConfig, Phi3Config, PreTrainedConfig

from disagg.core.types import SamplingParams
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.layers.quantized import QuantizedLinear
from disagg.model.load.source import ModelSource
from disagg.model.unsplit import generate_unsplit

TOKENS = 8
PROMPTS = prompts()[1:3]
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


def narrow() -> PreTrainedConfig:
    """Two ranks share 48 inputs of `o_proj`: the second would begin within a group of 16."""
    return LlamaConfig(**SHARED)


def glm4_moe() -> PreTrainedConfig:
    """Two ranks share the 48 inner elements of the shared experts, too: only the second cuts a group of 16."""
    sizes = {"moe_intermediate_size": 48, "n_routed_experts": 4, "first_k_dense_replace": 1}
    return Glm4MoeConfig(**SHARED, **sizes, num_experts_per_tok=2)


def llama4() -> PreTrainedConfig:
    """As `glm4_moe`; the block of experts adds the result of the shared expert."""
    config = OTHER_MIXTURES["llama4"]()
    config.intermediate_size = 48
    return config


NARROW = WeightFormat(
    compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16), packed_in(4, 16)
)
MODELS = {
    "qwen3-next": (HYBRIDS["qwen3-next"], ".self_attn.", set()),
    "latent": (
        lambda: DeepseekV3Config(**SIZES | MLA, n_routed_experts=4, moe_intermediate_size=32),
        ".self_attn.",
        set(),
    ),
    "phi3": (lambda: Phi3Config(**SIZES), "", set()),
    "narrow": (narrow, ".self_attn.", {"attention"}),
    "glm4-moe": (glm4_moe, ".shared_experts.", {"model.layers.*.mlp.shared_experts"}),
    "llama4": (llama4, ".shared_expert.", {"model.layers.*.feed_forward.shared_expert"}),
}
"""A model, which of its projections are quantized, and what every rank holds whole."""


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3-next", "compressed int8 channel"),
        pytest.param("qwen3-next", "gptq", marks=pytest.mark.slow),
        ("latent", "fp8 block"),
        ("phi3", "fp8 block"),
        ("phi3", "awq"),
        ("narrow", "groups of 16"),
        ("glm4-moe", "groups of 16"),
        ("llama4", "groups of 16"),
    ],
)
def test_greedy_equals_generate(name: str, form: str, tmp_path: Path) -> None:
    config, part, whole = MODELS[name]
    plain, quantized = save(config(), tmp_path / "plain"), tmp_path / "quantized"
    quantize_checkpoint(plain, quantized, FORMATS.get(form, NARROW), part)
    model = load_plain(plain)
    expected = [plain_greedy(model, prompt, TOKENS) for prompt in PROMPTS]
    source = ModelSource.from_directory(quantized)

    def answers(collective: ThreadCollective) -> tuple[set[str], list[list[int]]]:
        runner = make_runner(source, collective)
        assert any(isinstance(one, QuantizedLinear) for one in runner.model.modules())
        return runner.held_whole, generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=29)

    assert run_ranks(2, answers) == [(whole, expected)] * 2
