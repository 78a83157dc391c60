"""How long greedy answers from a pool of quantized KV agree with those from an unquantized one, and what it saves.

One model, one engine that prefills and decodes (`disagg.model.unsplit`), the same prompts in the same steps; only the
pool's type differs. What moves between groups is the pool's bytes as they are, so that a split system answers alike;
one whose decode groups alone have codes (`decode.kv_dtype`) computes prompts without them, and is not looked at here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import msgspec
import torch

from disagg.bench.agreement_figures import (
    Agreement,
    Found,
    decisiveness,
    logit_errors,
    tokens_equal,
    tokens_until,
)
from disagg.core.config_tree import KVDTypeName
from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, SamplingParams
from disagg.kv.pages import pages_for
from disagg.kv.pool import dtype_name
from disagg.model.collective import SingleCollective
from disagg.model.named import named_config
from disagg.model.runner import ModelRunner
from disagg.model.source import ModelSource
from disagg.model.unsplit import forced_logits, generate_unsplit
from disagg.node.assemble import resolve_dtype
from disagg.plan import PlanRequest, compute_plan

KV_DTYPES: tuple[str, ...] = tuple(name for name in get_args(KVDTypeName) if name != "auto")
LOGIT_STEPS = 8
"""Steps whose logits are compared."""
CHUNK_TOKENS = 512
OTHER_CHUNK_TOKENS = 37
"""Of the reference once more: sums in another order, and answers that join the batch one after the other."""
_PAGE_SIZE = 16


@dataclass(frozen=True)
class AgreementBench:
    """What to measure. Raises `ConfigError` for what cannot be."""

    device: torch.device
    source: ModelSource
    dtype: torch.dtype
    """Of weights, activations and the unquantized pool."""
    prompts: int
    prompt_tokens: int
    """Random ones."""
    answer_tokens: int
    seed: int
    """Of the prompts."""
    deterministic: bool = False
    """As `ModelConfig.deterministic`."""

    def __post_init__(self) -> None:
        spec = self.source.spec(self.dtype)
        if not spec.has_attention:
            raise ConfigError(
                f"{spec.architecture} has no attention, so it keeps no KV that could be quantized"
            )
        if self.request_tokens > spec.context_tokens:
            raise ConfigError(
                f"--prompt-tokens {self.prompt_tokens} and --answer-tokens {self.answer_tokens} exceed the model's "
                f"context of {spec.context_tokens}"
            )

    @property
    def request_tokens(self) -> int:
        """Prompt and answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def steps(self) -> int:
        """Whose logits are compared."""
        return min(LOGIT_STEPS, self.answer_tokens)

    def texts(self) -> list[list[int]]:
        """The prompts."""
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.prompts, self.prompt_tokens)
        drawn: list[list[int]] = torch.randint(
            self.source.config.vocab_size, size, generator=generator
        ).tolist()
        return drawn

    def runner(self, kv_dtype: torch.dtype) -> ModelRunner:
        """With room for all prompts at once."""
        pages = self.prompts * pages_for(self.request_tokens, _PAGE_SIZE) + 1
        return ModelRunner(
            self.source,
            collective=SingleCollective(),
            device=self.device,
            dtype=self.dtype,
            pool_tokens=pages * _PAGE_SIZE,
            page_size=_PAGE_SIZE,
            rows=self.prompts,
            max_tokens=self.request_tokens,
            kv_dtype=kv_dtype,
            deterministic=self.deterministic,
        )


def source_of(model: str | None, random_init: str, gain: float, seed: int) -> ModelSource:
    """The checkpoint `model`; else random weights, normal, of a standard deviation of `gain / sqrt(hidden size)`.

    With a gain of 1 each matrix keeps the size of what it multiplies. Raises `ConfigError`, `UnsupportedModelError`.
    """
    if model is not None:
        return ModelSource.from_directory(model)
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
    """`dtype` as `ModelConfig.dtype` names it."""
    settled = resolve_dtype(dtype, source, device)
    return AgreementBench(device, source, settled, prompts, prompt_tokens, answer_tokens, seed, deterministic)


def run(bench: AgreementBench, tell: Callable[[str], None] = lambda text: None) -> Found:
    """The reference, the reference cut otherwise, then each quantized type."""
    texts, own = bench.texts(), dtype_name(bench.dtype)
    tell(f"KV in {own}")
    runner = bench.runner(bench.dtype)
    right = _answers(runner, texts, bench, CHUNK_TOKENS)
    logits = _logits(runner, texts, right, bench.steps, CHUNK_TOKENS)
    compared = _Compared(bench, texts, right, logits)
    tell(f"KV in {own}, prompts cut otherwise")
    rows = [compared.row(f"{own}, cut otherwise", runner, OTHER_CHUNK_TOKENS)]
    for name in KV_DTYPES:
        del runner  # its weights' and its pool's memory comes first
        tell(f"KV in {name}")
        runner = bench.runner(getattr(torch, name))
        rows.append(compared.row(name, runner, CHUNK_TOKENS))
    asked: dict[str, str | int | float] = {
        "model": bench.source.name if bench.source.directory is None else bench.source.directory.name,
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
        asked["weights_std"] = bench.source.config.initializer_range
    return Found(asked, is_random, decisiveness(logits, right), rows)


def wire_token_bytes(layout: KVLayout, tokens: int) -> float:
    """Of the segments that the planner cuts for a prompt of `tokens`, for each token; one rank to one rank."""
    request = PlanRequest(layout=layout, prefill_tp=1, decode_tp=1, tokens=tokens)
    return compute_plan(request).nbytes / tokens


@dataclass(frozen=True)
class _Compared:
    """What the reference said."""

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
    """float32 `[prompts, steps, vocab]`: each prompt alone, given the reference's tokens so far."""
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
