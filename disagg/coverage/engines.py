"""Computes our engine's answers to the prompts of a check: on one rank (unsplit), and on prefill and decode ranks
(split)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disagg.core.ports import Collective
from disagg.core.types import SamplingParams
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.chunks import PromptChunks
from disagg.model.collective.base import SingleCollective, run_ranks
from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.model.runner_options import RunnerOptions
from disagg.model.spec.model_spec import shard_of
from disagg.model.unsplit import generate_unsplit

Prompts = Sequence[Sequence[int]]
Answers = list[list[int]]

_PAGE_TOKENS = 4
_POOL_TOKENS = 2048
_MAX_TOKENS = 96


def unsplit_answers(source: ModelSource, prompts: Prompts, answer_tokens: int, chunk_tokens: int) -> Answers:
    """Returns the greedy answers to all prompts, prefilled and decoded by one rank in one batch."""
    runner = make_runner(source, SingleCollective(), len(prompts))
    return generate_unsplit(
        runner, prompts, SamplingParams(max_tokens=answer_tokens), chunk_tokens=chunk_tokens
    )


def split_answers(
    source: ModelSource, prompts: Prompts, answer_tokens: int, chunk_tokens: int
) -> tuple[Answers, set[str]]:
    """Returns the greedy answers of two prefill ranks and one decode rank. Also returns the names of the model parts
    that tensor parallelism does not split.

    Raises UnsupportedModelError when two ranks cannot share the query heads.
    """
    ranks = run_ranks(2, lambda collective: _prefill(source, collective, prompts, chunk_tokens))
    firsts = ranks[0][1]
    runner = make_runner(source, SingleCollective(), len(prompts))
    for prefill_runner, _ in ranks:
        _hand_over(prefill_runner, runner)
    answers = [[first] for first in firsts]
    rows = [_give_slots(runner, number) for number in range(len(prompts))]
    for _ in range(answer_tokens - 1):
        slices = [
            SequenceSlice(row, len(prompt) + len(answer) - 1, (answer[-1],), len(prompt))
            for row, prompt, answer in zip(rows, prompts, answers, strict=True)
        ]
        for answer, logits in zip(answers, runner.forward(StepBatch(tuple(slices))), strict=True):
            answer.append(int(logits.argmax()))
    return answers, ranks[0][0].held_whole


def make_runner(source: ModelSource, collective: Collective, rows: int) -> ModelRunner:
    """Returns a float32 runner on the CPU. The KV pool is filled with NaN, so that reads of unwritten slots change
    the answers."""
    runner = ModelRunner(
        source,
        RunnerOptions(
            dtype=torch.float32,
            pool_tokens=_POOL_TOKENS,
            page_size=_PAGE_TOKENS,
            rows=rows,
            max_tokens=_MAX_TOKENS,
        ),
        collective=collective,
        device="cpu",
    )
    runner.pool.poison()
    return runner


def _prefill(
    source: ModelSource, collective: Collective, prompts: Prompts, chunk_tokens: int
) -> tuple[ModelRunner, list[int]]:
    """Prefills the prompts one after the other; returns the runner and the first token of each answer."""
    runner = make_runner(source, collective, len(prompts))
    chunks = PromptChunks.of(runner.spec, chunk_tokens)
    firsts = []
    for number, prompt in enumerate(prompts):
        row = _give_slots(runner, number)
        for span in chunks.spans(len(prompt)):
            piece = tuple(prompt[span.start : span.stop])
            logits = runner.forward(StepBatch((SequenceSlice(row, span.start, piece, len(prompt)),)))
        firsts.append(int(logits[-1].argmax()))
    return runner, firsts


def _give_slots(runner: ModelRunner, number: int) -> int:
    """Allocates a block table row for request `number`, with the same slots in every runner; returns the row."""
    row, tokens = runner.req_to_token.alloc(), runner.req_to_token.max_tokens
    first = _PAGE_TOKENS + number * tokens
    runner.req_to_token.set_slots(row, 0, torch.arange(first, first + tokens, dtype=torch.int32))
    return row


def _hand_over(prefill: ModelRunner, decode: ModelRunner) -> None:
    """Copies a prefill rank's KV (its heads, all slots) and its recurrent states into the decode rank's pools."""
    shard = shard_of(prefill.spec.layout, prefill.collective.rank, prefill.collective.size)
    buffers = zip(prefill.transfer_pools.buffers, decode.transfer_pools.buffers, strict=True)
    for part, (source, target) in zip(shard.all_parts, buffers, strict=True):
        target[:, :, :, part.heads.start : part.heads.stop] = source
