"""The memory plan counts quantized experts, and those that a step converts to floats at a time."""

from __future__ import annotations

import pytest

from disagg.core.config.groups import DecodeConfig, PrefillConfig
from disagg.core.config.model import ModelConfig
from disagg.core.config.read import Config
from disagg.node.sizing import MemoryBudget
from disagg.plan.memory import plan_memory
from kernels.layers.expert_quantized import CONVERTED_BYTES


def budget_of(name: str, tp: int = 1) -> MemoryBudget:
    model = ModelConfig(random_init=name, dtype="bfloat16")
    config = Config(model=model, prefill=PrefillConfig(tp=tp), decode=DecodeConfig(tp=1))
    return plan_memory(config, 80 << 30)[0].budget


@pytest.mark.parametrize(
    ("name", "form", "converted_bytes"),
    [
        ("gpt-oss-20b", "mxfp4", CONVERTED_BYTES),
        ("qwen3-30b-a3b", "fp8-block", CONVERTED_BYTES),
        ("tiny-qwen3-moe", "fp8-block", 8 * 2 * 40 * 96 * 2),
        ("tiny-llama", "fp8-block", 2 * 100 * 96 * 2),
    ],
)
def test_converted_weights(name: str, form: str, converted_bytes: int) -> None:
    plain, quantized = budget_of(name), budget_of(f"{name}:{form}")
    assert quantized.work_bytes - plain.work_bytes == converted_bytes
    assert quantized.weights_bytes < plain.weights_bytes


def test_ranks_share_quantized_experts() -> None:
    one, two = budget_of("gpt-oss-20b:mxfp4"), budget_of("gpt-oss-20b:mxfp4", 2)
    experts_bytes = 24 * 32 * 3 * 2880 * 2880 * 17 // 32  # 4 bits and 1/32 of a scale of 8 bits
    attention_bytes = 24 * 2 * (64 + 8) * 64 * 2880 * 2
    shared_bytes = experts_bytes + attention_bytes
    assert one.weights_bytes - two.weights_bytes == pytest.approx(shared_bytes / 2, rel=0.02)
