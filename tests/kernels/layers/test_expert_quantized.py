"""Products with quantized experts are near float64 for every type and block, by the kernel and by conversion.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import INTERPRETED
from kernels.layers import expert_quantized as product
from kernels.layers.expert_quantized import (
    ConvertedExperts,
    ExpertWeights,
    expert_quantized,
    quantized_tile,
    quantized_tiles,
)
from kernels.layers.expert_rows import expert_rows
from kernels.layers.quantized_linear import QuantizedTile
from kernels.layers.quantized_weight import (
    FP4,
    POWERS,
    QuantizedWeight,
    dequantized,
    dequantized_reference,
    scales_shape,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("poison_empty")
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
EXPERTS, OUTPUTS, INPUTS = 3, 48, 160
FORMS = {
    "fp8 block": (torch.float8_e4m3fn, (16, 128)),
    "fp8 tensor": (torch.float8_e4m3fn, (24, INPUTS)),
    "int8 channel": (torch.int8, (1, INPUTS)),
    "int4 zeros": (torch.uint8, (1, 32)),
    "fp4": (FP4, (1, 32)),
}
TILES = {
    "fp8 block": QuantizedTile(16, 16, 32, swapped=True),
    "fp8 tensor": QuantizedTile(32, 32, 16),
    "int8 channel": QuantizedTile(16, 64, 64, swapped=True),
    "int4 zeros": QuantizedTile(16, 32, 16),
    "fp4": QuantizedTile(16, 64, 64),
}


def weights_of(name: str, device: str = "cpu", outputs: int = OUTPUTS, inputs: int = INPUTS) -> ExpertWeights:
    elements, block = FORMS[name]
    random = torch.Generator().manual_seed(0)
    rows = EXPERTS * outputs
    shape = scales_shape((rows, inputs), block)
    zeros = None
    if elements in (torch.uint8, FP4):
        values = torch.randint(0, 16, (rows, inputs), generator=random, dtype=torch.uint8)
    elif elements == torch.int8:
        values = torch.randint(-128, 128, (rows, inputs), generator=random, dtype=torch.int8)
    else:
        values = torch.randn(rows, inputs, generator=random).to(elements)
    if elements == torch.uint8:
        zeros = torch.randint(0, 16, shape, generator=random, dtype=torch.uint8).to(device)
    scales = (torch.rand(shape, generator=random) + 0.5) / 16
    if elements == FP4:
        scales = torch.randint(121, 126, shape, generator=random, dtype=torch.uint8).view(POWERS)
    found = QuantizedWeight.of(values.to(device), scales.to(device), block, zeros, elements=elements)
    weights = ExpertWeights(found, EXPERTS)
    weights.check()
    return weights


def inputs_of(
    dtype: torch.dtype, device: str, tokens: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, choices of two experts, of which some are no expert, and biases."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, INPUTS, generator=random).to(device, dtype)
    chosen = torch.rand(tokens, EXPERTS, generator=random).argsort(1)[:, :2].contiguous()
    chosen[2::3, 1] = EXPERTS
    bias = torch.randn(EXPERTS, OUTPUTS, generator=random).to(device, dtype)
    return x, chosen.to(device), bias


def require_near(
    found: torch.Tensor, x: torch.Tensor, chosen: torch.Tensor, weights: ExpertWeights, bias: torch.Tensor
) -> None:
    unit = 1e-6 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    if INTERPRETED and x.dtype == torch.bfloat16:
        unit *= 2  # it cuts off
    wide = dequantized_reference(weights.weight, torch.float32).double().view(EXPERTS, OUTPUTS, INPUTS)
    choices = chosen.shape[1]
    assert (found.shape, found.dtype) == ((chosen.numel(), OUTPUTS), x.dtype)
    for pair, expert in enumerate(chosen.flatten().tolist()):
        if expert < EXPERTS:
            row, own = x[pair // choices].double(), bias[expert].double()
            expected = wide[expert] @ row + own
            allowed = unit * (expected.abs() + (wide[expert].abs() @ row.abs()) / 4 + own.abs())
            assert bool(((found[pair].double() - expected).abs() <= allowed + 1e-6).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_the_kernel(name: str, dtype: torch.dtype, device: str) -> None:
    weights, tile = weights_of(name, device), TILES[name]
    x, chosen, bias = inputs_of(dtype, device)
    rows = expert_rows(chosen, EXPERTS, tile.rows)
    given = bias if dtype == torch.float16 else None
    found = expert_quantized(x, weights, rows, 2, given, tile=tile)
    require_near(found, x, chosen, weights, torch.zeros_like(bias) if given is None else bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "each"), [*((name, 2) for name in FORMS), ("fp4", 1), ("fp8 block", 3)])
def test_conversion_of_some_experts_at_a_time(
    name: str, each: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float16
    weights = weights_of(name, device)
    monkeypatch.setattr(product, "CONVERTED_BYTES", each * OUTPUTS * INPUTS * 2 + 1)
    converted = ConvertedExperts(weights, dtype)
    assert converted.each == each
    x, chosen, bias = inputs_of(dtype, device)
    require_near(converted(x, chosen, 2, bias), x, chosen, weights, bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_small_float_and_scale_is_exact(dtype: torch.dtype, device: str) -> None:
    """One-hot activations return the values of e2m1, times powers of two."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 2).to(device)
    exponents = torch.tensor([[120], [126], [127], [131]], dtype=torch.uint8, device=device).view(POWERS)
    weight = QuantizedWeight.of(codes, exponents, (1, 32), elements=FP4)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    expected = torch.cat([sizes, -sizes]).repeat(2) * torch.tensor([[2.0**-7], [0.5], [1], [16]]).to(device)
    assert torch.equal(dequantized_reference(weight, torch.float32), expected)
    assert torch.equal(dequantized(weight, dtype), expected.to(dtype))
    if device == "cpu" or dtype != torch.float32:
        eye, chosen = torch.eye(32, dtype=dtype, device=device), torch.zeros(32, 1, dtype=torch.int64)
        rows = expert_rows(chosen.to(device), 1, 16)
        found = expert_quantized(eye, ExpertWeights(weight, 1), rows, 1, tile=QuantizedTile(16, 16, 16))
        assert torch.equal(found.t(), expected.to(dtype))


def test_the_tile_follows_from_the_number_of_rows() -> None:
    weights = weights_of("fp8 block")
    tiles = quantized_tiles(weights, torch.bfloat16)
    found = [quantized_tile(weights, pairs, torch.bfloat16) for pairs in (1, 48, 49, 192, 193, 384)]
    assert found == [tiles[0], tiles[0], tiles[1], tiles[1], tiles[2], tiles[2]]
    assert quantized_tile(weights, 385, torch.bfloat16) is None
    assert quantized_tile(weights, 1, torch.float32) is None, "float32 is converted"


def test_wrong_arguments_are_refused() -> None:
    weights, tile = weights_of("fp4"), TILES["fp4"]
    x, chosen, bias = inputs_of(torch.float16, "cpu")
    rows = expert_rows(chosen, EXPERTS, tile.rows)
    with pytest.raises(ValueError, match=r"x must be .* \[rows, 160\]"):
        expert_quantized(x[:, :80], weights, rows, 2, tile=tile)
    with pytest.raises(ValueError, match="rows has blocks of 16 rows; the tile has 32"):
        expert_quantized(x, weights, rows, 2, tile=QuantizedTile(32, 64, 64))
    with pytest.raises(ValueError, match=r"bias must be contiguous torch.float16 \[3, 48\]"):
        expert_quantized(x, weights, rows, 2, bias.float(), tile=tile)
    with pytest.raises(ValueError, match="blocks of 16 rows must divide each of 2 experts"):
        ExpertWeights(weights_of("fp8 block").weight.row_part(0, 48), 2).check()
