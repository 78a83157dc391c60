"""One step's work, and the index tensors that every layer of the step shares.

The tensors are built once per step and copied to the device without synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import msgspec
import torch

from disagg.kv.req_to_token import ReqToTokenPool
from disagg.kv.upload import upload
from kernels.attention.prefill import PackedQueries
from kernels.dispatch import backend

DECODE_GROUP_TOKENS = 1 << 17  # most slots, including padding, that one batched decode attention gathers


class SequenceSlice(msgspec.Struct, frozen=True):
    """Work item of a step: computes `tokens` at positions `start ..` of the request at `row`.

    The pool already holds the KV of positions before `start`; row `row` of the block table holds the slots of all
    positions up to `stop`. A token below 0 refers to a token that the previous step sampled
    (`disagg.model.sampled_tokens`).
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    prompt_tokens: int = 0
    """Length of the request's whole prompt, on which some rotary embeddings depend. 0: the prompt ends at `stop`."""
    saves: tuple[tuple[int, int], ...] = ()
    """Pairs (position in the slice, slot), ascending: the recurrent state after all tokens before the position is
    saved to the slot. Only for chunks of a model with registered recurrent modules."""
    targets: tuple[int, ...] = ()
    """The prompt's tokens that follow each of the slice's first tokens. The step computes their log-probabilities.
    Empty without log-probabilities of the prompt."""
    likeliest: int = 0
    """Number of most probable tokens that are reported with each of `targets`."""

    @property
    def stop(self) -> int:
        """Position after the last token: the context length after the step."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepBatch:
    """The work of one forward pass: prefill chunks and decode tokens, mixed, one slice per request."""

    sequences: tuple[SequenceSlice, ...]

    @cached_property
    def tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum([len(sequence.tokens) for sequence in self.sequences])

    @cached_property
    def longest(self) -> int:
        """Longest context after the step, in tokens."""
        return max([sequence.start + len(sequence.tokens) for sequence in self.sequences])

    @cached_property
    def scores(self) -> bool:
        """Whether the step computes log-probabilities of prompt tokens."""
        return any(sequence.targets for sequence in self.sequences)


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one token each in the step, which are computed by one padded attention call."""

    queries: torch.Tensor
    """int64 `[n]`: index of each sequence's token among the step's tokens."""
    positions: torch.Tensor
    """int64 `[n]`: position of each token in its request."""
    slots: torch.Tensor
    """int64 `[n, longest]`: slots of the context; padding repeats the sequence's own last slot."""


@dataclass(frozen=True)
class PrefillGroup:
    """A sequence with several tokens in the step, which is computed by its own attention call."""

    first: int
    """Index of the sequence's first token among the step's tokens."""
    start: int
    """Position of the first token in its request."""
    count: int
    """Number of the sequence's tokens in the step."""
    slots: torch.Tensor
    """int64 `[start + count]`: slots of the whole context."""


@dataclass(frozen=True)
class KernelIndex:
    """Index tensors of a step for the attention kernels, which read slots from the block table."""

    rows: torch.Tensor
    """int64 `[n]`: block table rows of the first `n` sequences, which have one token each. Query `i` belongs to
    sequence `i`.
    """
    lengths: torch.Tensor
    """int64 `[n]`: context length of each of the first `n` sequences after the step."""
    chunks: PackedQueries
    """The remaining sequences, of one or more tokens each. Their queries follow the first `n` queries."""


@dataclass(frozen=True)
class StepIndex:
    """The step's index tensors, all int64 on the device, for T tokens of B sequences.

    The torch attention uses `decodes` and `prefills`. The attention kernels use `kernels` instead, and the other two
    fields are then empty.
    """

    input_ids: torch.Tensor
    """Token ids, `[1, T]`."""
    positions: torch.Tensor
    """Position of each token in its request, `[1, T]`."""
    last: torch.Tensor
    """Index of each sequence's last token among the step's tokens, `[B]`."""
    slots: torch.Tensor
    """Slot mapping: the slot of each token's K and V, `[T]`."""
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillGroup, ...]
    kernels: KernelIndex | None = None


def build_index(
    batch: StepBatch, table: ReqToTokenPool, kernels: bool = False, *, apart: bool = False
) -> StepIndex:
    """Builds a step's index tensors on the device of the block table, for the attention kernels or the torch path.

    `apart`: the torch path computes each token as a separate sequence, so that its bits do not depend on other tokens
    of the step. Raises ValueError for a slice that is empty or beyond the block table.
    """
    require_fits(batch, table)
    device = table.table.device
    firsts = first_indices(batch.sequences)
    ids = [token for sequence in batch.sequences for token in sequence.tokens]
    positions = [p for sequence in batch.sequences for p in range(sequence.start, sequence.stop)]
    rows = [sequence.row for sequence in batch.sequences for _ in sequence.tokens]
    singles = single_tokens(batch.sequences) if kernels else 0
    packed = upload(
        [
            *ids,
            *positions,
            *rows,
            *last_indices(batch.sequences),
            *(_kernel_numbers(batch, firsts, singles) if kernels else []),
        ],
        device,
    )
    count, after_last = len(ids), 3 * len(ids) + len(batch.sequences)
    position_tensor, row_tensor = packed[count : 2 * count], packed[2 * count : 3 * count]
    return StepIndex(
        input_ids=packed[:count][None],
        positions=position_tensor[None],
        last=packed[3 * count : after_last],
        slots=table.table[row_tensor, position_tensor].long(),
        decodes=() if kernels else _decode_groups(batch, firsts, table, apart),
        prefills=() if kernels or apart else _prefill_groups(batch, firsts, table),
        kernels=_kernel_index(batch, packed[after_last:], singles) if kernels else None,
    )


def require_fits(batch: StepBatch, table: ReqToTokenPool) -> None:
    """Raises ValueError for a slice that is empty or beyond the block table."""
    most = table.max_tokens
    for sequence in batch.sequences:
        # Not `sequence.stop`: this runs for each sequence of each step, and the call of a property is slow.
        if not sequence.tokens or sequence.start < 0 or sequence.start + len(sequence.tokens) > most:
            raise ValueError(
                f"row {sequence.row}: {len(sequence.tokens)} tokens from position {sequence.start} are not a valid "
                f"slice: at least one token is needed, and positions must be from 0 to below {table.max_tokens}"
            )


def index_of_chunks(queries: PackedQueries) -> KernelIndex:
    """Returns the index of a step in which every sequence uses the prefill kernel."""
    nothing = queries.rows[:0]
    return KernelIndex(nothing, nothing, queries)


def one_token_each(rows: torch.Tensor, positions: torch.Tensor) -> KernelIndex:
    """Returns the index of a step with one token per request, without synchronization. Arguments are int64 `[n]`."""
    nothing = rows[:0]
    return KernelIndex(rows, positions + 1, PackedQueries(nothing, nothing, nothing, nothing, 0))


def first_indices(sequences: Sequence[SequenceSlice]) -> list[int]:
    """Returns the index of each sequence's first token among the tokens of all sequences."""
    return [last + 1 - len(one.tokens) for last, one in zip(last_indices(sequences), sequences, strict=True)]


def last_indices(sequences: Sequence[SequenceSlice]) -> list[int]:
    """Returns the index of each sequence's last token among the tokens of all sequences."""
    return [end - 1 for end in accumulate(len(one.tokens) for one in sequences)]


def _kernel_numbers(batch: StepBatch, firsts: list[int], n: int) -> list[int]:
    slices = batch.sequences
    return [
        *(s.row for s in slices),
        *(first - n for first in firsts),  # index among the chunks' queries, which follow n single queries
        *(s.start for s in slices),
        *(len(s.tokens) for s in slices),
        *(s.stop for s in slices),
    ]


def _kernel_index(batch: StepBatch, numbers: torch.Tensor, n: int) -> KernelIndex:
    rows, firsts, starts, counts, lengths = numbers.view(5, -1)
    most = max((len(sequence.tokens) for sequence in batch.sequences[n:]), default=0)
    chunks = PackedQueries(rows[n:], firsts[n:], starts[n:], counts[n:], most)
    return KernelIndex(rows[:n], lengths[:n], chunks)


def single_tokens(sequences: Sequence[SequenceSlice]) -> int:
    """Returns the number of one-token sequences at the start of a step."""
    return next((at for at, one in enumerate(sequences) if len(one.tokens) > 1), len(sequences))


def _decode_groups(
    batch: StepBatch, firsts: list[int], table: ReqToTokenPool, apart: bool
) -> tuple[DecodeGroup, ...]:
    singles = [
        (s.start + index, s.row, first + index)
        for first, s in zip(firsts, batch.sequences, strict=True)
        for index in range(len(s.tokens))
        if apart or len(s.tokens) == 1
    ]
    # The Triton products sum padding in another order, so each token is computed without padding. On other devices,
    # `kernels.layers.pairwise` gives the same bits with any padding.
    alone = apart and backend(table.table.device) == "triton"
    singles.sort()  # sequences of similar length need the least padding
    groups: list[DecodeGroup] = []
    while singles:
        group = [singles.pop()] if alone else _take_group(singles)
        packed = upload([number for single in group for number in single], table.table.device).view(-1, 3)
        positions, rows, queries = packed[:, 0], packed[:, 1], packed[:, 2]
        columns = torch.arange(group[-1][0] + 1, device=packed.device)
        # Padding repeats the sequence's last slot: masked keys must still be finite.
        columns = torch.minimum(columns[None, :], positions[:, None])
        groups.append(DecodeGroup(queries, positions, table.table[rows[:, None], columns].long()))
    return tuple(groups)


def _take_group(singles: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    longest = singles[-1][0] + 1
    size = max(1, min(len(singles), DECODE_GROUP_TOKENS // longest))
    group = singles[-size:]
    del singles[-size:]
    return group


def _prefill_groups(batch: StepBatch, firsts: list[int], table: ReqToTokenPool) -> tuple[PrefillGroup, ...]:
    return tuple(
        PrefillGroup(first, s.start, len(s.tokens), table.table[s.row, : s.stop].long())
        for first, s in zip(firsts, batch.sequences, strict=True)
        if len(s.tokens) > 1
    )
