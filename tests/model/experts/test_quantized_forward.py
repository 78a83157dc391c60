"""Forwards of quantized experts give what transformers' own forwards give with the represented weights.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import SIZES
from torch import nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from disagg.model.experts.form import form_of
from disagg.model.experts.quantized import DOWN_WEIGHTS, UP_WEIGHTS, QuantizedExperts
from disagg.model.experts.quantized_check import check_experts
from disagg.model.layers.quantized import QuantizedExpertWeights
from kernels.dispatch import INTERPRETED
from kernels.layers import expert_quantized
from kernels.layers.expert_quantized import ExpertWeights
from kernels.layers.matmul_tiles import MatmulTile
from kernels.layers.quantized_linear import QuantizedTile
from kernels.layers.quantized_weight import FP4, POWERS, QuantizedWeight, dequantized_reference

HIDDEN, INNER, EXPERTS, CHOICES = 32, 64, 3, 2
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
_SIZES = SIZES | {"hidden_size": HIDDEN, "intermediate_size": INNER}
KINDS = {
    "fp8": (Qwen3MoeExperts, Qwen3MoeConfig(**_SIZES, moe_intermediate_size=INNER, num_experts=EXPERTS)),
    "mxfp4": (GptOssExperts, GptOssConfig(**_SIZES, num_local_experts=EXPERTS)),
}
_SMALL = QuantizedTile(16, 32, 16)


def weights_of(kind: str, rows: int, columns: int, seed: int, device: str) -> ExpertWeights:
    random = torch.Generator().manual_seed(seed)
    if kind == "mxfp4":
        values = torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.uint8)
        exponents = torch.randint(122, 126, (rows, columns // 32), generator=random, dtype=torch.uint8)
        scales, block, elements = exponents.view(POWERS), (1, 32), FP4
    else:
        values = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
        scales = torch.rand(rows // 32, columns // 32, generator=random) / 4
        block, elements = (32, 32), values.dtype
    found = QuantizedWeight.of(values.to(device), scales.to(device), block, elements=elements)
    return ExpertWeights(found, EXPERTS)


def both_of(kind: str, device: str) -> tuple[Any, Any]:
    """transformers' module with the represented weights, and the same with quantized weights."""
    family, config = KINDS[kind]
    config.update({"_experts_implementation_internal": "eager"})
    dtype = torch.float16
    plain, own = family(config), family(config)
    form = form_of(plain)
    for leaf, name, rows, columns in (
        (form.up, UP_WEIGHTS, 2 * INNER, HIDDEN),
        ("down_proj", DOWN_WEIGHTS, HIDDEN, INNER),
    ):
        weights = weights_of(kind, EXPERTS * rows, columns, rows, device)
        whole = dequantized_reference(weights.weight, dtype).view(EXPERTS, rows, columns)
        getattr(plain, leaf).data = whole.transpose(1, 2).contiguous() if form.transposed else whole
        delattr(own, leaf)
        setattr(own, name, QuantizedExpertWeights(weights, dtype))
        if form.has_bias:
            bias = torch.randn(EXPERTS, rows, generator=torch.Generator().manual_seed(rows)).to(device, dtype)
            getattr(plain, f"{leaf}_bias").data = bias
            getattr(own, f"{leaf}_bias").data = bias
    own.forward = QuantizedExperts(own, form)
    return plain.requires_grad_(False), own.requires_grad_(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_gives_the_results_of_transformers(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        expert_quantized, "CONVERTED_BYTES", 2 * 2 * 2 * INNER * HIDDEN
    )  # two experts at a time
    plain, own = both_of(kind, device)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(3, HIDDEN, generator=random).to(device, torch.float16)
    scores, chosen = torch.rand(3, EXPERTS, generator=random).to(device).topk(CHOICES)
    scores = scores.to(x.dtype)
    expected = plain(x, chosen, scores)
    ways = {
        "kernel": own.forward(x, chosen, scores, _SMALL),
        "converted": own.forward(x, chosen, scores, MatmulTile(16, 32, 32, stages=3)),
        "torch": own.forward.of_chosen(x, chosen, scores),
    }
    own.forward.kernel = own.forward.grouped = False
    ways["torch, without waiting"] = own(x, chosen, scores)
    if not INTERPRETED:  # large tiles take seconds
        own.forward.kernel = own.forward.grouped = True
        ways["derived"] = own(x, chosen, scores)
        own.forward.use_one_tile()
        ways["one tile"] = own(x, chosen, scores)
    for name, found in ways.items():
        assert found.dtype == x.dtype
        near = torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
        assert near, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["fp8"] if INTERPRETED else KINDS)
def test_the_comparison_at_start_finds_no_difference(kind: str, device: str) -> None:
    _, own = both_of(kind, device)
    assert check_experts(nn.ModuleList([own])) == 0
    assert own.forward.kernel
    assert own.forward.grouped
