"""Records the attention calls that a model makes for one token, at start and before any request.

The recorded calls are compared with the model's configuration. If they differ, the model is refused. Examples of
differences are shared K and V, attention outside of `paged_attention`, and windows that exist only in a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from disagg.core.errors import UnsupportedModelError
from disagg.model.collective.base import SingleCollective
from disagg.model.spec.layer_types import attention_layers, setting
from disagg.model.spec.model_spec import ModelSpec
from disagg.model.tensor_parallel import SummedModule
from kernels.attention.common import AttentionParams


@dataclass
class ShapeProbe:
    """An attention context that records each call and returns zeros."""

    shapes: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Shapes of queries, K and V by attention layer."""
    params: dict[int, AttentionParams] = field(default_factory=dict)
    """Parameters of the attention call, by attention layer."""
    calls: int = 0

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        self.calls += 1
        self.shapes[layer] = (tuple(q.shape), tuple(k.shape), tuple(v.shape))
        self.params[layer] = params
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    def require(self, spec: ModelSpec, heads: Sequence[tuple[int, int]], config: Any) -> None:
        """Raises a one-line UnsupportedModelError unless each layer attended once, with the query and KV `heads` that
        its layer class has on this rank.
        """
        layers = spec.attention_layers
        if self.calls != layers or set(self.shapes) != set(range(layers)):
            raise _refuse(
                spec,
                f"{self.calls} attention calls of layers {sorted(self.shapes)}, not one call of each of {layers}",
            )
        for layer, shapes in self.shapes.items():
            number = spec.class_of(layer)
            shape = spec.shapes[number]
            (queries, own), k_dim, v_dim = heads[number], shape.k_dim, shape.v_dim
            expected = (1, queries, k_dim), (1, own, k_dim), (1, own, v_dim)
            if shapes[1:] != expected[1:]:
                raise _refuse(spec, f"layer {layer} has K and V of {shapes[1:]}, not {expected[1:]}")
            if shapes != expected:
                raise _refuse(spec, f"layer {layer} has queries of {shapes[0]}, not {expected[0]}")
        wanted = [self._wants_window(layer, spec, config) for layer in range(layers)]
        if any(want and self.params[layer].window_tokens is None for layer, want in enumerate(wanted)):
            raise _refuse(spec, "its attention call does not pass the configured sliding window")
        wanted = [self._type_of(layer, config) == "chunked_attention" for layer in range(layers)]
        if any(want and self.params[layer].chunk_tokens is None for layer, want in enumerate(wanted)):
            raise _refuse(spec, "its attention call does not pass the configured chunk size")

    def _wants_window(self, layer: int, spec: ModelSpec, config: Any) -> bool:
        window = setting(config, "sliding_window")
        if not window or window >= spec.context_tokens:  # a window as long as the context hides nothing
            return False
        if kind := self._type_of(layer, config):
            return kind == "sliding_attention"
        return getattr(config, "use_sliding_window", True) is not False

    def _type_of(self, layer: int, config: Any) -> str:
        """Returns the layer type of an attention layer; empty if the configuration names no types."""
        types = getattr(config, "layer_types", None)
        return str(types[attention_layers(config)[layer]]) if types else ""


@contextmanager
def without_other_ranks(model: Any) -> Iterator[None]:
    """Inside the block, the rank's part of `model` runs without all-reduces: shapes are correct, values are wrong."""
    rows = [module for module in model.modules() if isinstance(module, SummedModule)]
    collectives = [row.collective for row in rows]
    for row in rows:
        row.collective = SingleCollective()
    try:
        yield
    finally:
        for row, collective in zip(rows, collectives, strict=True):
            row.collective = collective


def _refuse(spec: ModelSpec, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{spec.architecture} is not supported: {why}")
