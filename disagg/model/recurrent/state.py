"""Recurrent state (convolutions, state space models, linear attention): one cache for each running request.

transformers stores the state in its cache, by layer (`request_cache`). The size of the state does not depend on the
length of the request.

For a transfer, the state is written into the KV pool as `state_tokens` additional tokens after the prompt; each rank
writes its own heads. Planner, ring and copies then move the state like KV. A rank that reads the state needs all of
it, and gets the missing heads from the other ranks of its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from disagg.core.errors import InvariantError
from disagg.core.ports import Collective
from disagg.core.types import Span
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.attention.paged import AttentionContext
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.recurrent.request_cache import RequestCache, make_cache
from disagg.model.spec.model_spec import ModelSpec, shard_of
from kernels.attention.common import AttentionParams


class PoolLayers:
    """Attention context of a hybrid model: calls another context with the layer's index in the KV pool.

    The index is derived from the cache's current layer. A module's own layer index is not usable, because a block
    that several layers share has none.
    """

    def __init__(self, own: AttentionContext, cache: RequestCache, layers: tuple[int, ...]) -> None:
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
        self, sample: RequestCache, pool: MHATokenToKVPool, spec: ModelSpec, collective: Collective
    ) -> None:
        """`sample`: an example of a state, with the shapes of all, from which `spec.state_tokens` was computed."""
        self._form = sample.form()
        self._pool, self._collective = pool, collective
        layout = spec.layout
        self._shape = (layout.layers, layout.planes, spec.state_tokens, layout.kv_heads, layout.head_bytes)
        self._padding = spec.state_tokens * layout.token_bytes - sample.nbytes
        self._heads = shard_of(layout, collective.rank, collective.size).heads
        below = shard_of(layout, collective.rank - 1, collective.size).heads.stop if collective.rank else 0
        self._given = slice(max(self._heads.start, below), max(self._heads.stop, below))
        """Heads that no lower rank has: the heads that this rank sends to the others."""

    def write(self, cache: RequestCache, slots: torch.Tensor) -> None:
        """Stores the rank's heads of the state at `slots` (int64 `[state_tokens]`).

        Raises InvariantError when the state has other shapes than the sample's.
        """
        if cache.form() != self._form:
            raise InvariantError(
                f"a recurrent state has changed its shapes: {cache.form()}, not {self._form}"
            )
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in cache.states()]
        whole = torch.cat([*parts, parts[0].new_zeros(self._padding)]).view(self._shape)
        own = whole[:, :, :, self._heads.start : self._heads.stop]
        self._pool.buffer.view(torch.uint8).index_copy_(2, slots, own)

    def read(self, cache: RequestCache, slots: torch.Tensor) -> None:
        """Fills a new cache with the state at `slots`. All ranks of a group must call this method together."""
        own = self._pool.buffer.view(torch.uint8).index_select(2, slots)
        whole = own.new_zeros(self._shape)
        first = self._heads.start
        whole[:, :, :, self._given] = own[:, :, :, self._given.start - first : self._given.stop - first]
        self._collective.all_reduce(whole)  # for each head, all ranks but one contribute zeros
        flat, start = whole.view(-1), 0
        for place, shape, dtype in self._form:
            nbytes = math.prod(shape) * dtype.itemsize
            cache.restore(place, flat[start : start + nbytes].clone().view(dtype).view(shape))
            start += nbytes


class RowStates:
    """The recurrent state of the request in each row, after the last step that included the request.

    A state is kept until the row's next request begins.
    """

    def __init__(self, config: Any, mover: StateMover, table: ReqToTokenPool, state_tokens: int) -> None:
        self._config, self._mover, self._table, self._tokens = config, mover, table, state_tokens
        self._caches: dict[int, RequestCache] = {}

    @contextmanager
    def of(self, ones: Sequence[SequenceSlice]) -> Iterator[RequestCache]:
        """Yields the states before the slices to the block, as one batch. Stores the changed states after the
        block."""
        caches = [self._before(one) for one in ones]
        if len(caches) == 1:
            yield caches[0]
            return
        joined = make_cache(self._config)
        with torch.inference_mode():
            for same in zip(*(cache.states() for cache in caches), strict=True):
                joined.restore(same[0][0], torch.cat([tensor for _, tensor in same]))
        yield joined
        with torch.inference_mode():
            for index, cache in enumerate(caches):
                for (_, tensor), (_, new) in zip(cache.states(), joined.states(), strict=True):
                    tensor.copy_(new[index : index + 1])

    def _before(self, one: SequenceSlice) -> RequestCache:
        """Returns the state before a slice: an empty state at position 0, else the row's state. If the row has none,
        reads the state from the request's pages.
        """
        if one.start == 0:
            self._caches[one.row] = make_cache(self._config)
        elif one.row not in self._caches:
            self._caches[one.row] = make_cache(self._config)
            with torch.inference_mode():
                self._mover.read(self._caches[one.row], self._slots(one.row, one.start))
        return self._caches[one.row]

    def store(self, row: int, position: int) -> None:
        """Writes the state of the request at `row` into the pool, at positions `position ..`, and drops it."""
        with torch.inference_mode():
            self._mover.write(self._caches.pop(row), self._slots(row, position))

    def forget(self, row: int) -> None:
        """Drops the state of the previous request at `row`."""
        self._caches.pop(row, None)

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


def ignores_state(compute: Callable[[RequestCache, int], object], config: Any) -> bool:
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
