"""Computes reference answers with an engine in one process. A split system must reproduce these answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import msgspec
import torch

from disagg.core.config.read import Config
from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.model.collective.base import SingleCollective
from disagg.model.load.source import ModelSource, make_source
from disagg.model.rounding import Judge, compared_tokens, judge_by
from disagg.node.assemble import make_runner, resolve_device, resolve_dtype, resolve_kv_dtype
from disagg.reference.engines import HuggingFace, QuantizedBehindThePrompt, ReferenceEngine, Unsplit


def comparable(config: Config, deterministic: bool | None) -> Config:
    """Returns `config` with `model.deterministic` set to `deterministic`, for a run whose tokens are compared.

    If `deterministic` is None, the mode is enabled on a GPU. On a CPU, the configured value stays, because float32 is
    exact there and faster without the mode. Raises `ConfigError` if a configured GPU is missing.
    """
    if deterministic is None:
        cuda = any(resolve_device(group.device).type == "cuda" for group in config.kinds.values())
        deterministic = config.model.deterministic or cuda
    model = msgspec.structs.replace(config.model, deterministic=deterministic)
    return msgspec.structs.replace(config, model=model)


def equal_tokens(config: Config) -> bool:
    """Returns whether a cluster's tokens must equal those of `reference_answers`. If not, rounding may change tokens.

    In 16 bits, equality requires `model.deterministic`, groups of one rank like the reference, and our own engine as
    the reference. `config` must be a running cluster's configuration, with TP sizes. See `disagg.model.rounding`.
    """
    alone = config.prefill.ranks == config.decode.ranks == 1
    source, _, dtype = _resolved(config)
    ours = not _by_hugging_face(source, _kv_dtypes(config, dtype), dtype)
    return tokens_must_be_equal(config, same_sizes=alone and ours)


def tokens_must_be_equal(config: Config, *, same_sizes: bool) -> bool:
    """Returns whether two systems with the model of `config` must generate equal tokens.

    `same_sizes`: whether the TP sizes of the two systems are equal. In 16 bits, equal tokens require
    `model.deterministic` and equal TP sizes. The same holds for quantized KV on a GPU, where the last bit of a float
    can change a quantized value.
    """
    _, device, dtype = _resolved(config)
    rounds = dtype != torch.float32 or (device.type != "cpu" and _kv_dtypes(config, dtype) != [dtype, dtype])
    return not rounds or (config.model.deterministic and same_sizes)


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference answers, with the name of their engine."""

    name: str
    answers: list[list[int]]
    judges: list[Judge | None]
    """For each prompt, the `Judge` that the reference engine computed for the compared answer. None if there is no
    compared answer, if it equals the reference, or if it ends too early."""


def reference_answers(
    config: Config,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    advance: Callable[[], None],
    others: Sequence[Sequence[TokenLogprobs]] = (),
) -> Reference:
    """Computes the greedy answers of the configured model in one process.

    Hugging Face's `generate()` runs checkpoints. Our own engine runs random or quantized weights, and quantized KV,
    which `generate()` does not support. If only the decode groups quantize, the engine moves the prompt's KV to a
    second, quantized pool.

    `advance` is called after each prompt. `others`: for each prompt, the log-probabilities of an answer that is to be
    compared with the reference.
    """
    source, device, dtype = _resolved(config)
    engine = _make_engine(config, source, device, dtype, sampling)
    eos_ids = source.spec(dtype).eos_ids
    answers: list[list[int]] = []
    judges: list[Judge | None] = []
    for prompt, other in zip_longest(prompts, others, fillvalue=()):
        answers.append(engine.answer(prompt))
        tokens = [one.token for one in other]
        whole = len(tokens) == sampling.max_tokens or tokens[-1:] in [[eos] for eos in eos_ids]
        judges.append(_judge(engine, dtype, prompt, other) if whole and tokens != answers[-1] else None)
        advance()
    where = f"({str(dtype).removeprefix('torch.')} on {device.type}, one process)"
    return Reference(f"{engine.name} {where}", answers, judges)


def judge_answers(
    config: Config, prompts: Sequence[Sequence[int]], others: Sequence[Sequence[TokenLogprobs]]
) -> list[Judge]:
    """Returns the `Judge` of each answer in `others` to `prompts`, computed by the engine of `reference_answers`."""
    source, device, dtype = _resolved(config)
    longest = SamplingParams(max_tokens=max(map(len, others)))
    engine = _make_engine(config, source, device, dtype, longest)
    return [_judge(engine, dtype, *one) for one in zip(prompts, others, strict=True)]


def _judge(
    engine: ReferenceEngine, dtype: torch.dtype, prompt: Sequence[int], other: Sequence[TokenLogprobs]
) -> Judge:
    logits = partial(engine.logits, prompt, [one.token for one in other])
    return judge_by(engine.models, dtype, logits, [compared_tokens(one) for one in other])


def _resolved(config: Config) -> tuple[ModelSource, torch.device, torch.dtype]:
    source, device = make_source(config), resolve_device(config.decode.device)
    return source, device, resolve_dtype(config.model.dtype, source, device)


def _make_engine(
    config: Config, source: ModelSource, device: torch.device, dtype: torch.dtype, sampling: SamplingParams
) -> ReferenceEngine:
    kv_dtypes = _kv_dtypes(config, dtype)
    if _by_hugging_face(source, kv_dtypes, dtype):
        return HuggingFace(source, sampling, device, dtype)
    prefill, decode = (group.sized(device.type) for group in (config.prefill, config.decode))
    kinds = [decode] if kv_dtypes[0] == kv_dtypes[1] else [prefill, decode]
    runners = [
        make_runner(config, msgspec.structs.replace(kind, tp=1), source, SingleCollective(), device)
        for kind in kinds
    ]
    chunk_tokens = prefill.chunk_tokens
    if len(runners) == 1:
        return Unsplit(runners[0], sampling, chunk_tokens)
    return QuantizedBehindThePrompt(runners[0], runners[1], sampling, chunk_tokens)


def _kv_dtypes(config: Config, dtype: torch.dtype) -> list[torch.dtype]:
    return [resolve_kv_dtype(config, group, dtype) for group in (config.prefill, config.decode)]


def _by_hugging_face(source: ModelSource, kv_dtypes: Sequence[torch.dtype], dtype: torch.dtype) -> bool:
    return source.directory is not None and source.quantization is None and kv_dtypes == [dtype, dtype]
