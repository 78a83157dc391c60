"""The answers that a split system must repeat, from an engine that is not split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from disagg.core.config import Config
from disagg.core.types import SamplingParams
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective import SingleCollective
from disagg.model.runner import ModelRunner
from disagg.model.source import ModelSource
from disagg.model.unsplit import generate_unsplit
from disagg.node.assemble import (
    make_runner,
    make_source,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
)


def comparable(config: Config, deterministic: bool | None) -> Config:
    """`config` for a run whose tokens are compared: with `model.deterministic` as given.

    None: on a GPU, and where the configuration says so. On a CPU float32 is exact without it, and much faster. Raises
    `ConfigError` for a GPU that is not there.
    """
    if deterministic is None:
        cuda = any(resolve_device(group.device).type == "cuda" for group in config.kinds.values())
        deterministic = config.model.deterministic or cuda
    model = msgspec.structs.replace(config.model, deterministic=deterministic)
    return msgspec.structs.replace(config, model=model)


def depends_on_batch(config: Config) -> bool:
    """True when arithmetic is 16 bits wide on a GPU: what is summed with what then depends on the step's batch,
    unless `model.deterministic` is set."""
    if config.model.deterministic:
        return False
    source = make_source(config)
    device = resolve_device(config.decode.device)
    return device.type == "cuda" and resolve_dtype(config.model.dtype, source, device) != torch.float32


@dataclass(frozen=True, slots=True)
class Reference:
    """Answers, and in words who gave them."""

    name: str
    answers: list[list[int]]


def reference_answers(
    config: Config, prompts: Sequence[Sequence[int]], sampling: SamplingParams, advance: Callable[[], None]
) -> Reference:
    """What the same model answers in one process, greedily.

    A checkpoint is asked through Hugging Face's `generate()`; random weights, which have no checkpoint, and quantized
    KV, which Hugging Face has not, through our own engine unsplit. Where only the decode groups quantize, so does the
    engine behind the prompt: it has a pool of each kind then. `advance` is called after each prompt.
    """
    source = make_source(config)
    device = resolve_device(config.decode.device)
    dtype = resolve_dtype(config.model.dtype, source, device)
    where = f"({str(dtype).removeprefix('torch.')} on {device.type}, one process)"
    kv_dtypes = [resolve_kv_dtype(config, group, dtype) for group in (config.prefill, config.decode)]
    if source.directory is not None and kv_dtypes == [dtype, dtype]:
        answers = _hugging_face(source, prompts, sampling, device, dtype, advance)
        return Reference(f"Hugging Face generate() {where}", answers)
    unsplit = _unsplit if kv_dtypes[0] == kv_dtypes[1] else _quantized_behind_the_prompt
    return Reference(
        f"our engine unsplit {where}", unsplit(config, source, prompts, sampling, device, advance)
    )


def _hugging_face(
    source: ModelSource,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    device: torch.device,
    dtype: torch.dtype,
    advance: Callable[[], None],
) -> list[list[int]]:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source.directory, dtype=dtype, local_files_only=True).to(
        device
    )
    eos = list(source.spec(dtype).eos_ids)
    greedy = GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        answers.append(output[0, len(prompt) :].tolist())
        advance()
    return answers


def _unsplit(
    config: Config,
    source: ModelSource,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    device: torch.device,
    advance: Callable[[], None],
) -> list[list[int]]:
    group = msgspec.structs.replace(config.decode, tp=1)
    runner = make_runner(config, group, source, SingleCollective(), device)
    answers = []
    for prompt in prompts:
        answers.extend(generate_unsplit(runner, [prompt], sampling, chunk_tokens=config.prefill.chunk_tokens))
        advance()
    return answers


def _quantized_behind_the_prompt(
    config: Config,
    source: ModelSource,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    device: torch.device,
    advance: Callable[[], None],
) -> list[list[int]]:
    """One engine with two pools: what the prompt leaves in the one is written to the other, as if just computed."""
    first, then = (
        make_runner(config, msgspec.structs.replace(group, tp=1), source, SingleCollective(), device)
        for group in (config.prefill, config.decode)
    )
    answers = []
    for prompt in prompts:
        total = len(prompt) + sampling.max_tokens
        slots = [torch.arange(runner.page_size, runner.page_size + total) for runner in (first, then)]
        rows = [_row(runner, its) for runner, its in zip((first, then), slots, strict=True)]
        answer = [_computed(first, rows[0], tuple(prompt), 0, config.prefill.chunk_tokens)]
        here, there = (its[: len(prompt)].to(device) for its in slots)
        for layer in range(then.pool.layers):
            then.pool.write(layer, there, *first.pool.read(layer, here, first.kv_dtype))
        while len(answer) < sampling.max_tokens and answer[-1] not in then.spec.eos_ids:
            answer.append(_computed(then, rows[1], (answer[-1],), len(prompt) + len(answer) - 1, 1))
        for runner, row in zip((first, then), rows, strict=True):
            runner.req_to_token.free(row)
        answers.append(answer)
        advance()
    return answers


def _row(runner: ModelRunner, slots: torch.Tensor) -> int:
    row = runner.req_to_token.alloc()
    runner.req_to_token.set_slots(row, 0, slots.int())
    return row


def _computed(runner: ModelRunner, row: int, tokens: tuple[int, ...], start: int, chunk_tokens: int) -> int:
    """The likeliest token behind `tokens`, which begin at position `start`."""
    for first in range(0, len(tokens), chunk_tokens):
        piece = tokens[first : first + chunk_tokens]
        logits = runner.forward(StepBatch((SequenceSlice(row, start + first, piece, start + len(tokens)),)))
    return int(logits[-1].argmax())
