"""Recurrent state (convolutions, state space models, linear attention) of running requests.

The states of all requests are in a `MambaPool`. A step gives a batch of them to transformers' models in the form of a
cache (`request_cache`), whose tensors are those of the pool.

For a transfer, the state is written into the KV pool as `state_tokens` additional tokens after the prompt; each rank
writes its own heads. Planner, ring and copies then move the state like KV. A rank that reads the state needs all of
it, and gets the missing heads from the other ranks of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from disagg.core.errors import InvariantError
from disagg.core.ports import Collective
from disagg.core.types import Span
from disagg.kv.mamba_pool import MambaPool, States
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.attention.paged import AttentionContext
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.recurrent.request_cache import StateCache, make_cache
from disagg.model.spec.model_spec import ModelSpec, shard_of
from kernels.attention.common import AttentionParams


class PoolLayers:
    """Attention context of a hybrid model: calls another context with the layer's index in the KV pool.

    The index is derived from the cache's current layer. A module's own layer index is not usable, because a block
    that several layers share has none.
    """

    def __init__(self, own: AttentionContext, cache: StateCache, layers: tuple[int, ...]) -> None:
        self._own, self._cache = own, cache
        self._places = {layer: place for place, layer in enumerate(layers)}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        return self._own.attend(self._places[self._cache.layer], q, k, v, params)


class StateMover:
    """Writes a state into the KV pool and reads it back. Owned by the rank's compute thread."""

    def __init__(
        self, sample: StateCache, pool: MHATokenToKVPool, spec: ModelSpec, collective: Collective
    ) -> None:
        """`sample`: an example of a state, with the shapes of all, from which `spec.state_tokens` was computed."""
        self._pool, self._collective = pool, collective
        layout = spec.layout
        self._shape = (layout.layers, layout.planes, spec.state_tokens, layout.kv_heads, layout.head_bytes)
        self._padding = spec.state_tokens * layout.token_bytes - sample.nbytes
        self._heads = shard_of(layout, collective.rank, collective.size).heads
        below = shard_of(layout, collective.rank - 1, collective.size).heads.stop if collective.rank else 0
        self._given = slice(max(self._heads.start, below), max(self._heads.stop, below))
        """Heads that no lower rank has: the heads that this rank sends to the others."""

    def write(self, states: States, slots: torch.Tensor) -> None:
        """Stores the rank's heads of the state at `slots` (int64 `[state_tokens]`)."""
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in states]
        whole = torch.cat([*parts, parts[0].new_zeros(self._padding)]).view(self._shape)
        own = whole[:, :, :, self._heads.start : self._heads.stop]
        self._pool.buffer.view(torch.uint8).index_copy_(2, slots, own)

    def read(self, states: States, slots: torch.Tensor) -> None:
        """Copies the state at `slots` to `states`. All ranks of a group must call this method together."""
        own = self._pool.buffer.view(torch.uint8).index_select(2, slots)
        whole = own.new_zeros(self._shape)
        first = self._heads.start
        whole[:, :, :, self._given] = own[:, :, :, self._given.start - first : self._given.stop - first]
        self._collective.all_reduce(whole)  # for each head, all ranks but one contribute zeros
        flat, start = whole.view(-1), 0
        for _, tensor in states:
            part = flat[start : start + tensor.nbytes]
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # the clone is aligned
            start += tensor.nbytes


class RowStates:
    """The recurrent state of the request in each row, after the last step that included the request.

    A row's state is the slot of the same number in `pool`, until the row's next request begins.
    """

    def __init__(
        self, config: Any, mover: StateMover, pool: MambaPool, table: ReqToTokenPool, state_tokens: int
    ) -> None:
        self._config, self._mover, self._table, self._tokens = config, mover, table, state_tokens
        self.pool = pool
        self._known: set[int] = set()
        """Rows whose slot has the state of their request."""

    @contextmanager
    def of(self, ones: Sequence[SequenceSlice]) -> Iterator[StateCache]:
        """Yields the states before the slices to the block, as one batch. The states after the block are kept.

        Raises InvariantError when the block has replaced a state's memory, as with another shape.
        """
        cache = make_cache(self._config)
        with torch.inference_mode():
            for one in ones:
                self._prepare(one)
            with self.pool.batch([one.row for one in ones]) as states:
                cache.bind(states, begun=ones[0].start > 0)
                yield cache
                cache.require_bound(states)

    def prepare(self, ones: Sequence[SequenceSlice]) -> None:
        """Makes the rows' slots hold the states before the slices, for a step that uses the pool itself (`step`)."""
        with torch.inference_mode():
            for one in ones:
                self._prepare(one)

    def _prepare(self, one: SequenceSlice) -> None:
        """Clears the row's slot at position 0. If the slot lacks the request's state, reads it from the request's
        pages.
        """
        if one.start == 0:
            self.pool.clear(one.row)
        elif one.row not in self._known:
            self._mover.read(self.pool.states(one.row), self._slots(one.row, one.start))
        self._known.add(one.row)

    def store(self, row: int, position: int) -> None:
        """Writes the state of the request at `row` into the KV pool, at positions `position ..`, and drops it."""
        self._known.remove(row)
        with torch.inference_mode():
            self._mover.write(self.pool.states(row), self._slots(row, position))

    def forget(self, row: int) -> None:
        """Drops the state of the previous request at `row`."""
        self._known.discard(row)

    def _slots(self, row: int, position: int) -> torch.Tensor:
        return self._table.slots(row, Span(position, position + self._tokens)).long()


def recurrent_parts(batch: StepBatch, *, each_alone: bool = False) -> list[list[int]]:
    """Groups the sequences that recurrent layers can compute together.

    All sequences of which the step computes one token, not the first, form one group; every other sequence is a group
    of its own. `each_alone` separates all sequences, so that sums do not depend on the batch. Raises InvariantError
    for a chunk of a single prompt token after earlier tokens, which `PromptChunks` never produces.
    """
    single = [i for i, one in enumerate(batch.sequences) if one.start > 0 and len(one.tokens) == 1]
    for one in (batch.sequences[i] for i in single):
        if one.start < one.prompt_tokens:
            raise InvariantError(
                f"row {one.row}: token {one.start} of a prompt of {one.prompt_tokens} tokens is computed alone, "
                f"so recurrent layers would treat it as a token of an answer"
            )
    if each_alone:
        single = []
    alone = [[i] for i in range(len(batch.sequences)) if i not in single]
    return [*alone, single] if single else alone


def ignores_state(compute: Callable[[StateCache, int], object], config: Any) -> bool:
    """Returns whether a step of several tokens ignores the previous state. Each prompt then needs a single step.

    This is the case for transformers' selective scan (Mamba 1). `compute(cache, tokens)` runs the model; it is called
    with two different states, and equal results show that the model ignores the state.
    """
    caches = [make_cache(config), make_cache(config)]
    for number, cache in enumerate(caches):
        compute(cache, 1)
        with torch.inference_mode():
            for place, tensor in cache.states():
                if place.kind == "recurrent":
                    tensor += number
        compute(cache, 2)
    one, other = ([tensor for place, tensor in c.states() if place.kind == "recurrent"] for c in caches)
    return bool(one) and torch.equal(one[0], other[0])
