"""Llama 4: attention in chunks of positions, queries scaled by position where there is no rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from disagg.model.adapters.base import Adapter, StepInputs, hand_context
from disagg.model.attention.paged import AttentionContext
from kernels.attention.common import AttentionParams


def _adapt(model: Any, step: StepInputs) -> None:
    config = model.config
    # The class names its parent's; the plan of how to split it is of this one's parts.
    model.base_model_prefix = "model"
    for layer, kind in zip(model.model.layers, config.layer_types, strict=True):
        attention = layer.self_attn
        chunk = config.attention_chunk_size if kind == "chunked_attention" else None
        tuned = attention.attn_temperature_tuning and not attention.use_rope
        attention.attn_temperature_tuning = (
            False  # it would take a token's place in the step for its position
        )
        hand_context(attention, step, partial(_Chunked, step, chunk, attention if tuned else None))


@dataclass(frozen=True)
class _Chunked:
    """The step's attention, of a layer with chunks of `chunk` tokens, tuned as the module `tuned` says."""

    step: StepInputs
    chunk: int | None
    tuned: Any
    own: AttentionContext

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        if self.tuned is not None:
            q = (q * self._temperatures()[:, None, None]).to(q.dtype)
        return self.own.attend(layer, q, k, v, replace(params, chunk_tokens=self.chunk))

    def _temperatures(self) -> torch.Tensor:
        """float32 `[T]`: factors of the queries."""
        steps = torch.floor((self.step.positions.flatten().float() + 1.0) / self.tuned.floor_scale)
        return torch.log1p(steps).mul(self.tuned.attn_scale).add(1.0)


ADAPTER = Adapter(_adapt)
