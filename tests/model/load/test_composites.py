"""Multimodal checkpoints: their text part is read alone, and answers text as the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import SIZES
from model_helpers import load_plain, make_runner, prompts
from multimodal import MULTIMODAL
from plain_greedy import plain_greedy
from quantized_checkpoints import FORMATS, quantize_checkpoint
from slow_parameters import sampled
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PaliGemmaConfig,
    SiglipVisionConfig,
)

from disagg.core.errors import UnsupportedModelError
from disagg.core.types import SamplingParams
from disagg.model.layers.quantized import QuantizedLinear
from disagg.model.load.composite import WRAPPED
from disagg.model.load.source import ModelSource
from disagg.model.unsplit import generate_unsplit

_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def save_gemma3(directory: Path, **settings: Any) -> Path:
    text = Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(text_config=text, vision_config=SiglipVisionConfig(**_VISION), **settings)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    if not config.tie_word_embeddings:
        model.lm_head.weight.data.normal_()
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_are_those_of_the_whole_model(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_gemma3(tmp_path, tie_word_embeddings=tied)
    expected = [plain_greedy(load_plain(directory), prompt, 8) for prompt in prompts()]
    monkeypatch.delattr(AutoModelForCausalLM, "from_pretrained")  # parts are read from the files alone
    runner = make_runner(ModelSource.from_directory(directory))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert generate_unsplit(runner, prompts(), params, chunk_tokens=13) == expected
    assert runner.spec.architecture == "Gemma3ForCausalLM"


def test_quantized_layers_of_the_text_part(tmp_path: Path) -> None:
    """Those of other parts are not read."""
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    quantize_checkpoint(save_gemma3(plain), quantized, FORMATS["fp8 tensor"])
    expected = [plain_greedy(load_plain(plain), prompt, 8) for prompt in prompts()]
    runner = make_runner(ModelSource.from_directory(quantized))
    assert sum(isinstance(module, QuantizedLinear) for module in runner.model.modules()) == 14
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert generate_unsplit(runner, prompts(), params, chunk_tokens=13) == expected


def test_each_wrapped_type_is_compared() -> None:
    assert set(MULTIMODAL) == set(WRAPPED)


@pytest.mark.parametrize(
    ("name", "tied"),
    sampled(
        [(name, tied) for name in MULTIMODAL for tied in (True, False)],
        lambda name, tied: (name, tied) in (("llava", False), ("qwen3_vl", True), ("voxtral", True)),
    ),
)
def test_text_of_a_wrapped_model(name: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MULTIMODAL[name]()
    config.tie_word_embeddings = tied
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    if not tied:
        model.get_output_embeddings().weight.data.normal_()
    model.save_pretrained(tmp_path)
    whole = AutoModelForMultimodalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    whole.generation_config.eos_token_id = None
    expected = [plain_greedy(whole, prompt, 8) for prompt in prompts()]
    runner = make_runner(ModelSource.from_directory(tmp_path))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert generate_unsplit(runner, prompts(), params, chunk_tokens=13) == expected


def test_a_text_part_that_sees_what_follows_is_refused(tmp_path: Path) -> None:
    """The prompts of PaliGemma are not causal."""
    PaliGemmaConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"paligemma in .* is not a decoder-only language model"):
        ModelSource.from_directory(tmp_path)


def test_an_unsupported_quantization_is_refused(tmp_path: Path) -> None:
    directory = save_gemma3(tmp_path)
    config = Gemma3Config.from_pretrained(directory)
    config.quantization_config = {"quant_method": "bitsandbytes"}
    config.save_pretrained(directory)
    with pytest.raises(UnsupportedModelError, match="quantized"):
        ModelSource.from_directory(directory)
