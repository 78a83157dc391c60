"""Measures the launches of a layer of experts, against the time to read the weights of the chosen experts once."""

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
from kernels.layers.expert_matmul import expert_matmul, expert_matmul_reference, expert_tile
from kernels.layers.expert_rows import expert_rows
from kernels.layers.expert_sum import expert_sum
from kernels.layers.matmul_tiles import MatmulTile
from kernels.layers.silu_mul import silu_mul

_TILES = (
    MatmulTile(16, 64, 128, stages=3, transposed=True),
    MatmulTile(16, 64, 256, stages=3, transposed=True),
    MatmulTile(16, 128, 128, stages=4, transposed=True),
    MatmulTile(16, 64, 128, stages=4),
    MatmulTile(16, 128, 64, stages=5),
    MatmulTile(16, 32, 256, stages=4),
)
"""Tiles that are compared with the chosen one for few tokens."""
_MORE_TILES = (
    MatmulTile(32, 128, 64, stages=4),
    MatmulTile(64, 128, 64, stages=4),
    MatmulTile(64, 256, 64, warps=8, stages=4),
    MatmulTile(128, 128, 64, warps=8, stages=4),
)
"""Tiles that are compared with the chosen one for more tokens."""
_FEW_TOKENS = 64


@dataclass(frozen=True)
class ExpertsBench:
    """Settings of a run; the default sizes are those of Qwen3 30B A3B."""

    device: torch.device
    repeats: int
    tokens: tuple[int, ...] = (1, 16, 64, 256, 2048)
    experts: int = 128
    choices: int = 8
    hidden: int = 2048
    inner: int = 768
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class _Step:
    """The inputs of a layer for one number of tokens."""

    x: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor

    @property
    def read_experts(self) -> int:
        return int(self.chosen.flatten().bincount().count_nonzero())


def run(bench: ExpertsBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Returns the read rates of both products and of the whole layer, and the times of the other launches.

    Raises `InvariantError` if a product differs from its reference.
    """
    report_progress("read of the weights")
    shapes = ((2 * bench.inner, bench.hidden), (bench.hidden, bench.inner))
    own = torch.Generator(bench.device).manual_seed(0)
    up, down = (
        torch.empty(bench.experts, *shape, dtype=bench.dtype, device=bench.device).normal_(
            0, 0.02, generator=own
        )
        for shape in shapes
    )
    ceiling = _read(bench, up)
    results: list[Result] = []
    for tokens in bench.tokens:
        report_progress(f"{tokens} tokens")
        scores = torch.rand(tokens, bench.experts, generator=own, device=bench.device)
        weights, chosen = scores.topk(bench.choices)
        x = torch.randn(tokens, bench.hidden, generator=own, device=bench.device).to(bench.dtype)
        step = _Step(x, up, down, chosen, weights.to(bench.dtype))
        tile = expert_tile(chosen.numel(), bench.experts, bench.dtype)
        results.extend(_layer(bench, step, tile, ceiling))
        tiles = _TILES if tokens <= _FEW_TOKENS else _MORE_TILES
        for one in dict.fromkeys((tile, *tiles) if bench.dtype != torch.float32 else (tile,)):
            results.extend(_products(bench, step, one, ceiling, chosen=one == tile))
    return results


def _read(bench: ExpertsBench, up: torch.Tensor) -> Measurement:
    if backend(bench.device) == "triton":
        return read_rate(bench.device, up.nbytes, bench.repeats)
    seconds = seconds_of(lambda: up.amax(), bench.device, bench.repeats)
    return Measurement("largest weight", "GB/s", tuple(up.nbytes / s / 1e9 for s in seconds))


def _layer(bench: ExpertsBench, step: _Step, tile: MatmulTile, ceiling: Measurement) -> Iterator[Result]:
    rows = expert_rows(step.chosen, bench.experts, tile.rows)
    y = expert_matmul(step.x, step.up, rows, bench.choices, tile=tile)
    z = silu_mul(*y.chunk(2, dim=-1))
    out = expert_matmul(z, step.down, rows, 1, tile=tile)

    def layer() -> torch.Tensor:
        order = expert_rows(step.chosen, bench.experts, tile.rows)
        first = expert_matmul(step.x, step.up, order, bench.choices, tile=tile)
        second = expert_matmul(silu_mul(*first.chunk(2, dim=-1)), step.down, order, 1, tile=tile)
        return expert_sum(second, step.weights, step.chosen, bench.experts)

    nbytes = (step.up.nbytes + step.down.nbytes) * step.read_experts // bench.experts
    tokens = len(step.x)
    yield _rate(bench, f"{tokens} tokens, layer", layer, nbytes, ceiling, {"tokens": tokens})
    others: dict[str, Callable[[], object]] = {
        "order of rows": lambda: expert_rows(step.chosen, bench.experts, tile.rows),
        "activation": lambda: silu_mul(*y.chunk(2, dim=-1)),
        "weighted sum": lambda: expert_sum(out, step.weights, step.chosen, bench.experts),
    }
    for name, work in others.items():
        seconds = seconds_of(recorded(work, bench.device), bench.device, bench.repeats)
        times = Measurement(name, "us", tuple(s * 1e6 for s in seconds))
        yield Result(f"{tokens} tokens, {name}", times, None, {"tokens": tokens})


def _products(
    bench: ExpertsBench, step: _Step, tile: MatmulTile, ceiling: Measurement, *, chosen: bool
) -> Iterator[Result]:
    rows = expert_rows(step.chosen, bench.experts, tile.rows)
    z = torch.randn(step.chosen.numel(), bench.inner, device=bench.device).to(bench.dtype)
    order = "w x" if tile.transposed else "x w"
    name = f"{tile.rows}x{tile.columns}x{tile.summed}, {tile.stages} stages, {order}"
    products = (("first", step.x, step.up, bench.choices), ("second", z, step.down, 1))
    for kind, x, weights, choices in products:
        found = expert_matmul(x, weights, rows, choices, tile=tile).float()
        expected = expert_matmul_reference(x, weights, rows, choices, tile=tile).float()
        if not (found - expected).norm() <= rounding(bench.dtype) * expected.norm():
            raise InvariantError(f"the {kind} product of experts with the tile {name} is wrong")
        work = partial(expert_matmul, x, weights, rows, choices, tile=tile)
        labels: dict[str, Label] = {"tokens": len(step.x), "tile": name, "chosen": int(chosen)}
        title = f"{len(step.x)} tokens, {kind} product, {name}{' (chosen)' if chosen else ''}"
        nbytes = weights.nbytes * step.read_experts // bench.experts
        yield _rate(bench, title, work, nbytes, ceiling, labels)


def _rate(
    bench: ExpertsBench,
    title: str,
    work: Callable[[], object],
    nbytes: int,
    ceiling: Measurement,
    labels: dict[str, Label],
) -> Result:
    seconds = seconds_of(recorded(work, bench.device), bench.device, bench.repeats)
    rates = Measurement("reads", "GB/s", tuple(nbytes / s / 1e9 for s in seconds))
    return Result(title, rates, ceiling, labels, "weights of the chosen experts over the time")
