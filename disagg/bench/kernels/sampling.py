"""Measures the sampling step of a batch, without waiting for its tokens, against the time to read the logits once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from disagg.bench.common.measure import host_us, seconds_of
from disagg.bench.common.read_rate import read_rate
from disagg.bench.common.report import Label, Measurement, Result
from disagg.core.errors import InvariantError
from disagg.core.types import SamplingParams
from disagg.model.sampling.batch import SamplingBatch
from disagg.model.sampling.penalties import SamplingRow, history_of
from kernels.dispatch import backend

_PROMPT = tuple(range(100, 612))
_EXPONENT = 1.5
_CHECKED_ROWS = 4


def _cases() -> dict[str, SamplingParams]:
    return {
        "greedy": SamplingParams(),
        "temperature 1": SamplingParams(temperature=1.0, seed=1),
        "temperature 1, top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95, seed=1),
        "everything": SamplingParams(
            temperature=0.8,
            top_k=50,
            top_p=0.95,
            min_p=0.02,
            seed=1,
            max_tokens=1 << 20,
            min_tokens=1 << 20,
            presence_penalty=0.5,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            logit_bias=((5, 2.0), (6, -2.0)),
            logprobs=5,
        ),
    }


@dataclass(frozen=True)
class SamplingBench:
    """Settings of a run."""

    device: torch.device
    batch: int
    vocab: int
    repeats: int
    cases: dict[str, SamplingParams] = field(default_factory=_cases)

    def logits(self, spread: str) -> torch.Tensor:
        """Returns float32 `[batch, vocab]`. With `text`, a probability is a power of the token's random rank (Zipf);
        with `noise`, logits are normally distributed."""
        shape = (self.batch, self.vocab)
        noise = torch.randn(shape, generator=torch.Generator(self.device).manual_seed(0), device=self.device)
        if spread == "noise":
            return noise
        return -_EXPONENT * (1.0 + noise.argsort(dim=-1)).log()

    def rows(self, params: SamplingParams) -> list[SamplingRow]:
        """Returns the sampling state of each answer in the batch, before the answer's first token."""
        return [SamplingRow(params, (), history_of(_PROMPT, params)) for _ in range(self.batch)]


def run(bench: SamplingBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Returns the times of a step for each case, and the logits' bytes divided by the step's time.

    Raises `InvariantError` if the sampled tokens differ from those that the CPU samples by sorting.
    """
    report_progress("read of the logits")
    nbytes = 4 * bench.batch * bench.vocab
    results: list[Result] = []
    for spread in ("text", "noise"):
        logits = bench.logits(spread)
        ceiling = _read(bench, logits, nbytes)
        for name, params in bench.cases.items():
            report_progress(f"{name}, {spread}")
            results.extend(_measure(bench, logits, ceiling, params, (name, spread)))
    return results


def _read(bench: SamplingBench, logits: torch.Tensor, nbytes: int) -> Measurement:
    if backend(bench.device) == "triton":
        return read_rate(bench.device, nbytes, bench.repeats)
    seconds = seconds_of(lambda: logits.amax(dim=-1), bench.device, bench.repeats)
    return Measurement("largest logit", "GB/s", tuple(nbytes / s / 1e9 for s in seconds))


def _measure(
    bench: SamplingBench,
    logits: torch.Tensor,
    ceiling: Measurement,
    params: SamplingParams,
    case: tuple[str, str],
) -> Iterator[Result]:
    batch = SamplingBatch(bench.rows(params), (2,), bench.vocab, bench.device)
    _check(bench, logits, params)

    def step() -> None:
        batch.advance(batch.sample(logits))

    seconds = seconds_of(step, bench.device, bench.repeats)
    name, spread = case
    labels: dict[str, Label] = {"case": name, "logits": spread, "batch": bench.batch, "vocab": bench.vocab}
    title = f"{name}, {spread}"
    rates = tuple(logits.nbytes / s / 1e9 for s in seconds)
    yield Result(f"{title}, read", Measurement("sampling", "GB/s", rates), ceiling, labels)
    yield Result(
        f"{title}, time", Measurement("sampling", "us", tuple(s * 1e6 for s in seconds)), None, labels
    )
    times = tuple(host_us(step, bench.device) for _ in range(3))
    yield Result(f"{title}, host time", Measurement("sampling", "us", times), None, labels)


def _check(bench: SamplingBench, logits: torch.Tensor, params: SamplingParams) -> None:
    """Raises `InvariantError` unless the tokens of the first `_CHECKED_ROWS` rows equal those sampled on the CPU."""
    rows = bench.rows(params)[:_CHECKED_ROWS]
    found = SamplingBatch(rows, (2,), bench.vocab, bench.device).sample(logits[:_CHECKED_ROWS])
    rows = bench.rows(params)[:_CHECKED_ROWS]
    expected = SamplingBatch(rows, (2,), bench.vocab, torch.device("cpu")).sample(
        logits[:_CHECKED_ROWS].cpu()
    )
    if not torch.equal(found.tokens.cpu(), expected.tokens):
        raise InvariantError("the sampling step chose other tokens than a sort")
