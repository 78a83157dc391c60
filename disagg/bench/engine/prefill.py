"""Measures prefill steps of a whole model, launched kernel by kernel or as a recorded CUDA graph.

The ceiling of a step's matrix products is the rate of one large matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from disagg.bench.common.measure import rounding, seconds_of
from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.engine.decode import DecodeBench, prepare, require_close
from disagg.core.config.model import RecurrentName
from disagg.core.errors import ConfigError
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.layers.quantized import weight_elements
from disagg.model.runner import ModelRunner

_PRODUCT = 8192
"""Number of rows of the square matrices whose product is the ceiling on a GPU; on a CPU, a sixteenth of it."""


@dataclass(frozen=True)
class PrefillBench:
    """Settings of a run: one prompt per size, each after `cached_tokens` tokens that are already in the pool."""

    device: torch.device
    model: str
    """A model name of `disagg.model.load.named`."""
    dtype: torch.dtype
    tokens: tuple[int, ...]
    cached_tokens: int
    page_size: int
    repeats: int
    recurrent_kernels: RecurrentName = "auto"
    """Kernels of recurrent layers, as in `ModelConfig.recurrent_kernels`."""

    def __post_init__(self) -> None:
        if min(self.tokens, default=0) < 1 or min(self.page_size, self.repeats) < 1 or self.cached_tokens < 0:
            raise ConfigError("--tokens needs numbers of at least 1, for example 64,512,2048")


def run(bench: PrefillBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures a step of each size: the rate of its matrix products in TFLOP/s, its time and the host's time in ms.

    Raises `InvariantError` unless, up to rounding, a recorded step has the same logits as a step without recording.
    """
    report_progress("matrix product")
    ceiling = _product_rate(bench)
    report_progress(f"{bench.model}: loading")
    longest = bench.cached_tokens + max(bench.tokens)
    runner, _ = prepare(
        DecodeBench(
            bench.device,
            bench.model,
            bench.dtype,
            1,
            longest,
            bench.page_size,
            bench.repeats,
            recurrent_kernels=bench.recurrent_kernels,
        )
    )
    results: list[Result] = []
    launched: dict[int, torch.Tensor] = {}
    for recorded in (False, True):
        if recorded:
            report_progress("recording")
            runner.record_chunks(max(bench.tokens))
            runner.record_pieces(max(bench.tokens), 0)
            if not runner.recorded:
                break
        for tokens in bench.tokens:
            report_progress(f"{tokens} tokens, {'recorded' if recorded else 'launched'}")
            step = _step(bench, tokens)
            logits = runner.forward(step).clone()
            _compare(runner, tokens, launched.setdefault(tokens, logits), logits)
            results.extend(_measure(bench, runner, step, ceiling, recorded))
    return results


def _step(bench: PrefillBench, tokens: int) -> StepBatch:
    ids = tuple(number % 256 for number in range(tokens))
    return StepBatch((SequenceSlice(0, bench.cached_tokens, ids),))


def _measure(
    bench: PrefillBench, runner: ModelRunner, step: StepBatch, ceiling: Measurement, recorded: bool
) -> list[Result]:
    seconds = seconds_of(lambda: runner.forward(step), bench.device, bench.repeats)
    host = tuple(_host_ms(runner, step) for _ in range(bench.repeats))
    flops = 2.0 * weight_elements(runner.model.model.layers) * step.tokens
    labels: dict[str, Label] = {
        "model": bench.model,
        "tokens": step.tokens,
        "cached_tokens": bench.cached_tokens,
        "recorded": int(recorded),
    }
    title = f"{step.tokens} tokens, {'recorded' if recorded else 'launched'}"
    rate = Measurement("products", "TFLOP/s", tuple(flops / s / 1e12 for s in seconds))
    note = "products of all layers, without attention, over the time of a step"
    return [
        Result(f"{title}: products", rate, ceiling, labels, note),
        Result(f"{title}: step", Measurement("step", "ms", tuple(1e3 * s for s in seconds)), None, labels),
        Result(f"{title}: host", Measurement("host", "ms", host), None, labels),
    ]


def _host_ms(runner: ModelRunner, step: StepBatch) -> float:
    """Returns the milliseconds that the host needs to launch a step; on a CPU, the time of the whole step."""
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    started_s = time.perf_counter()
    runner.forward(step)
    return 1e3 * (time.perf_counter() - started_s)


def _compare(runner: ModelRunner, tokens: int, wanted: torch.Tensor, found: torch.Tensor) -> None:
    allowed = rounding(runner.pool.dtype, runner.pool.layers)
    require_close(found, wanted, allowed, f"a recorded step of {tokens} tokens", "a launched one")


def _product_rate(bench: PrefillBench) -> Measurement:
    side = _PRODUCT if bench.device.type == "cuda" else _PRODUCT // 16
    a, b = (torch.randn(side, side, device=bench.device).to(bench.dtype) for _ in range(2))
    seconds = seconds_of(lambda: a @ b, bench.device, bench.repeats)
    return Measurement("one large product", "TFLOP/s", tuple(2.0 * side**3 / s / 1e12 for s in seconds))
