"""Models whose attention does not go through transformers' AttentionInterface: tokens are those of `generate()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import ADAPTED, BLOOM, GPT, GQA, MPT, greedy, save_adapted
from model_helpers import make_runner, prompts
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    DiffLlamaConfig,
    DogeConfig,
    FalconConfig,
    GPTJConfig,
    MptConfig,
    PreTrainedConfig,
    RemBertConfig,
    RoFormerConfig,
    XGLMConfig,
)

from disagg.core.errors import ConfigError, InvariantError, UnsupportedModelError
from disagg.core.types import SamplingParams
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import SingleCollective, ThreadCollective, run_ranks
from disagg.model.load.build import build_model
from disagg.model.load.source import ModelSource
from disagg.model.spec.model_spec import spec_from_config
from disagg.model.unsplit import generate_unsplit

TOKENS = 12
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=ADAPTED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapted(ADAPTED[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return greedy(checkpoint, prompts(), TOKENS)


@pytest.mark.parametrize(
    ("size", "page_size", "chunk_tokens"), [(2, 4, 13), pytest.param(1, 16, 512, marks=pytest.mark.slow)]
)
def test_greedy_equals_generate(
    checkpoint: Path, expected: list[list[int]], size: int, page_size: int, chunk_tokens: int
) -> None:
    def work(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(checkpoint, collective, page_size=page_size, pages=384 // page_size)
        return generate_unsplit(runner, prompts(), PARAMS, chunk_tokens=chunk_tokens)

    assert len({token for answer in expected for token in answer}) > TOKENS, "a model that says something"
    assert run_ranks(size, work) == [expected] * size


def test_logits_are_those_of_transformers_in_chunks_of_any_size(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, max_tokens=256)
    text = torch.randint(0, 256, (170,), generator=torch.Generator().manual_seed(3)).tolist()
    row, start = runner.req_to_token.alloc(), 0
    runner.req_to_token.set_slots(row, 0, list(range(16, 16 + len(text))))
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(torch.tensor([text])).logits[0]
    for count in (70, 1, 1, 60, 37, 1):
        tokens = tuple(text[start : start + count])
        logits = runner.forward(StepBatch((SequenceSlice(row, start, tokens),)))
        start += count
        rounding = 5e-6 * float(expected.abs().max())
        torch.testing.assert_close(logits[0], expected[start - 1], rtol=0, atol=rounding)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (BloomConfig(**BLOOM, slow_but_exact=True, pretraining_tp=2), "slow_but_exact"),
        (MptConfig(**MPT, attn_config={"alibi": False}), "attn_config.alibi = False"),
        (GPTJConfig(**GPT, rotary_dim=0), "rotary_dim = 0"),
        (DogeConfig(**GQA, is_moe=True), "mixes tokens"),
        (
            XGLMConfig(d_model=64, num_layers=2, attention_heads=4, ffn_dim=64, add_cross_attention=True),
            "cross-attention",
        ),
        (RoFormerConfig(), "both directions"),
        (RemBertConfig(is_decoder=True, add_cross_attention=True), "cross-attention"),
        (CodeGenConfig(**GPT | {"n_head": 2}, n_ctx=256, rotary_dim=4), "multiple of 4"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_variants_that_are_not_covered_are_refused(config: Any, match: str) -> None:
    spec, source = spec_from_config(config, "float32"), ModelSource("", config, "", None, 0)
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        build_model(source, spec, SingleCollective(), torch.device("cpu"), torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "kv_heads", "dims", "context_tokens"),
    [
        (FalconConfig(multi_query=True), 1, (64, 64), 2048),
        (FalconConfig(multi_query=False, num_attention_heads=64, hidden_size=4096), 64, (64, 64), 2048),
        (FalconConfig(new_decoder_architecture=True, num_kv_heads=8), 8, (64, 64), 2048),
        (MptConfig(max_seq_len=8192), 16, (128, 128), 8192),
        (BloomConfig(hidden_size=1024, n_head=16), 16, (64, 64), 2048),
        (BloomConfig(hidden_size=1024, n_head=16, seq_length=4096), 16, (64, 64), 4096),
        (DiffLlamaConfig(num_key_value_heads=8), 8, (64, 128), 2048),
        (DogeConfig(keep_window_size=512), 8, (136, 128), 512),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_configurations_say_of_the_cache(
    config: Any, kv_heads: int, dims: tuple[int, int], context_tokens: int
) -> None:
    spec = spec_from_config(config, "bfloat16")
    assert (spec.layout.kv_heads, spec.layout.head_dim) == (kv_heads, max(dims))
    assert (spec.k_dim, spec.v_dim) == dims
    assert spec.context_tokens == context_tokens


def test_a_module_called_outside_of_a_step_says_so(tmp_path: Path) -> None:
    runner = make_runner(save_adapted(ADAPTED["gpt-neo"](), tmp_path))
    attention = runner.model.transformer.h[0].attn
    with pytest.raises(InvariantError, match="outside of a step"):
        attention(torch.ones(1, 1, 64))
    with pytest.raises(InvariantError, match="outside of a step"):
        make_runner(save_adapted(ADAPTED["gptj"](), tmp_path)).model.transformer.h[0].attn(
            torch.ones(1, 1, 64)
        )


def test_the_kernels_are_for_models_whose_layers_they_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.model.attention.kernel_step.unsupported", lambda *sizes: "")
    alibi, plain = (save_adapted(ADAPTED[name](), tmp_path / name) for name in ("bloom", "falcon"))
    assert make_runner(plain).attention_kernels
    assert not make_runner(alibi).attention_kernels
    with pytest.raises(
        ConfigError, match=r"model\.attention = triton cannot be used for Bloom.*: ALiBi; use auto"
    ):
        make_runner(alibi, attention="triton")


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("gptj", set()),
        ("biogpt", set()),
        ("falcon", set()),
        ("falcon-new", set()),
        ("codegen", set()),
        ("mpt", set()),
        ("stablelm", {"attention"}),  # each head has a norm of its own
    ],
)
def test_ranks_share_what_the_adapters_plan_splits(name: str, whole: set[str], tmp_path: Path) -> None:
    directory = save_adapted(ADAPTED[name](), tmp_path)
    assert run_ranks(2, lambda collective: make_runner(directory, collective).held_whole) == [whole] * 2
