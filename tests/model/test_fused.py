"""Models whose small layers were replaced answer as they did before, and what is not understood stays as it is.

Where there is no GPU the replacements run in torch, and `fuse` is called by hand; `test_attention_kernels.py` runs
them in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import ANSWER_TOKENS, load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, GlmConfig, GPTNeoXConfig, Olmo2Config, PhiConfig
from transformers.models.llama import modeling_llama

from disagg.core.types import SamplingParams
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective import ThreadCollective, run_ranks
from disagg.model.fused import fuse
from disagg.model.runner import ModelRunner
from disagg.model.unsplit import generate_unsplit

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = 3
# All in each layer, and the last norm; Gemma's MLP has another activation.
EXPECTED = {
    "llama": {"norms": 2 * LAYERS + 1, "rotary": LAYERS, "mlps": LAYERS},
    "qwen3": {"norms": 4 * LAYERS + 1, "rotary": LAYERS, "mlps": LAYERS},
    "mistral": {"norms": 2 * LAYERS + 1, "rotary": LAYERS, "mlps": LAYERS},
    "gemma2": {"norms": 4 * LAYERS + 1, "rotary": LAYERS, "mlps": 0},
}
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
Checkpoint = Callable[[str], Path]


def fused_runner(path: Path, device: str = "cpu", **more: Any) -> ModelRunner:
    """A runner with `fuse` done once, by itself where it does so."""
    runner = make_runner(path, device=device, **more)
    if device == "cpu":
        fuse(runner.model)
    return runner


def replaced(runner: ModelRunner) -> int:
    return sum("forward" in vars(module) for module in runner.model.modules())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EXPECTED)
def test_greedy_equals_generate(name: str, device: str, checkpoint: Checkpoint) -> None:
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
    fused = fuse(runner.model)
    assert fused.summary() == {**EXPECTED[name], "rotary": 0}
    logits(runner)
    assert fused.summary() == EXPECTED[name]


def test_ranks_of_a_group_answer_alike(checkpoint: Checkpoint) -> None:
    model = load_plain(checkpoint("qwen3"))
    expected = [plain_greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts()[:2]]

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
        (CohereConfig(**SMALL), {"norms": 0, "rotary": 0, "mlps": 2}),
        # Gate and up are one projection; a part of each head is rotated, by pairs.
        (GlmConfig(**SMALL, head_dim=12, partial_rotary_factor=0.5), {"norms": 5, "rotary": 0, "mlps": 0}),
        # Norms with another rounding.
        (Olmo2Config(**SMALL), {"norms": 9, "rotary": 2, "mlps": 2}),
        # Layer norms; a part of each head is rotated.
        (GPTNeoXConfig(**SMALL, rotary_pct=0.5), {"norms": 0, "rotary": 2, "mlps": 0}),
        (PhiConfig(**SMALL, partial_rotary_factor=0.5), {"norms": 0, "rotary": 2, "mlps": 0}),
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


class OtherNorm(modeling_llama.LlamaRMSNorm):
    """Differs in a way that no attribute tells."""

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
    assert fused.summary() == {"norms": 0, "rotary": 0, "mlps": 0}


def test_modules_that_are_not_transformers_own_stay(checkpoint: Checkpoint) -> None:
    """What somebody else put in, and what has a hook."""
    runner = make_runner(checkpoint("llama"), fused=False)
    layers = runner.model.model.layers
    layers[0].input_layernorm = nn.RMSNorm(96)
    layers[1].input_layernorm.register_forward_hook(lambda module, args, out: out)
    layers[1].mlp.forward = lambda x: x
    fused = fuse(runner.model)
    assert (fused.norms, fused.mlps) == (2 * LAYERS + 1 - 2, LAYERS - 1)


def test_transformers_is_not_changed(checkpoint: Checkpoint) -> None:
    own = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    fuse(make_runner(checkpoint("llama"), fused=False).model)
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward) == own
    assert modeling_llama.LlamaAttention.forward.__globals__["apply_rotary_pos_emb"] is own[0]


def test_on_a_cpu_nothing_is_replaced(checkpoint: Checkpoint) -> None:
    assert replaced(make_runner(checkpoint("llama"))) == 0
