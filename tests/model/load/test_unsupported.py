"""What cannot be served exactly is refused at start with one clear line; what cannot be split is held whole."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import CLASSED, ENCODER, MLA, RECURRENT, SIZES, save
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from slow_parameters import sampled
from transformers import (
    BertConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GitConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    T5Config,
    XmodConfig,
)

from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.types import SamplingParams
from disagg.model.attention.paged import paged_attention
from disagg.model.attention.probe import ShapeProbe
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.load.source import ModelSource
from disagg.model.unsplit import generate_unsplit
from kernels.attention.common import AttentionParams


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (T5Config(vocab_size=259, d_model=64, num_layers=1, num_heads=4, d_ff=64), "not a decoder-only"),
        (RwkvConfig(vocab_size=259, hidden_size=32, num_hidden_layers=2), "no attention heads"),
        (
            RecurrentGemmaConfig(
                **RECURRENT | {"num_hidden_layers": 3}, lru_width=64, attention_window_size=16
            ),
            "outside of the cache",
        ),
        (BertConfig(**ENCODER), "is_causal=False"),
        (Gemma3TextConfig(**SIZES, use_bidirectional_attention=True), "bidirectional"),
        (GitConfig(**ENCODER), "its attention cannot be replaced"),
        (
            PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=255),
            "its attention call does not pass the configured sliding window",
        ),
        (XmodConfig(**ENCODER | {"pad_token_id": 1}, is_decoder=True), "names no default_language"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_architectures_that_do_not_fit_are_refused(config: Any, match: str, tmp_path: Path) -> None:
    directory = save(config, tmp_path)
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        make_runner(directory)
    assert "\n" not in str(caught.value)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    save(config, tmp_path)
    config.quantization_config = {"quant_method": "bitsandbytes"}
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="quantized"):
        ModelSource.from_directory(tmp_path)


WHOLE: dict[str, tuple[Any, set[str]]] = {
    "fused qkv": (Phi3Config(**SIZES), set()),
    "norms over all heads": (Olmo2Config(**SIZES), set()),
    "transposed weights": (
        GPT2Config(vocab_size=259, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2),
        {"attention"},
    ),
    "experts": (MixtralConfig(**SIZES, num_local_experts=4), set()),
    "narrow experts": (
        MixtralConfig(**SIZES | {"intermediate_size": 12}, num_local_experts=4),
        {"model.layers.*.mlp.experts"},
    ),
    "sinks": (GptOssConfig(**SIZES, num_local_experts=4, sliding_window=16), set()),
    "latent attention": (
        DeepseekV3Config(**SIZES | MLA, n_routed_experts=8, moe_intermediate_size=32),
        set(),
    ),
    "classes": (CLASSED["gemma4-shared"](), set()),
    "sparsity": (CLASSED["gemma3n"](), {"model.layers.*.mlp"}),
}
"""Configurations, and parts that each rank of several holds whole."""


@pytest.mark.parametrize(
    ("name", "size"),
    sampled(
        itertools.product(WHOLE, (1, 2, 4)),
        lambda name, size: size == 2 or (name, size) in (("experts", 1), ("latent attention", 4)),
    ),
)
def test_what_cannot_be_split_is_held_whole(name: str, size: int, tmp_path: Path) -> None:
    config, whole = WHOLE[name]
    directory = save(config, tmp_path)
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def work(collective: ThreadCollective) -> tuple[set[str], list[list[int]]]:
        runner = make_runner(directory, collective if size > 1 else None)
        return runner.held_whole, generate_unsplit(runner, prompts(), params, chunk_tokens=13)

    found = run_ranks(size, work)
    plain = load_plain(directory)
    expected = [plain_greedy(plain, prompt, 8) for prompt in prompts()]
    assert all(answers == expected for _, answers in found)
    assert all(whole <= parts if size > 1 else not parts for parts, _ in found)
    assert all(("attention" in parts) == ("attention" in whole) for parts, _ in found if size > 1)


@pytest.mark.parametrize("size", [5, 8, 24])
def test_a_size_that_does_not_divide_the_query_heads_names_those_that_do(size: int) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"12 query heads, which {size} .* use 1, 2, 3, 4, 6, 12"
    ):
        make_runner(ModelSource.random_init("tiny-llama"), ThreadCollective.group(size)[0])


def test_a_context_beyond_the_model_and_a_pool_too_small_are_refused() -> None:
    source = ModelSource.random_init("tiny-llama")
    with pytest.raises(ConfigError, match="context of 1024 tokens"):
        make_runner(source, max_tokens=2000)
    with pytest.raises(ConfigError, match="at least 32 tokens"):
        make_runner(source, pages=1)


def test_the_probe_sees_what_a_configuration_hides() -> None:
    spec = ModelSource.random_init("tiny-mistral").spec(torch.float32)
    config, heads = ModelSource.random_init("tiny-mistral").config, [(12, 6)]
    q, kv, plain = torch.ones(1, 12, 8), torch.ones(1, 6, 8), AttentionParams(1.0, window_tokens=32)

    def probed(*calls: tuple[int, torch.Tensor, AttentionParams]) -> ShapeProbe:
        probe = ShapeProbe()
        for layer, v, params in calls:
            probe.attend(layer, q, kv, v, params)
        return probe

    probed((0, kv, plain), (1, kv, plain)).require(spec, heads, config)
    for match, probe in {
        "1 attention calls": probed((0, kv, plain)),
        "3 attention calls": probed((0, kv, plain), (1, kv, plain), (1, kv, plain)),
        "layer 1 has K and V": probed((0, kv, plain), (1, torch.ones(1, 6, 4), plain)),
        "sliding window": probed((0, kv, plain), (1, kv, AttentionParams(1.0))),
    }.items():
        with pytest.raises(UnsupportedModelError, match=match):
            probe.require(spec, heads, config)


def test_attention_refuses_what_it_cannot_honour() -> None:
    x, module, context = torch.ones(1, 1, 1, 8), torch.nn.Module(), ShapeProbe()
    module.layer_idx = 0  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="does not pass"):
        paged_attention(module, x, x, x, None)
    with pytest.raises(UnsupportedModelError, match="attention_mask"):
        paged_attention(module, x, x, x, torch.ones(1), paged_context=context)
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        paged_attention(module, x, x, x, None, paged_context=context, position_bias=torch.ones(1))
    out, _ = paged_attention(module, x, x, x, None, paged_context=context, output_attentions=False)
    assert out.shape == (1, 1, 1, 8)


def test_a_step_that_the_table_cannot_hold_is_refused() -> None:
    runner = make_runner(ModelSource.random_init("tiny-llama"), max_tokens=8)
    row = runner.req_to_token.alloc()
    with pytest.raises(ValueError, match="at least one sequence"):
        runner.forward(StepBatch(()))
    for slice_ in (SequenceSlice(row, 0, ()), SequenceSlice(row, 7, (1, 2)), SequenceSlice(row, -1, (1,))):
        with pytest.raises(ValueError, match=f"row {row}"):
            runner.forward(StepBatch((slice_,)))
