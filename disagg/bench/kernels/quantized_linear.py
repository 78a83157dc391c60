"""Measures products with quantized weights: the rate at which they read the weights, and their speed beside that of
products with bfloat16 weights.

The sizes are those of the layers of an 8B Llama. Successive products use different weights, so that no weight comes
from the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from disagg.bench.common.measure import recorded, rounding, seconds_of
from disagg.bench.common.read_rate import read_rate
from disagg.bench.common.report import Label, Measurement, Result
from disagg.core.errors import InvariantError
from kernels.dispatch import backend
from kernels.layers.quantized_linear import quantized_linear, quantized_linear_reference
from kernels.layers.quantized_weight import QuantizedWeight, scales_shape

BLOCKS = {"fp8": (128, 128), "int8": (1, 1 << 30), "int4": (1, 128)}
"""Blocks of scales by type of values: those of DeepSeek, one scale per channel, and groups."""


@dataclass(frozen=True)
class QuantizedLinearBench:
    """Settings of a run."""

    device: torch.device
    repeats: int
    shapes: tuple[tuple[int, int], ...] = ((28672, 4096), (6144, 4096), (4096, 4096), (4096, 14336))
    """Output and input features of the layers."""
    rows: tuple[int, ...] = (1, 16, 64, 256, 512)
    """Numbers of rows of activations."""
    read_bytes: int = 1 << 28
    """Bytes of all weights that a measurement reads, much more than the GPU's cache."""

    def weight(self, kind: str, shape: tuple[int, int]) -> QuantizedWeight:
        """Returns a random weight with scales of different sizes."""
        random = torch.Generator(self.device).manual_seed(0)
        noise = torch.randn(shape, generator=random, device=self.device)
        rows, columns = (min(each, size) for each, size in zip(BLOCKS[kind], shape, strict=True))
        if kind == "fp8":
            values = (64 * noise).to(torch.float8_e4m3fn)
        elif kind == "int8":
            values = (32 * noise).clamp(-127, 127).to(torch.int8)
        else:
            values = (2.5 * noise + 8).round().clamp(0, 15).to(torch.uint8)
        size = scales_shape(shape, (rows, columns))
        scales = 0.5 + torch.rand(size, generator=random, device=self.device)
        return QuantizedWeight.of(values, scales / shape[1] ** 0.5, (rows, columns))


def run(
    bench: QuantizedLinearBench, report_progress: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """Returns two results for each type, layer and number of rows: bytes of the weight over the time of a product,
    and the time of a product with a bfloat16 weight over that time.

    Raises `InvariantError` if a product differs from the reference by more than rounding explains.
    """
    report_progress("read of the device's memory")
    ceiling = None
    if backend(bench.device) == "triton":
        ceiling = read_rate(bench.device, bench.read_bytes, bench.repeats)
    results: list[Result] = []
    for shape in bench.shapes:
        plain = _plain_seconds(bench, shape)
        for kind in BLOCKS:
            report_progress(f"{kind}, {list(shape)}")
            weight = bench.weight(kind, shape)
            for rows in bench.rows:
                results.extend(_measure(bench, kind, weight, rows, plain[rows], ceiling))
    return results


def _plain_seconds(bench: QuantizedLinearBench, shape: tuple[int, int]) -> dict[int, float]:
    """Returns the median time of a product with a bfloat16 weight, by number of rows."""
    count = _copies(bench, 2 * shape[0] * shape[1])
    weights = [torch.randn(shape, device=bench.device).bfloat16() for _ in range(count)]
    found = {}
    for rows in bench.rows:
        x = _activations(bench, rows, shape[1])
        seconds = _seconds(bench, [partial(torch.nn.functional.linear, x, one) for one in weights])
        found[rows] = Measurement("bfloat16", "s", seconds).median
    return found


def _measure(
    bench: QuantizedLinearBench,
    kind: str,
    weight: QuantizedWeight,
    rows: int,
    plain_s: float,
    ceiling: Measurement | None,
) -> Iterator[Result]:
    nbytes = weight.words.nbytes + weight.scales.nbytes
    x = _activations(bench, rows, weight.shape[1])
    _check(x, weight)
    copies = [weight, *(_copy(weight) for _ in range(_copies(bench, nbytes) - 1))]
    seconds = _seconds(bench, [partial(quantized_linear, x, one) for one in copies])
    labels: dict[str, Label] = {"kind": kind, "n": weight.shape[0], "k": weight.shape[1], "rows": rows}
    title = f"{kind} {list(weight.shape)}, {rows} rows"
    rates = tuple(nbytes / s / 1e9 for s in seconds)
    yield Result(f"{title}: read", Measurement("weight", "GB/s", rates), ceiling, labels)
    faster = tuple(plain_s / s for s in seconds)
    yield Result(f"{title}: speed-up over bfloat16", Measurement("speed-up", "x", faster), None, labels)


def _seconds(bench: QuantizedLinearBench, products: list[Callable[[], torch.Tensor]]) -> tuple[float, ...]:
    """Returns the seconds of one product, measured over all of them, on a GPU recorded."""

    def every() -> None:
        for product in products:
            product()

    work = recorded(every, bench.device)
    return tuple(s / len(products) for s in seconds_of(work, bench.device, bench.repeats))


def _copies(bench: QuantizedLinearBench, nbytes: int) -> int:
    return max(1, -(-bench.read_bytes // nbytes))


def _copy(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, words=weight.words.clone(), scales=weight.scales.clone())


def _activations(bench: QuantizedLinearBench, rows: int, k: int) -> torch.Tensor:
    random = torch.Generator(bench.device).manual_seed(rows)
    return torch.randn(rows, k, generator=random, device=bench.device).bfloat16()


def _check(x: torch.Tensor, weight: QuantizedWeight) -> None:
    """Raises `InvariantError` unless the product is that of the reference, up to rounding."""
    expected = quantized_linear_reference(x, weight)
    error = float((quantized_linear(x, weight) - expected).norm() / expected.norm())
    if not error <= rounding(x.dtype):
        raise InvariantError(
            f"a product with a quantized weight {list(weight.shape)} differs from the reference by {error:.2g} of "
            f"its norm; rounding explains {rounding(x.dtype):.2g}"
        )
