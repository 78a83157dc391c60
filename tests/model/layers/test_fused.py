"""Models whose small layers were replaced answer as they did before, and what is not understood stays as it is.

Where there is no GPU the replacements run in torch, and `fuse` is called by hand; `test_attention_kernels.py` runs
them in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_classes import own_calls, sigmoid_of_any_layout, tiny_model
from model_helpers import ANSWER_TOKENS, load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from slow_parameters import sampled
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, GlmConfig, GPTNeoXConfig, Olmo2Config, PhiConfig
from transformers.models.llama import modeling_llama

from disagg.core.types import SamplingParams
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.layers.class_names import class_name
from disagg.model.layers.fused import fuse
from disagg.model.layers.gated_mlps import GATED_MLPS
from disagg.model.layers.gated_norms import GATED_NORMS
from disagg.model.layers.norms import NORMS, fuse_norm
from disagg.model.layers.residuals import PRE_NORM_LAYERS
from disagg.model.layers.rotary_attention import OWN_FORWARDS
from disagg.model.layers.rotary_forms import ROTARY_ATTENTION
from disagg.model.runner import ModelRunner
from disagg.model.unsplit import generate_unsplit

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = 3
# All in each layer, and the last norm; Gemma's MLP has another activation.
EXPECTED = {
    "llama": {
        "norms": 2 * LAYERS + 1,
        "gated_norms": 0,
        "rotary": LAYERS,
        "mlps": LAYERS,
        "residuals": LAYERS,
    },
    "qwen3": {
        "norms": 4 * LAYERS + 1,
        "gated_norms": 0,
        "rotary": LAYERS,
        "mlps": LAYERS,
        "residuals": LAYERS,
    },
    "mistral": {
        "norms": 2 * LAYERS + 1,
        "gated_norms": 0,
        "rotary": LAYERS,
        "mlps": LAYERS,
        "residuals": LAYERS,
    },
    "gemma2": {"norms": 4 * LAYERS + 1, "gated_norms": 0, "rotary": LAYERS, "mlps": 0, "residuals": 0},
}
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
Checkpoint = Callable[[str], Path]
Reference = Callable[[str], list[list[int]]]


def fused_runner(path: Path, device: str = "cpu", **more: Any) -> ModelRunner:
    """A runner with `fuse` done once, by itself where it does so."""
    runner = make_runner(path, device=device, **more)
    if device == "cpu":
        fuse(runner.model)
        runner.keep_few_rows()
    return runner


def replaced(runner: ModelRunner) -> int:
    return sum("forward" in vars(module) for module in runner.model.modules())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EXPECTED)
def test_greedy_equals_generate(name: str, device: str, checkpoint: Checkpoint, reference: Reference) -> None:
    if device == "cpu":
        expected = reference(name)
    else:
        model = load_plain(checkpoint(name)).to(device)
        expected = [plain_greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts()]
    runner = fused_runner(checkpoint(name), device)
    assert replaced(runner) == sum(EXPECTED[name].values())
    assert generate_unsplit(runner, prompts(), GREEDY, chunk_tokens=29) == expected


def logits(runner: ModelRunner) -> torch.Tensor:
    row = runner.req_to_token.alloc()
    text = tuple(prompts()[2])
    runner.req_to_token.set_slots(row, 0, list(range(16, 16 + len(text))))
    runner.forward(StepBatch((SequenceSlice(row, 0, text[:-1]),)))
    return runner.forward(StepBatch((SequenceSlice(row, len(text) - 1, text[-1:]),)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EXPECTED)
def test_in_16_bits_logits_are_those_of_the_model_as_it_was(
    name: str, device: str, checkpoint: Checkpoint
) -> None:
    more: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    ours, own = fused_runner(checkpoint(name), **more), make_runner(checkpoint(name), fused=False, **more)
    assert replaced(own) == 0
    found, expected = logits(ours), logits(own)
    if device == "cpu":
        assert torch.equal(found, expected)  # the references round as the model does, everywhere
    assert torch.allclose(found, expected, rtol=0, atol=0.03 * float(expected.abs().max()))


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_said_to_be_replaced(name: str, checkpoint: Checkpoint) -> None:
    runner = make_runner(checkpoint(name), fused=False)
    assert fuse(runner.model).summary() == EXPECTED[name]


def test_ranks_of_a_group_answer_alike(checkpoint: Checkpoint, reference: Reference) -> None:
    expected = reference("qwen3")[:2]

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(checkpoint("qwen3"), collective, fused=False)
        assert fuse(runner.model).norms == EXPECTED["qwen3"]["norms"]
        return generate_unsplit(runner, prompts()[:2], GREEDY)

    assert run_ranks(2, answers) == [expected, expected]


SMALL = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Layer norms; every second element is rotated.
        (CohereConfig(**SMALL), {"norms": 0, "gated_norms": 0, "rotary": 0, "mlps": 2, "residuals": 0}),
        # Gate and up are one projection; a part of each head is rotated, by pairs.
        (
            GlmConfig(**SMALL, head_dim=12, partial_rotary_factor=0.5),
            {"norms": 5, "gated_norms": 0, "rotary": 0, "mlps": 0, "residuals": 2},
        ),
        # Norms with another rounding.
        (Olmo2Config(**SMALL), {"norms": 9, "gated_norms": 0, "rotary": 2, "mlps": 2, "residuals": 0}),
        # Layer norms; a part of each head is rotated.
        (
            GPTNeoXConfig(**SMALL, rotary_pct=0.5),
            {"norms": 0, "gated_norms": 0, "rotary": 2, "mlps": 0, "residuals": 0},
        ),
        (
            PhiConfig(**SMALL, partial_rotary_factor=0.5),
            {"norms": 0, "gated_norms": 0, "rotary": 2, "mlps": 0, "residuals": 0},
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_other_models_give_what_they_gave(config: Any, expected: dict[str, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.normal_()
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        fused = fuse(model)
        after = model(input_ids=ids).logits
    assert fused.summary() == expected
    assert torch.equal(before, after)  # where the torch references run


_TYPES = """
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam bitnet cohere cohere2 cohere2_moe
    cohere_compass_text cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 dots3_note ernie4_5
    ernie4_5_moe exaone4 exaone_moe falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3n
    gemma4 gemma4_unified glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss granite granite_swa
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hy_v4 hyperclovax jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4
    longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral moshi nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe phi phi3 phi4_multimodal
    phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm
    starcoder2 vaultgemma youtu zamba zamba2 zaya
"""
TYPES = _TYPES.split()
"""Model types that together have every registered class."""
VARIANTS: dict[str, dict[str, Any]] = {
    "axk1": {"rope_interleave": False},
    "deepseek_v3": {"rope_interleave": False},
    "falcon_h1": {"mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6},
    "glm4_moe": {"use_qk_norm": True},
    "glm4_moe_lite": {"rope_interleave": False},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "laguna": {"gating": "per-element"},
    "lfm3": {"use_attention_gate": False},
    "minicpm3": {"q_lora_rank": None},
    "olmo": {"clip_qkv": 0.5},
    "olmoe": {"clip_qkv": 0.5},
    "phi": {"qk_layernorm": True},
    "youtu": {"rope_interleave": False},
    "zamba2": {"use_mem_rope": True, "use_shared_attention_adapter": True, "num_key_value_heads": 4},
}
"""Settings that take another path through a registered class than the type's own settings do."""
REGISTERED = {*NORMS, *GATED_NORMS, *GATED_MLPS, *ROTARY_ATTENTION, *OWN_FORWARDS, *PRE_NORM_LAYERS}


@functools.cache
def compared(model_type: str, variant: bool, dtype: torch.dtype) -> dict[str, bool]:
    """By name of the classes that were fused: whether all modules compute what they did, bit for bit."""
    with torch.inference_mode(), sigmoid_of_any_layout():
        model = tiny_model(model_type, dtype, **(VARIANTS[model_type] if variant else {}))
        calls = [call for call in own_calls(model) if "forward" not in vars(call.module)]
        fuse(model)
        same: dict[str, bool] = {}
        for call in calls:
            if "forward" in vars(call.module):
                name = class_name(call.module)
                same[name] = same.get(name, True) and call.repeats()
    return same


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    sampled(
        itertools.product(TYPES, [torch.float32, torch.bfloat16]),
        lambda model_type, dtype: dtype is torch.bfloat16 or list(TYPES).index(model_type) % 6 == 0,
    ),
    ids=str,
)
def test_registered_classes_compute_what_transformers_does(model_type: str, dtype: torch.dtype) -> None:
    same = compared(model_type, False, dtype)
    assert same
    assert all(same.values()), same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", VARIANTS)
def test_so_they_do_with_other_settings(model_type: str, dtype: torch.dtype) -> None:
    same = compared(model_type, True, dtype)
    assert same
    assert all(same.values()), same


def test_every_registered_class_is_compared() -> None:
    cases = [*((name, False) for name in TYPES), *((name, True) for name in VARIANTS)]
    assert set().union(*(compared(*case, torch.bfloat16) for case in cases)) == REGISTERED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_registered_norms_use_the_epsilon_of_the_class(name: str, dtype: torch.dtype) -> None:
    """Half of the rows are so small that the epsilon decides."""
    package, _, kind = name.partition(".")
    norm = getattr(importlib.import_module(f"transformers.models.{package}.modeling_{package}"), kind)(24)
    setattr(norm, NORMS[name].epsilon, 3e-3)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    norm = norm.to(dtype)
    x = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, ::2] *= 0.02
    with torch.inference_mode():
        own = norm(x)
        assert fuse_norm(norm)
        assert torch.equal(own, norm(x))


def test_the_norm_of_a_sum_is_for_that_sum_only() -> None:
    norm = modeling_llama.LlamaRMSNorm(8)
    assert fuse_norm(norm)
    x, y = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        total, plain = norm.forward.add(x, y), norm(x + y)
        assert torch.equal(norm(total), plain), "the other call has dropped what was kept"
        kept = norm.forward.add(x, y)
        norm.weight.data.fill_(2.0)
        assert torch.equal(norm(kept), plain)
        assert torch.equal(norm(kept), 2.0 * plain)
        assert torch.equal(norm.forward.add(x, y.double()), x + y.double())


class OtherNorm(modeling_llama.LlamaRMSNorm):
    """A class with a difference that no attribute shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(max=2.0)


class OtherMLP(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


def test_what_only_looks_the_same_stays(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def own_rotary(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return modeling_llama.rotate_half(q) * cos[:, None], k

    for other in (OtherNorm, OtherMLP):
        monkeypatch.setattr(other, "__module__", "transformers.models.other")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own_rotary)
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", OtherNorm)
    monkeypatch.setattr(modeling_llama, "LlamaMLP", OtherMLP)
    runner = make_runner(checkpoint("llama"), fused=False)
    before = logits(runner)
    fused = fuse(runner.model)
    assert torch.equal(logits(runner), before)
    assert fused.summary() == {"norms": 0, "gated_norms": 0, "rotary": 0, "mlps": 0, "residuals": 0}


def test_modules_that_are_not_transformers_own_stay(checkpoint: Checkpoint) -> None:
    """Replaced modules, and modules with hooks, are not fused."""
    runner = make_runner(checkpoint("llama"), fused=False)
    layers = runner.model.model.layers
    layers[0].input_layernorm = nn.RMSNorm(96)
    layers[1].input_layernorm.register_forward_hook(lambda module, args, out: out)
    layers[1].mlp.forward = lambda x: x
    fused = fuse(runner.model)
    # Of layers whose both sums are in front of fused norms, only the last one is left.
    assert (fused.norms, fused.mlps, fused.residuals) == (2 * LAYERS + 1 - 2, LAYERS - 1, LAYERS - 1)


def test_transformers_is_not_changed(checkpoint: Checkpoint) -> None:
    own = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    fuse(make_runner(checkpoint("llama"), fused=False).model)
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward) == own
    assert modeling_llama.LlamaAttention.forward.__globals__["apply_rotary_pos_emb"] is own[0]


def test_on_a_cpu_nothing_is_replaced(checkpoint: Checkpoint) -> None:
    assert replaced(make_runner(checkpoint("llama"))) == 0
