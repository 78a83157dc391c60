"""Decode steps that also compute a chunk of a new prompt, as decode groups do while many prompts queue."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from disagg.bench.common.report import Measurement, Result
from disagg.core.local_prefill import padded_answers
from disagg.core.types import Span
from disagg.kv.pages import slots_of
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.mixed_graphs import MixedSize
from disagg.model.runner import ModelRunner


def prompt_room(chunk_tokens: Sequence[int]) -> int:
    """Returns the length of the prompt: twice the largest chunk, because a chunk follows as many computed tokens."""
    return 2 * max(chunk_tokens, default=0)


def place_prompt(runner: ModelRunner, pages: Sequence[int]) -> int:
    """Gives a new prompt the pages; returns its row of the block table, which the runner's table owns."""
    row: int = runner.req_to_token.alloc()
    span = Span(0, len(pages) * runner.page_size)
    runner.req_to_token.set_slots(row, 0, slots_of(pages, runner.page_size, span))
    return row


def mixed_buckets(answers: int, chunk_tokens: Sequence[int]) -> list[MixedSize]:
    """Returns the recordings for steps of `answers` running answers and one of the chunks, in ascending order."""
    return [MixedSize(padded_answers(answers), tokens) for tokens in sorted(chunk_tokens)]


def with_prompt(batch: StepBatch, row: int, tokens: int) -> StepBatch:
    """Returns the step with a chunk of `tokens` tokens of the prompt in `row`, which follows an equal number of
    computed tokens."""
    return StepBatch((*batch.sequences, SequenceSlice(row, tokens, tuple(at % 256 for at in range(tokens)))))


def mixed_results(
    title: str, times: dict[int, tuple[float, ...]], alone: tuple[float, ...], recorded: bool
) -> list[Result]:
    """Returns the step's time and the time of one prompt token, for each chunk.

    `times`: seconds of steps by the chunk's tokens. `alone`: seconds of the step without a prompt.
    """
    results = []
    base_s = statistics.median(alone)
    for tokens, seconds in times.items():
        labels: dict[str, str | int | float] = {"prompt_tokens": tokens, "recorded": int(recorded)}
        name = f"{title}, and {tokens} tokens of a prompt"
        more = tuple(1e6 * (one - base_s) / tokens for one in seconds)
        definition = "time beyond the median of the step without a prompt, for each token of the prompt"
        results += [
            Result(f"{name}: step", Measurement("step", "ms", tuple(1e3 * s for s in seconds)), None, labels),
            Result(f"{name}: each", Measurement("prompt token", "us", more), None, labels, definition),
        ]
    return results
