"""Projections of one input run as one product; a model's answers stay what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import ANSWER_TOKENS, load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3NextConfig

from disagg.core.types import SamplingParams
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.layers.fused import fuse
from disagg.model.layers.merged import merge_projections, merged_of, projected
from disagg.model.layers.row_wise import use_linear_kernels
from disagg.model.unsplit import generate_unsplit

LAYERS = 3
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
Checkpoint = Callable[[str], Path]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)  # biases too
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.arange(20)[None]).logits
    return found


@pytest.mark.parametrize(
    ("name", "merged"), [("llama", 2 * LAYERS), ("qwen3", 2 * LAYERS), ("gemma2", LAYERS)]
)
def test_greedy_equals_generate(name: str, merged: int, checkpoint: Checkpoint) -> None:
    model = load_plain(checkpoint(name))
    expected = [plain_greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts()]

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(checkpoint(name), collective, fused=False)
        fuse(runner.model)
        assert merge_projections(runner.model) == merged
        return generate_unsplit(runner, prompts(), GREEDY, chunk_tokens=29)

    assert run_ranks(1, answers) == [expected]
    assert run_ranks(2, answers) == [expected, expected]


@pytest.mark.parametrize("kernels", [False, True], ids=["", "linear kernels"])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        Qwen2Config(**SMALL),  # biases
        Qwen3NextConfig(
            **SMALL,
            head_dim=16,
            layer_types=["full_attention", "full_attention"],
            num_experts=0,
            decoder_sparse_step=1,
            mlp_only_layers=[0, 1],
        ),  # gates
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_logits_of_other_forms(config: Any, kernels: bool) -> None:
    model = model_of(config)
    before = logits(model)
    fuse(model)
    assert merge_projections(model) == 4
    if kernels:
        use_linear_kernels(model)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_layers_share_the_memory_of_the_merged_weight() -> None:
    model = model_of(Qwen2Config(**SMALL))
    fuse(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    count = sum(parameter.nbytes for parameter in model.parameters())
    merge_projections(model)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert sum({one.data_ptr(): one.nbytes for one in model.parameters()}.values()) == count
    attention = model.model.layers[0].self_attn
    merged = merged_of(attention)
    assert merged is not None
    assert merged.bias is not None
    for whole, part in ((merged.weight, "weight"), (merged.bias, "bias")):
        assert getattr(attention.q_proj, part).data_ptr() == whole.data_ptr()
        assert getattr(attention.v_proj, part).untyped_storage().data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("odd", ["hook", "dtype", "bias", "adapter", "own forward"])
def test_projections_that_do_not_fit_stay_apart(odd: str) -> None:
    model = model_of(LlamaConfig(**SMALL))
    fuse(model)
    attention = model.model.layers[1].self_attn
    if odd == "hook":
        attention.k_proj.register_forward_hook(lambda module, args, out: out)
    elif odd == "dtype":
        attention.k_proj.half()
    elif odd == "bias":
        attention.k_proj.bias = nn.Parameter(torch.zeros(24))
    elif odd == "adapter":
        attention.k_proj = nn.Sequential(attention.k_proj)
    else:
        attention.k_proj.forward = copy.copy(attention.k_proj.forward)
    assert merge_projections(model) == 3
    assert merged_of(attention) is None
    if odd != "dtype":
        assert [
            part.shape[-1] for part in projected(attention, ("q_proj", "k_proj"), torch.zeros(1, 48))
        ] == [48, 24]


def test_modules_with_the_forward_of_transformers_stay_apart() -> None:
    assert merge_projections(model_of(LlamaConfig(**SMALL))) == 0
