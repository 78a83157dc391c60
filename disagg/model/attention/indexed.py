"""Sparse attention whose layers choose the tokens that they read (DeepSeek V3.2 and similar models).

An *indexer* computes a score for every token of a context, from an index key per token, and returns the best tokens.
In the KV cache, the index keys are a layer class of their own. The indexer of transformers' model computes the
scores, one sequence at a time. This module only replaces the cache that the indexer reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disagg.core.ports import LayerHook
from disagg.core.types import Span
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.spec.shapes import LayerPlace


@dataclass(frozen=True)
class IndexedSequence:
    """Consecutive tokens of one sequence for which an indexer scores the context in one call."""

    tokens: slice
    """Range of these tokens among the step's tokens."""
    start: int
    """Position of the first of these tokens."""
    slots: torch.Tensor
    """int64 `[start + tokens]`: slots of the whole context."""
    keys: int
    """Number of scored keys: the keys of the context, followed by masked padding up to the end of the prompt."""


@dataclass(frozen=True)
class IndexStep:
    """The inputs of a step's indexers, and the pool of index keys."""

    sequences: Sequence[IndexedSequence]
    pool: MHATokenToKVPool
    """The pool that holds only index keys."""
    first: int
    """Index of the pool's first layer among the layers of the cache."""
    on_layer: LayerHook | None


def index_step(
    batch: StepBatch, table: ReqToTokenPool, pool: MHATokenToKVPool, first: int, on_layer: LayerHook | None
) -> IndexStep:
    """Returns the inputs of the indexers for `batch`. The slices must fit the block table."""
    sequences: list[IndexedSequence] = []
    tokens = 0
    for one in batch.sequences:
        slots = table.slots(one.row, Span(0, one.stop)).long()
        for piece, keys in _pieces(one):
            own = slice(tokens + piece.start - one.start, tokens + piece.stop - one.start)
            sequences.append(IndexedSequence(own, piece.start, slots[: piece.stop], keys))
        tokens += len(one.tokens)
    return IndexStep(sequences, pool, first, on_layer)


def _pieces(one: SequenceSlice) -> Iterator[tuple[Span, int]]:
    """Yields each span of positions that is scored together, with the number of scored keys, as in `generate()`.

    A prompt is scored as a whole, and an answer token by token, even in a recomputation. The choice of `torch.topk`
    among equal scores depends on these shapes.
    """
    prompt = one.prompt_tokens or one.stop
    if one.start < prompt:
        yield Span(one.start, min(one.stop, prompt)), prompt
    for position in range(max(one.start, prompt), one.stop):
        yield Span(position, position + 1), position + 1


class _SequenceKeys:
    """The cache object that an indexer of transformers receives: the index keys of one sequence and layer."""

    def __init__(self, step: IndexStep, sequence: IndexedSequence, layer: int) -> None:
        self._step, self._sequence, self._layer = step, sequence, layer

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Stores `keys` `[1, tokens, dim]`. Returns the context's keys, padded with zeros to `[1, keys, dim]`."""
        pool, one = self._step.pool, self._sequence
        pool.write_keys(self._layer, one.slots[one.start :], keys.transpose(0, 1))
        found = pool.read_keys(self._layer, one.slots).transpose(0, 1).to(keys.dtype)
        return nn.functional.pad(found, (0, 0, 0, one.keys - found.shape[1]))


class PagedIndexer:
    """Replaces an indexer's `forward`; the runner sets `step` before each step."""

    def __init__(self, indexer: Any, layer: int) -> None:
        """`layer`: the layer of the KV cache that stores the index keys."""
        self._forward, self._layer = indexer.forward, layer
        self.step: IndexStep | None = None
        """Inputs of the current step. None in the trial steps before requests: each trial step computes one whole
        sequence and stores no index keys."""

    def __call__(self, *args: Any, past_key_values: None = None, **more: Any) -> torch.Tensor:
        """Returns the positions that each token reads, int32 `[1, tokens, most]`, padded with -1.

        The arguments are those of the model's indexer, for all sequences of the step together.
        """
        count = args[0].shape[1]
        if self.step is None:
            return self._of(args, more, slice(0, count), 0, count, None)
        found = []
        for one in self.step.sequences:
            cache = _SequenceKeys(self.step, one, self._layer - self.step.first)
            found.append(self._of(args, more, one.tokens, one.start, one.keys, cache))
        if self.step.on_layer is not None:
            self.step.on_layer(self._layer)
        most = max(each.shape[-1] for each in found)
        return torch.cat(
            [nn.functional.pad(each, (0, most - each.shape[-1]), value=-1) for each in found], dim=1
        )

    def _of(
        self,
        args: tuple[Any, ...],
        more: dict[str, Any],
        tokens: slice,
        start: int,
        keys: int,
        cache: _SequenceKeys | None,
    ) -> torch.Tensor:
        positions = torch.arange(start, start + tokens.stop - tokens.start, device=args[0].device)
        mask = (torch.arange(keys, device=args[0].device)[None, :] <= positions[:, None])[None]
        own = [_part(x, tokens, mask) for x in args]
        named = {name: _part(x, tokens, mask) for name, x in more.items()}
        chosen: torch.Tensor = self._forward(*own, **named, past_key_values=cache)
        return chosen


def _part(x: Any, tokens: slice, mask: torch.Tensor) -> Any:
    """Returns the part of an argument that belongs to `tokens`; replaces the empty mask of `no_mask` with `mask`."""
    if isinstance(x, tuple):
        return tuple(_part(each, tokens, mask) for each in x)
    if not isinstance(x, torch.Tensor):
        return x
    return x[:, tokens] if x.numel() else mask


def wrap_indexers(model: Any, places: Sequence[LayerPlace]) -> list[PagedIndexer]:
    """Wraps each indexer of `model` in a `PagedIndexer`; returns the wrappers.

    `places`, by attention layer, gives the layer of the KV cache that stores the indexer's keys.
    """
    found = []
    for module in model.modules() if any(place.index >= 0 for place in places) else ():
        if isinstance(getattr(module, "indexer", None), nn.Module):
            indexer = PagedIndexer(module.indexer, places[module.layer_idx].index)
            module.indexer.forward = indexer
            module.register_forward_pre_hook(no_mask, with_kwargs=True)
            found.append(indexer)
    return found


def no_mask(
    _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook that replaces a mask of None by an empty tensor, because transformers slices the mask before
    it calls the indexer."""
    if named.get("attention_mask") is None:
        named["attention_mask"] = torch.empty(1, 1, 0, 0, dtype=torch.bool)
    return args, named
