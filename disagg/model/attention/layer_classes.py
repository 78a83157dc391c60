"""Attention of models whose layers differ in their heads or share K and V: one attention context per layer class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from disagg.core.ports import LayerHook
from disagg.core.types import Span
from disagg.kv.pool import MHATokenToKVPool
from disagg.model.attention.paged import StepAttention
from disagg.model.attention.torch_attention import HeadMap
from disagg.model.spec.shapes import LayerPlace
from kernels.attention.common import AttentionParams


@dataclass(frozen=True)
class AttentionClass:
    """The query and KV heads that the rank has in one layer class."""

    queries: Span
    """Query heads of the rank."""
    heads: Span
    """KV heads of the rank."""
    head_map: HeadMap


Make = Callable[[AttentionClass, MHATokenToKVPool, LayerHook | None, bool], StepAttention]
"""Function that creates a step's context for one layer class. The last argument is whether the context writes K and
V."""


class ClassedStep(StepAttention):
    """Attention context that passes each layer's call to the context of the layer's class, with the layer's index in
    the pool of this class."""

    def __init__(
        self,
        make: Make,
        classes: Sequence[AttentionClass],
        pools: Sequence[MHATokenToKVPool],
        places: tuple[LayerPlace, ...],
        on_layer: LayerHook | None,
    ) -> None:
        self._layers: list[tuple[StepAttention, int]] = []
        starts = [sum(pool.layers for pool in pools[:number]) for number in range(len(pools))]
        shares = any(place.shared for place in places)
        writers, readers = [], []
        for one, pool, start in zip(classes, pools, starts, strict=True):
            writers.append(make(one, pool, _behind(on_layer, start), True))
            readers.append(make(one, pool, None, False) if shares else writers[-1])
        for place in places:
            number = max(n for n, start in enumerate(starts) if start <= place.layer)
            contexts = readers if place.shared else writers
            self._layers.append((contexts[number], place.layer - starts[number]))

    def attend_into(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        """See `StepAttention.attend_into`."""
        context, own = self._layers[layer]
        context.attend_into(own, q, k, v, params, out)


def _behind(on_layer: LayerHook | None, start: int) -> LayerHook | None:
    """Returns a layer hook for one layer class: calls `on_layer` with the layer's index in the class plus `start`.

    `start`: the class's first layer in the KV cache.
    """
    return None if on_layer is None else lambda layer: on_layer(start + layer)
