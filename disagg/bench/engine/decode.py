"""Measures a decode step of a whole model, relative to the time for reading all weights and all requests' KV once.

Recurrent states count twice, because a step reads and writes them. Of a mixture, only the experts count that the
step's tokens choose.

With `deterministic`, the benchmark also measures the cost of `model.deterministic`: decode and prefill steps in both
modes, in one run. It then checks that a request's logits have the same bits alone and in the batch.

With `prompt_tokens`, it also measures steps that compute a chunk of a new prompt (`disagg.bench.engine.mixed_step`).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from disagg.bench.common.measure import copy_rate, rounding, seconds_of
from disagg.bench.common.report import Measurement, Result
from disagg.bench.engine.experts import ExpertChoices
from disagg.bench.engine.mixed_step import (
    mixed_buckets,
    mixed_results,
    place_prompt,
    prompt_room,
    with_prompt,
)
from disagg.bench.engine.transformers_step import require_plain, transformers_steps
from disagg.core.config.model import RecurrentName
from disagg.core.errors import ConfigError, InvariantError
from disagg.core.types import Span
from disagg.kv.pages import slots_of
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import SingleCollective
from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.model.runner_options import RunnerOptions

COPY_BYTES = 1 << 30
"""Size of the plain copy on a GPU, whose rate is the ceiling. On a CPU, the copy has a sixteenth of this size."""
_OTHER_EXPERTS = 1.0
"""Largest relative difference of a request's logits if rounding changes the choice of experts. Logits of another
request differ by 1.4."""


@dataclass(frozen=True)
class DecodeBench:
    """Settings of a run: `batch` requests with `context_tokens` tokens each; every step adds one token to each."""

    device: torch.device
    model: str
    """A model name of `disagg.model.load.named`."""
    dtype: torch.dtype
    batch: int
    context_tokens: int
    page_size: int
    repeats: int
    deterministic: bool = False
    """Whether to measure the deterministic mode too, and prefill steps in both modes."""
    prefill_tokens: int = 4096
    """Tokens of a prefill step, taken from the prompts of as many requests as needed."""
    max_context_tokens: int = 0
    """Longest context that the block table has room for, as in a server; at least `context_tokens`."""
    recurrent_kernels: RecurrentName = "auto"
    """Kernels of recurrent layers, as in `ModelConfig.recurrent_kernels`."""
    peer: Literal["none", "transformers"] = "none"
    """Whether to measure transformers' own step too."""
    prompt_tokens: tuple[int, ...] = ()
    """Chunks of a new prompt, in tokens; for each, the step that also computes it is measured."""

    @property
    def pages_each(self) -> int:
        """Pages of one request."""
        return -(-self.context_tokens // self.page_size)

    def __post_init__(self) -> None:
        if self.peer == "transformers":
            require_plain(self.model)
        if min(self.prompt_tokens, default=1) < 1:
            raise ConfigError(f"prompt_tokens = {self.prompt_tokens} is not allowed; each must be at least 1")
        for name in ("batch", "context_tokens", "page_size", "repeats", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} is not allowed; it must be at least 1")


def run(bench: DecodeBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures the time of a step, its read rate relative to the copy rate, and tokens per second. With
    `bench.deterministic`, also measures prefill steps, and the slowdown of the deterministic mode. With `bench.peer`,
    also measures the step of transformers, relative to this project's."""
    report_progress("device copy")
    nbytes = COPY_BYTES if bench.device.type == "cuda" else COPY_BYTES // 16
    ceiling = copy_rate(bench.device, bench.device, nbytes, bench.repeats)
    results, times = _measure(bench, False, ceiling, report_progress)
    if bench.deterministic:
        more, slower = _measure(bench, True, ceiling, report_progress)
        results += [*more, *_cost(bench, times, slower)]
    if bench.peer == "transformers":
        report_progress(f"{bench.model}: steps of transformers")
        results.append(_peer_result(bench, times["decode"]))
    return results


def _peer_result(bench: DecodeBench, ours: tuple[float, ...]) -> Result:
    found = transformers_steps(
        bench.model, bench.dtype, bench.device, bench.batch, bench.context_tokens, bench.repeats
    )
    kernels = ", ".join(found.fast_kernels) or "none"
    return Result(
        f"{bench.model}, batch {bench.batch}, {bench.context_tokens} tokens each: step of transformers",
        Measurement("step of transformers", "ms", tuple(1e3 * s for s in found.seconds)),
        None,
        {"model": bench.model, "batch": bench.batch, "fast_kernels": kernels},
        f"transformers' own model and cache; packages of fast recurrent kernels that it called: {kernels}",
        Measurement("step", "ms", tuple(1e3 * s for s in ours)),
    )


def _measure(
    bench: DecodeBench, deterministic: bool, ceiling: Measurement, report_progress: Callable[[str], None]
) -> tuple[list[Result], dict[str, tuple[float, ...]]]:
    """Returns the results of one mode, and its seconds for each kind of step. Frees the model's memory."""
    found = _measure_mode(bench, deterministic, ceiling, report_progress)
    gc.collect()  # frees the model, because its modules have reference cycles
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _measure_mode(
    bench: DecodeBench, deterministic: bool, ceiling: Measurement, report_progress: Callable[[str], None]
) -> tuple[list[Result], dict[str, tuple[float, ...]]]:
    mode = ", deterministic" if deterministic else ""
    report_progress(f"{bench.model}{mode}: loading")
    runner, batch = prepare(bench, deterministic)
    runner.record(bench.batch)
    runner.record_mixed(mixed_buckets(bench.batch, bench.prompt_tokens))
    report_progress(f"decode steps{mode}")
    times = {"decode": seconds_of(lambda: runner.forward(batch), bench.device, bench.repeats)}
    check(runner, batch)
    weights_bytes = read_weights_bytes(runner) - unread_expert_bytes(runner, batch)
    results = _decode_results(bench, runner, f"{bench.model}{mode}", times["decode"], ceiling, weights_bytes)
    if bench.prompt_tokens:
        report_progress(f"steps with prompts{mode}")
        results += _mixed_results(bench, runner, batch, f"{bench.model}{mode}", times["decode"])
    if bench.deterministic:
        report_progress(f"prefill steps{mode}")
        chunk = prefill_step(bench, batch)
        times["prefill"] = seconds_of(lambda: runner.forward(chunk), bench.device, bench.repeats)
        results.append(_prefill_result(bench, f"{bench.model}{mode}", chunk, times["prefill"]))
    return results, times


def _mixed_results(
    bench: DecodeBench, runner: ModelRunner, batch: StepBatch, name: str, alone: tuple[float, ...]
) -> list[Result]:
    row = place_prompt(runner, range(1 + bench.batch * bench.pages_each, runner.pages))
    times = {}
    for tokens in bench.prompt_tokens:
        step = with_prompt(batch, row, tokens)
        times[tokens] = seconds_of(partial(runner.forward, step), bench.device, bench.repeats)
        check(runner, step)
    return mixed_results(f"{name}, batch {bench.batch}", times, alone, runner.recorded)


def _decode_results(
    bench: DecodeBench,
    runner: ModelRunner,
    name: str,
    seconds: tuple[float, ...],
    ceiling: Measurement,
    weights_bytes: int,
) -> list[Result]:
    kv_bytes = read_kv_bytes(runner, bench)
    state_bytes = touched_state_bytes(runner, bench)
    title = f"{name}, batch {bench.batch}, {bench.context_tokens} tokens each"
    labels: dict[str, str | int | float] = {
        "model": bench.model,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "batch": bench.batch,
        "context_tokens": bench.context_tokens,
        "max_context_tokens": runner.req_to_token.max_tokens,
        "page_size": bench.page_size,
        "recorded": int(runner.recorded),
        "deterministic": int(runner.deterministic),
        "weights_bytes": weights_bytes,
        "kv_bytes": kv_bytes,
        "state_bytes": state_bytes,
        "recurrent_kernels": bench.recurrent_kernels,
    }
    nbytes = weights_bytes + kv_bytes + state_bytes
    rates = Measurement("reads", "GB/s", tuple(nbytes / s / 1e9 for s in seconds))
    state = f", {state_bytes / 1e9:.2f} GB of recurrent states" if state_bytes else ""
    return [
        Result(
            f"{title}: bytes",
            rates,
            ceiling,
            labels,
            f"weights ({weights_bytes / 1e9:.2f} GB) and KV ({kv_bytes / 1e9:.2f} GB){state} over a step's time; "
            "the ceiling counts bytes read and written",
        ),
        Result(f"{title}: step", Measurement("step", "ms", tuple(1e3 * s for s in seconds)), None, labels),
        Result(
            f"{title}: tokens",
            Measurement("tokens", "tokens/s", tuple(bench.batch / s for s in seconds)),
            None,
            labels,
        ),
    ]


def _prefill_result(bench: DecodeBench, name: str, chunk: StepBatch, seconds: tuple[float, ...]) -> Result:
    rates = Measurement("prefill", "tokens/s", tuple(chunk.tokens / s for s in seconds))
    labels: dict[str, str | int | float] = {"model": bench.model, "prefill_tokens": chunk.tokens}
    return Result(f"{name}, prefill of {chunk.tokens} tokens of {len(chunk.sequences)}", rates, None, labels)


def _cost(
    bench: DecodeBench, times: dict[str, tuple[float, ...]], slower: dict[str, tuple[float, ...]]
) -> list[Result]:
    return [
        Result(
            f"{bench.model}, deterministic: {kind} step takes longer by",
            Measurement(
                kind, "%", tuple(100 * (s / statistics.median(times[kind]) - 1) for s in slower[kind])
            ),
            None,
            {"model": bench.model},
            "relative to the median time without `model.deterministic`",
        )
        for kind in times
    ]


def prefill_step(bench: DecodeBench, batch: StepBatch) -> StepBatch:
    """Returns the prompts of the first requests of a decode step, limited to `prefill_tokens` tokens."""
    slices, left = [], bench.prefill_tokens
    for one in batch.sequences:
        count = min(left, bench.context_tokens)
        if count:
            slices.append(SequenceSlice(one.row, 0, tuple(number % 256 for number in range(count))))
            left -= count
    return StepBatch(tuple(slices))


def prepare(bench: DecodeBench, deterministic: bool = False) -> tuple[ModelRunner, StepBatch]:
    """Returns a runner whose pool holds noise for every request, in shuffled pages, and the step's batch.

    Each request's recurrent state is the state after a prompt of two tokens.
    """
    pages_each = bench.pages_each
    pages = bench.batch * pages_each
    room_tokens = prompt_room(bench.prompt_tokens)
    prompt_pages = -(-room_tokens // bench.page_size)
    runner = ModelRunner(
        ModelSource.random_init(bench.model),
        RunnerOptions(
            dtype=bench.dtype,
            pool_tokens=(pages + prompt_pages + 1) * bench.page_size,
            page_size=bench.page_size,
            rows=bench.batch + (room_tokens > 0),
            max_tokens=max(bench.context_tokens, bench.max_context_tokens, prompt_pages * bench.page_size),
            deterministic=deterministic,
            recurrent_kernels=bench.recurrent_kernels,
        ),
        collective=SingleCollective(),
        device=bench.device,
    )
    for part in runner.pool.parts:
        part.buffer.view(bench.dtype).normal_(generator=torch.Generator(bench.device).manual_seed(0))
    order = (1 + torch.randperm(pages, generator=torch.Generator().manual_seed(0))).tolist()
    slices = []
    for number in range(bench.batch):
        row = runner.req_to_token.alloc()
        own = order[number * pages_each : (number + 1) * pages_each]
        slots = slots_of(own, bench.page_size, Span(0, bench.context_tokens))
        runner.req_to_token.set_slots(row, 0, slots)
        slices.append(SequenceSlice(row, bench.context_tokens - 1, (number % runner.spec.vocab_size,)))
    if runner.states is not None:
        prompts = (SequenceSlice(one.row, 0, (number % 256, 7)) for number, one in enumerate(slices))
        runner.forward(StepBatch(tuple(prompts)))
    return runner, StepBatch(tuple(slices))


def check(runner: ModelRunner, batch: StepBatch) -> None:
    """Raises `InvariantError` unless, up to rounding, each request has the same logits in the step and alone.

    For a deterministic runner, the logits must be equal bit for bit. Otherwise the norm of their difference must be
    small, because products of another shape use another summation order. Random weights amplify this difference from
    layer to layer. bf16 differs by 5 % from float32 after 32 layers; another request's logits differ by 140 %.
    """
    layers = runner.model.config.num_hidden_layers
    allowed = 0.0 if runner.deterministic else rounding(runner.pool.dtype, layers)
    with same_states(runner):
        together = runner.forward(batch).clone()
    choices = ExpertChoices(runner.model)
    if choices and not runner.deterministic:
        together = _with_choices(runner, batch, choices, together)
    for number in (0, len(batch.sequences) - 1):
        eager = runner.eager() if choices.known else nullcontext()
        with same_states(runner), eager, choices.repeated(number):
            alone = runner.forward(StepBatch((batch.sequences[number],)))[0]
        require_close(together[number], alone, allowed, f"request {number} of the batch", "alone")


def _with_choices(
    runner: ModelRunner, batch: StepBatch, choices: ExpertChoices, logits: torch.Tensor
) -> torch.Tensor:
    """Returns the logits of an eager step, and records its `choices`. `logits`: those of an earlier run of the step.

    The two runs may choose different experts, because scores of random weights are nearly equal.
    """
    with same_states(runner), runner.eager(), choices.recorded():
        again = runner.forward(batch).clone()
    for number in range(len(batch.sequences)):
        require_close(logits[number], again[number], _OTHER_EXPERTS, f"request {number}", "in an eager step")
    return again


def require_close(found: torch.Tensor, expected: torch.Tensor, allowed: float, name: str, other: str) -> None:
    """Raises `InvariantError` if the logits of `name` differ from those of `other` by more than `allowed` times their
    norm."""
    error = float((found - expected).norm() / expected.norm())
    if not error <= allowed:
        raise InvariantError(
            f"{name} has other logits than {other}: they differ by {error:.2g} of their norm, rounding explains "
            f"{allowed:.2g}"
        )


@contextmanager
def same_states(runner: ModelRunner) -> Iterator[None]:
    """Undoes the changes that the block makes to recurrent states."""
    buffers = runner.states.pool.buffers if runner.states is not None else []
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, old in zip(buffers, before, strict=True):
        buffer.copy_(old)


def read_weights_bytes(runner: ModelRunner) -> int:
    """Returns the bytes of all parameters that a step reads completely. The embedding counts only if it is also the
    output head."""
    model = runner.model
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    return int(sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes))


def unread_expert_bytes(runner: ModelRunner, batch: StepBatch) -> int:
    """Returns the bytes of the experts that the step does not choose; 0 for a model without experts."""
    choices = ExpertChoices(runner.model)
    if choices:
        with same_states(runner), runner.eager(), choices.recorded():
            runner.forward(batch)
    return choices.unread_bytes()


def read_kv_bytes(runner: ModelRunner, bench: DecodeBench) -> int:
    """Returns the KV bytes of all requests, which a decode step reads."""
    return bench.batch * bench.context_tokens * (runner.pool.nbytes // runner.pool.slots)


def touched_state_bytes(runner: ModelRunner, bench: DecodeBench) -> int:
    """Returns the bytes of recurrent states that a step reads and writes, 0 for a model without them."""
    if runner.states is None:
        return 0
    return 2 * bench.batch * runner.states.pool.statistics().slot_bytes
