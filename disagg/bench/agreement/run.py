"""Measures how long greedy answers from a quantized KV pool agree with those from an unquantized one, and the
bytes saved.

Every run uses one engine that prefills and decodes (`disagg.model.unsplit`), with the same model, prompts and steps;
only the pool's type differs. A transfer moves the pool's bytes unchanged, so a disaggregated system gives the same
answers. This benchmark does not cover systems in which only the decode groups are quantized (`decode.kv_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import msgspec
import torch

from disagg.bench.agreement.figures import (
    Agreement,
    AgreementResult,
    decisiveness,
    logit_errors,
    tokens_equal,
    tokens_until,
)
from disagg.core.config.model import KVDTypeName
from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, SamplingParams, dtype_name
from disagg.kv.pages import pages_for
from disagg.model.collective.base import SingleCollective
from disagg.model.load.hub import checkpoint_folder
from disagg.model.load.named import named_config
from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.model.runner_options import RunnerOptions
from disagg.model.unsplit import forced_logits, generate_unsplit
from disagg.node.assemble import resolve_dtype
from disagg.plan.transfer import PlanRequest, compute_plan

KV_DTYPES: tuple[str, ...] = tuple(name for name in get_args(KVDTypeName) if name != "auto")
LOGIT_STEPS = 8
"""Number of steps whose logits are compared."""
CHUNK_TOKENS = 512
OTHER_CHUNK_TOKENS = 37
"""Chunk size of the second reference run, which leads to other summation orders and other batches."""
_PAGE_SIZE = 16


@dataclass(frozen=True)
class AgreementBench:
    """Settings of a run. The constructor raises `ConfigError` for invalid settings."""

    device: torch.device
    source: ModelSource
    dtype: torch.dtype
    """Type of weights, activations and the unquantized pool."""
    prompts: int
    prompt_tokens: int
    """Length of the random prompts."""
    answer_tokens: int
    seed: int
    """Seed of the prompts."""
    deterministic: bool = False
    """Whether `model.deterministic` is set; see `ModelConfig.deterministic`."""

    def __post_init__(self) -> None:
        spec = self.source.spec(self.dtype)
        if not spec.has_attention:
            raise ConfigError(f"{spec.architecture} has no attention, and therefore no KV to quantize")
        if self.request_tokens > spec.context_tokens:
            raise ConfigError(
                f"--prompt-tokens {self.prompt_tokens} and --answer-tokens {self.answer_tokens} exceed the model's "
                f"context of {spec.context_tokens}"
            )

    @property
    def request_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def steps(self) -> int:
        """Number of steps whose logits are compared."""
        return min(LOGIT_STEPS, self.answer_tokens)

    def texts(self) -> list[list[int]]:
        """Returns the random prompts, as token ids."""
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.prompts, self.prompt_tokens)
        drawn: list[list[int]] = torch.randint(
            self.source.config.vocab_size, size, generator=generator
        ).tolist()
        return drawn

    def runner(self, kv_dtype: torch.dtype) -> ModelRunner:
        """Returns a runner with room for all prompts at once."""
        pages = self.prompts * pages_for(self.request_tokens, _PAGE_SIZE) + 1
        return ModelRunner(
            self.source,
            RunnerOptions(
                dtype=self.dtype,
                pool_tokens=pages * _PAGE_SIZE,
                page_size=_PAGE_SIZE,
                rows=self.prompts,
                max_tokens=self.request_tokens,
                kv_dtype=kv_dtype,
                deterministic=self.deterministic,
            ),
            collective=SingleCollective(),
            device=self.device,
        )


def source_of(model: str | None, random_init: str, gain: float, seed: int) -> ModelSource:
    """Returns the checkpoint `model`, or random normal weights with standard deviation `gain / sqrt(hidden
    size)`.

    With a gain of 1, a matrix keeps the norm of its input. Raises `ConfigError`, `UnsupportedModelError`.
    """
    if model is not None:
        return ModelSource.from_directory(checkpoint_folder(model, None))
    return ModelSource.random_init(random_init, seed, std=gain / named_config(random_init).hidden_size ** 0.5)


def bench_of(
    source: ModelSource,
    dtype: str,
    device: torch.device,
    *,
    prompts: int,
    prompt_tokens: int,
    answer_tokens: int,
    seed: int,
    deterministic: bool = False,
) -> AgreementBench:
    """Returns the run's settings. `dtype` is a value of `ModelConfig.dtype`."""
    settled = resolve_dtype(dtype, source, device)
    return AgreementBench(device, source, settled, prompts, prompt_tokens, answer_tokens, seed, deterministic)


def run(bench: AgreementBench, report_progress: Callable[[str], None] = lambda text: None) -> AgreementResult:
    """Runs the reference, the reference with other chunks, then each quantized type."""
    texts, own = bench.texts(), dtype_name(bench.dtype)
    report_progress(f"KV in {own}")
    runner = bench.runner(bench.dtype)
    right = _answers(runner, texts, bench, CHUNK_TOKENS)
    logits = _logits(runner, texts, right, bench.steps, CHUNK_TOKENS)
    compared = _Compared(bench, texts, right, logits)
    report_progress(f"KV in {own}, other chunks")
    rows = [compared.row(f"{own}, other chunks", runner, OTHER_CHUNK_TOKENS)]
    for name in KV_DTYPES:
        del runner  # frees the memory of weights and pool before the next runner is made
        report_progress(f"KV in {name}")
        runner = bench.runner(getattr(torch, name))
        rows.append(compared.row(name, runner, CHUNK_TOKENS))
    settings: dict[str, str | int | float] = {
        "model": bench.source.label,
        "dtype": own,
        "deterministic": int(bench.deterministic),
        "prompts": bench.prompts,
        "prompt_tokens": bench.prompt_tokens,
        "answer_tokens": bench.answer_tokens,
        "seed": bench.seed,
        "logit_steps": bench.steps,
    }
    is_random = bench.source.directory is None
    if is_random:
        settings["weights_std"] = bench.source.config.initializer_range
    return AgreementResult(settings, is_random, decisiveness(logits, right), rows)


def wire_token_bytes(layout: KVLayout, tokens: int) -> float:
    """Returns the bytes per token of the segments planned for a prompt of `tokens`, from one rank to one
    rank."""
    request = PlanRequest(layout=layout, prefill_tp=1, decode_tp=1, tokens=tokens)
    return compute_plan(request).nbytes / tokens


@dataclass(frozen=True)
class _Compared:
    """The reference's answers and logits; `row` compares another run with them."""

    bench: AgreementBench
    texts: list[list[int]]
    right: list[list[int]]
    logits: torch.Tensor

    def row(self, name: str, runner: ModelRunner, chunk_tokens: int) -> Agreement:
        bench, layout = self.bench, runner.spec.layout
        answers = _answers(runner, self.texts, bench, chunk_tokens)
        logits = _logits(runner, self.texts, self.right, bench.steps, chunk_tokens)
        pairs = list(zip(answers, self.right, strict=True))
        return Agreement(
            name,
            bench.answer_tokens,
            until=tuple(tokens_until(*pair) for pair in pairs),
            equal=tuple(tokens_equal(*pair) for pair in pairs),
            logit_errors=logit_errors(logits, self.logits),
            pool_token_bytes=runner.pool.nbytes // runner.pool.slots,
            wire_token_bytes=wire_token_bytes(layout, bench.prompt_tokens),
            bf16_token_bytes=msgspec.structs.replace(layout, dtype="bfloat16").token_bytes,
        )


def _answers(
    runner: ModelRunner, texts: list[list[int]], bench: AgreementBench, chunk_tokens: int
) -> list[list[int]]:
    greedy = SamplingParams(max_tokens=bench.answer_tokens, ignore_eos=True)
    return generate_unsplit(runner, texts, greedy, chunk_tokens=chunk_tokens)


def _logits(
    runner: ModelRunner, texts: list[list[int]], right: list[list[int]], steps: int, chunk_tokens: int
) -> torch.Tensor:
    """Returns the logits of the first steps, float32 `[prompts, steps, vocab]`. Each prompt runs alone, and continues
    with the reference's tokens."""
    return torch.stack(
        [
            torch.stack(
                [
                    one.clone()
                    for one in forced_logits(runner, text, answer[:steps], chunk_tokens=chunk_tokens)
                ]
            )
            for text, answer in zip(texts, right, strict=True)
        ]
    )
