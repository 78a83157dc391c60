"""Experts with our kernels give what transformers' own forwards give, for each layout of weights.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import SIZES
from slow_parameters import thinned
from torch import nn
from transformers import (
    AriaTextConfig,
    DeepseekV4Config,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from triton import OutOfResources

from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.experts.grouped import group_experts
from disagg.model.load.build import build_model
from disagg.model.load.source import ModelSource
from kernels.dispatch import INTERPRETED
from kernels.layers.expert_matmul import expert_tiles
from kernels.layers.matmul_tiles import MatmulTile

HIDDEN, INNER, EXPERTS, CHOICES = 24, 40, 6, 3
_SIZES = SIZES | {"hidden_size": HIDDEN, "intermediate_size": INNER}
_ROUTED = {"moe_intermediate_size": INNER}
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
KINDS: dict[str, tuple[type[Any], PreTrainedConfig]] = {
    "gate and up": (Qwen3MoeExperts, Qwen3MoeConfig(**_SIZES, **_ROUTED, num_experts=EXPERTS)),
    "another activation": (
        MixtralExperts,
        MixtralConfig(**_SIZES, num_local_experts=EXPERTS, hidden_act="gelu"),
    ),
    "transposed, alternating rows, biases": (
        GptOssExperts,
        GptOssConfig(**_SIZES, num_local_experts=EXPERTS),
    ),
    "transposed": (AriaExperts, AriaTextConfig(**_SIZES, moe_num_experts=EXPERTS)),
    "a gate of its own": (
        DeepseekV4Experts,
        DeepseekV4Config(**_SIZES, **_ROUTED, n_routed_experts=EXPERTS, swiglu_limit=0.5),
    ),
    "without a gate": (
        NemotronHExperts,
        NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS),
    ),
}


def experts_of_kind(name: str, dtype: torch.dtype, device: str) -> Any:
    kind, config = KINDS[name]
    config.update({"_experts_implementation_internal": "eager"})
    module = kind(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.empty(parameter.shape).normal_(0, 0.3, generator=generator)
    return module.to(device, dtype).requires_grad_(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), thinned(list(KINDS), [torch.float32, torch.float16], by=2))
def test_results_are_those_of_transformers(name: str, dtype: torch.dtype, device: str) -> None:
    module = experts_of_kind(name, dtype, device)
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 30):
        x = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype)
        scores, chosen = torch.rand(tokens, EXPERTS, generator=generator).to(device).topk(CHOICES)
        if (
            name == "gate and up" and not INTERPRETED
        ):  # its activation warns of rows that no product has written
            chosen[2::5, 0] = EXPERTS  # no expert; not all classes of transformers know this number
        expected = module(x, chosen, scores.to(dtype))
        own = nn.ModuleList([module])
        assert group_experts(own) == 1
        found = module(x, chosen, scores.to(dtype))
        del module.forward
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert found.dtype == dtype
        assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_experts_with_a_forward_of_their_own_are_not_replaced() -> None:
    module = experts_of_kind("gate and up", torch.float32, "cpu")
    assert group_experts(nn.ModuleList([module])) == 1
    assert group_experts(nn.ModuleList([module])) == 0
    assert group_experts(nn.ModuleList([experts_of_kind("gate and up", torch.float64, "cpu")])) == 0


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter runs in one thread")
def test_ranks_add_the_results_of_their_parts() -> None:
    source = ModelSource.random_init("tiny-qwen3-moe", std=0.2)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    scores, chosen = torch.rand(5, 8, generator=torch.Generator().manual_seed(3)).topk(2)

    def work(collective: ThreadCollective) -> list[torch.Tensor]:
        spec = source.spec(torch.float32)
        model = build_model(source, spec, collective, torch.device("cpu"), torch.float32).model
        experts = model.model.layers[1].mlp.experts
        own = experts(x, chosen, scores)
        assert group_experts(model) == 2
        return [own, experts(x, chosen, scores)]

    [(expected, ours)] = run_ranks(1, work)
    assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)
    for parts in run_ranks(3, work):
        assert all(torch.allclose(found, expected, rtol=1e-5, atol=1e-5) for found in parts)


def test_experts_for_which_the_kernels_are_wrong_keep_their_forward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from disagg.model.experts import grouped

    own = grouped.expert_sum

    def one_wrong_row(*arguments: Any) -> torch.Tensor:
        found = own(*arguments)
        found[-1] += 0.05 * found[-1].abs().mean()
        return found

    monkeypatch.setattr(grouped, "expert_sum", one_wrong_row)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter truncates to bfloat16
    module = experts_of_kind("gate and up", dtype, "cpu")
    assert group_experts(nn.ModuleList([module])) == 0
    assert "expert_kernels_disagree" in capsys.readouterr().out

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(grouped, "expert_sum", broken)
    assert group_experts(nn.ModuleList([module])) == 0
    assert "no kernel image" in capsys.readouterr().out
    monkeypatch.undo()
    assert group_experts(nn.ModuleList([module])) == 1


@pytest.mark.skipif(INTERPRETED, reason="needs no kernels, and takes seconds in the interpreter")
def test_every_tile_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from disagg.model.experts import grouped

    own = grouped.expert_matmul
    module = experts_of_kind("gate and up", torch.float16, "cpu")
    for tile in expert_tiles(torch.float16):

        def wrong(*arguments: Any, tile: MatmulTile, bad: MatmulTile = tile) -> torch.Tensor:
            return own(*arguments, tile=tile) * (1.5 if tile == bad else 1.0)

        monkeypatch.setattr(grouped, "expert_matmul", wrong)
        assert group_experts(nn.ModuleList([module])) == 0, tile


def test_errors_of_the_compiler_and_of_the_own_forward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from disagg.model.experts import grouped

    module = experts_of_kind("gate and up", torch.float16, "cpu")
    for error, why in (
        (OutOfResources(200, 100, "shared memory"), "Hardware limit"),
        (RuntimeError(), "RuntimeError"),
    ):

        def broken(*_: Any, error: Exception = error) -> torch.Tensor:
            raise error

        with monkeypatch.context() as changed:
            changed.setattr(grouped, "expert_sum", broken)
            assert group_experts(nn.ModuleList([module])) == 0
        assert why in capsys.readouterr().out

    def too_large(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for a copy of the weights")

    monkeypatch.setattr(Qwen3MoeExperts, "forward", too_large)
    assert group_experts(nn.ModuleList([module])) == 1, "nothing else computes them"
    assert "no memory for a copy" in capsys.readouterr().out


@pytest.mark.parametrize("choices", [None, 0, 2, 100, [1, 2]])
def test_any_configured_number_of_choices(choices: Any) -> None:
    module = experts_of_kind("gate and up", torch.float32, "cpu")
    module.config = SimpleNamespace(num_experts_per_tok=choices, _experts_implementation="eager")
    assert group_experts(nn.ModuleList([module])) == 1
