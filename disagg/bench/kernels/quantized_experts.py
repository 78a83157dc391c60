"""Measures products with quantized experts: the rate at which they read the weights of the chosen experts.

The sizes are those of a layer of Qwen3 30B A3B with fp8 blocks, and of gpt-oss 20B in MXFP4. Each product is measured
with the kernel that reads quantized values, if there are few enough rows for it, and with converted weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from disagg.bench.common.measure import recorded, rounding, seconds_of
from disagg.bench.common.read_rate import read_rate
from disagg.bench.common.report import Label, Measurement, Result
from disagg.core.errors import InvariantError
from kernels.dispatch import backend
from kernels.layers.expert_matmul import expert_matmul_reference, expert_tile
from kernels.layers.expert_quantized import (
    ConvertedExperts,
    ExpertWeights,
    expert_quantized,
    quantized_tile,
)
from kernels.layers.expert_rows import expert_rows
from kernels.layers.quantized_weight import (
    FP4,
    POWERS,
    QuantizedWeight,
    dequantized_reference,
    scales_shape,
)

_FP8_BLOCK, _FP4_BLOCK = (128, 128), (1, 32)


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a layer."""

    name: str
    kind: str
    """Type of the values: fp8 or fp4."""
    experts: int
    choices: int
    hidden: int
    inner: int

    def weights(self, outputs: int, inputs: int, device: torch.device) -> ExpertWeights:
        """Returns random weights of all experts, each `[outputs, inputs]`."""
        own = torch.Generator(device).manual_seed(0)
        shape = (self.experts * outputs, inputs)
        if self.kind == "fp4":
            values = torch.randint(0, 16, shape, dtype=torch.uint8, device=device, generator=own)
            size = scales_shape(shape, _FP4_BLOCK)
            exponents = torch.randint(118, 122, size, dtype=torch.uint8, device=device, generator=own)
            weight = QuantizedWeight.of(values, exponents.view(POWERS), _FP4_BLOCK, elements=FP4)
        else:
            values = torch.randn(shape, device=device, generator=own).to(torch.float8_e4m3fn)
            block = (min(_FP8_BLOCK[0], outputs), min(_FP8_BLOCK[1], inputs))
            scales = 0.5 + torch.rand(scales_shape(shape, block), device=device, generator=own)
            weight = QuantizedWeight.of(values, scales / inputs**0.5, block)
        found = ExpertWeights(weight, self.experts)
        found.check()
        return found


@dataclass(frozen=True)
class QuantizedExpertsBench:
    """Settings of a run."""

    device: torch.device
    repeats: int
    sizes: tuple[ExpertSizes, ...] = (
        ExpertSizes("Qwen3 30B A3B", "fp8", 128, 8, 2048, 768),
        ExpertSizes("gpt-oss 20B", "fp4", 32, 4, 2880, 2880),
    )
    tokens: tuple[int, ...] = (1, 16, 64, 256, 2048)
    dtype: torch.dtype = torch.bfloat16
    read_bytes: int = 1 << 28
    """Bytes of the plain read with which the rates are compared."""


def run(
    bench: QuantizedExpertsBench, report_progress: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """Returns the read rates of both products of a layer, for each number of tokens.

    Raises `InvariantError` if a product differs from torch by more than rounding explains.
    """
    report_progress("read of the device's memory")
    ceiling = None
    if backend(bench.device) == "triton":
        ceiling = read_rate(bench.device, bench.read_bytes, bench.repeats)
    results: list[Result] = []
    for sizes in bench.sizes:
        products = (("first", 2 * sizes.inner, sizes.hidden), ("second", sizes.hidden, sizes.inner))
        for name, outputs, inputs in products:
            weights = sizes.weights(outputs, inputs, bench.device)
            for tokens in bench.tokens:
                report_progress(f"{sizes.name}, {name} product, {tokens} tokens")
                results.extend(_measure(bench, sizes, name, weights, tokens, ceiling))
    return results


def _measure(
    bench: QuantizedExpertsBench,
    sizes: ExpertSizes,
    name: str,
    weights: ExpertWeights,
    tokens: int,
    ceiling: Measurement | None,
) -> Iterator[Result]:
    own = torch.Generator(bench.device).manual_seed(tokens)
    chosen = torch.rand(tokens, sizes.experts, generator=own, device=bench.device).topk(sizes.choices).indices
    choices = sizes.choices if name == "first" else 1
    shape = (chosen.numel() // choices, weights.inputs)
    x = torch.randn(shape, generator=own, device=bench.device).to(bench.dtype)
    converted = ConvertedExperts(weights, bench.dtype)
    ways: dict[str, Callable[[], torch.Tensor]] = {"converted": partial(converted, x, chosen, choices)}
    if (tile := quantized_tile(weights, chosen.numel(), bench.dtype)) is not None:
        rows = expert_rows(chosen, sizes.experts, tile.rows)
        kernel = f"kernel {tile.rows}x{tile.columns}"
        ways = {kernel: partial(expert_quantized, x, weights, rows, choices, tile=tile), **ways}
    expected = _expected(bench, weights, x, chosen, choices)
    read = int(chosen.flatten().bincount().count_nonzero())
    nbytes = (weights.weight.words.nbytes + weights.weight.scales.nbytes) * read // sizes.experts
    for way, work in ways.items():
        title = f"{sizes.name}, {tokens} tokens, {name} product, {way}"
        if not (work().float() - expected).norm() <= rounding(bench.dtype) * expected.norm():
            raise InvariantError(f"the product of quantized experts is wrong: {title}")
        seconds = seconds_of(recorded(work, bench.device), bench.device, bench.repeats)
        rates = Measurement("reads", "GB/s", tuple(nbytes / s / 1e9 for s in seconds))
        labels: dict[str, Label] = {"model": sizes.name, "tokens": tokens, "product": name, "way": way}
        yield Result(title, rates, ceiling, labels, "quantized weights of the chosen experts over the time")


def _expected(
    bench: QuantizedExpertsBench, weights: ExpertWeights, x: torch.Tensor, chosen: torch.Tensor, choices: int
) -> torch.Tensor:
    """Returns the product in torch."""
    tile = expert_tile(chosen.numel(), weights.experts, bench.dtype)
    rows = expert_rows(chosen, weights.experts, tile.rows)
    whole = dequantized_reference(weights.weight, bench.dtype)
    stacked = whole.view(weights.experts, weights.outputs, weights.inputs)
    return expert_matmul_reference(x, stacked, rows, choices, tile=tile).float()
