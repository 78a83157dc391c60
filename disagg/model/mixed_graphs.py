"""CUDA graphs of decode steps that also compute chunks of prompts: one launch per step.

A bucket has a number of single tokens and a number of prompt tokens. Single tokens come first, and are padded with
the trash row; the prompts' tokens follow. Both numbers together are the same in all buckets, if the single tokens
leave enough room: products compute whole tiles of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from disagg.core.local_prefill import padded_answers, prefill_room
from disagg.model.batch import SequenceSlice, StepBatch, last_indices, single_tokens
from disagg.model.graphs import StepGraphs

MixedCompute = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Function that computes a step's logits, `[sequences, vocab]` of any float type, without synchronizing.

Arguments: the numbers that describe the step, int64; the bucket's number of single tokens; the longest context in
tokens."""

CHUNKS = 8
"""Largest number of prompts in a recorded step."""


class MixedSize(NamedTuple):
    """A padding bucket."""

    singles: int
    """Sequences of one token."""
    chunk_tokens: int
    """Tokens of all prompts."""


def mixed_sizes(step_tokens: int, largest_batch: int) -> tuple[MixedSize, ...]:
    """Returns the buckets, ascending in single tokens; see `prefill_room` for the prompt tokens."""
    counts = sorted({min(padded_answers(count), largest_batch) for count in range(1, largest_batch + 1)})
    return tuple(MixedSize(count, prefill_room(step_tokens, count)) for count in counts)


class MixedGraphs(StepGraphs):
    """Graphs of steps with single tokens of many sequences and chunks of a few. Sizes are indices of the buckets."""

    def __init__(
        self,
        compute: MixedCompute,
        buckets: Sequence[MixedSize],
        limits: tuple[int, ...],
        trash_row: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """See `StepGraphs`."""
        super().__init__(compute, tuple(range(len(buckets))), limits, trash_row, vocab_size, device)
        self._buckets = tuple(buckets)

    def takes(self, batch: StepBatch) -> bool:
        """Returns whether a step begins with single tokens, has a few chunks behind them, and fits a bucket."""
        return self.recorded and self._bucket(batch) is not None

    def _bucket(self, batch: StepBatch) -> int | None:
        singles = single_tokens(batch.sequences)
        chunks, tokens = len(batch.sequences) - singles, batch.tokens - singles
        if not 0 < chunks <= CHUNKS:
            return None
        fitting = (
            index
            for index, bucket in enumerate(self._buckets)
            if singles <= bucket.singles and tokens <= bucket.chunk_tokens
        )
        return next(fitting, None)

    def _size_of(self, batch: StepBatch) -> int:
        found = self._bucket(batch)
        assert found is not None, "the step fits a bucket"
        return found

    def _rows(self, size: int) -> int:
        return self._buckets[size].singles + CHUNKS

    def _computed(self, size: int, limit: int) -> torch.Tensor:
        return self._compute(self._numbers[size], self._buckets[size].singles, limit)

    def step_numbers(self, size: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        """Returns `_tokens` of the single tokens, `_tokens` and `_chunks` of the chunks, and the index of each
        sequence's last token."""
        bucket = self._buckets[size]
        singles = single_tokens(sequences)
        chunks = sequences[singles:]
        last = [*range(singles), *(bucket.singles + index for index in last_indices(chunks))]
        return [
            *self._tokens(bucket.singles, sequences[:singles]),
            *self._tokens(bucket.chunk_tokens, chunks),
            *self._chunks(CHUNKS, chunks),
            *last,
            *[0] * (self._rows(size) - len(last)),
        ]


class MixedNumbers(NamedTuple):
    """The parts of a step's numbers, all int64; see `MixedGraphs.step_numbers`."""

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    chunk_rows: torch.Tensor
    firsts: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def of(numbers: torch.Tensor, singles: int) -> MixedNumbers:
        """Splits the numbers of a step of a bucket with `singles` single tokens."""
        rows = singles + CHUNKS
        tokens = (len(numbers) - 3 * singles - 4 * CHUNKS - rows) // 3
        parts = torch.split(numbers, [3 * singles, 3 * tokens, 4 * CHUNKS, rows])
        ones, chunks, of_chunks, last = parts
        ids, positions, table_rows = torch.cat((ones.view(3, -1), chunks.view(3, -1)), 1)
        chunk_rows, firsts, starts, counts = of_chunks.view(4, -1)
        return MixedNumbers(ids, positions, table_rows, chunk_rows, firsts, starts, counts, last)
