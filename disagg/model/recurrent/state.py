"""Recurrent states (convolutions, state space models, linear attention) of running requests.

The states of all requests are in a `MambaPool`. A step passes a batch of states to transformers' models as a cache
object (`request_cache`). The tensors of this object lie in the pool.

A rank holds the state of its heads (`split`), or the whole state. A transfer writes the state into the slot of the
request's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from disagg.core.errors import InvariantError
from disagg.kv.mamba_pool import MambaPool
from disagg.model.attention.paged import AttentionContext
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.recurrent.request_cache import StateCache, make_cache
from disagg.model.spec.model_spec import ModelSpec
from kernels.attention.common import AttentionParams

STATES_SHARE = 0.25
"""Share of the memory beside the weights that the states of requests may take, if their number is automatic. Most of
the rest is for KV: without KV a state is of no use."""


class PoolLayers:
    """Attention context of a hybrid model: calls another context with the layer's index in the KV pool.

    The index is derived from the cache's current layer. A module's own layer index is not usable, because a module
    that several layers share has no single index.
    """

    def __init__(self, own: AttentionContext, cache: StateCache, layers: tuple[int, ...]) -> None:
        self._own, self._cache = own, cache
        self._places = {layer: place for place, layer in enumerate(layers)}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        return self._own.attend(self._places[self._cache.layer], q, k, v, params)


class RowStates:
    """The recurrent states of requests by block table row: row `i` uses slot `i` of `pool`.

    A state is created with the request's first token, or written into the slot by a transfer.
    """

    def __init__(self, config: Any, pool: MambaPool) -> None:
        self._config, self.pool = config, pool

    @contextmanager
    def of(self, ones: Sequence[SequenceSlice]) -> Iterator[StateCache]:
        """Yields a cache with the current states of the slices' rows, as one batch. After the block, the pool holds
        the states that the block computed.

        Raises InvariantError when the block has replaced a state's memory, for example by a state of another shape.
        """
        cache = make_cache(self._config)
        with torch.inference_mode():
            for one in ones:
                if one.start == 0:
                    self.pool.clear(one.row)
            with self.pool.batch([one.row for one in ones]) as states:
                cache.bind(states, begun=ones[0].start > 0)
                yield cache
                cache.require_bound(states)


def no_states(_: int) -> int:
    """Returns 0, the number of cached states of a runner without a prefix cache."""
    return 0


def state_rows(rows: int, state_bytes: int, left_bytes: int) -> int:
    """Returns how many requests have room for their states in `STATES_SHARE` of `left_bytes`, the memory beside the
    weights: at most `rows`, and at least 1. `state_bytes`: size of a state on each rank."""
    return max(1, min(rows, int(left_bytes * STATES_SHARE) // state_bytes))


def cached_states(spec: ModelSpec, state_bytes: int, count: int, limit_bytes: int | None) -> int:
    """Returns the number of slots for cached states: `count`, but at most as many as fit in `limit_bytes` bytes.
    `state_bytes`: size of a state on each rank.

    The number is 0 if the model has no recurrent state or cannot use the prefix cache. GPUs of one kind get equal
    numbers.
    """
    if not spec.has_state or spec.cache_refused:
        return 0
    return count if limit_bytes is None else min(count, limit_bytes // state_bytes)


def recurrent_parts(batch: StepBatch, *, each_alone: bool = False) -> list[list[int]]:
    """Groups the sequences that recurrent layers can compute together.

    Sequences with one token in the step, at a position above 0, form one group. Every other sequence is a group of
    its own. `each_alone` separates all sequences, so that sums do not depend on the batch. Returns lists of indices
    into `batch.sequences`. Raises InvariantError for a chunk of a single prompt token after earlier tokens, which
    `PromptChunks` never produces.
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

    This is the case for transformers' selective scan (Mamba 1). `compute(cache, tokens)` runs the model. The check
    runs the model with two different states: equal results show that the model ignores the state.
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
