"""Adapter of Llama 4: some layers attend within chunks of positions. Layers without rotary embeddings may scale
queries by position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from disagg.model.adapters.base import Adapter, StepInputs, pass_context
from disagg.model.attention.paged import AttentionContext
from kernels.attention.common import AttentionParams


def _adapt(model: Any, step: StepInputs) -> None:
    config = model.config
    # The class has the prefix `language_model`, as in multimodal checkpoints, but its submodule is named `model`.
    model.base_model_prefix = "model"
    for layer, kind in zip(model.model.layers, config.layer_types, strict=True):
        attention = layer.self_attn
        chunk = config.attention_chunk_size if kind == "chunked_attention" else None
        tuned = attention.attn_temperature_tuning and not attention.use_rope
        attention.attn_temperature_tuning = (
            False  # the module would use a token's index in the step as its position
        )
        pass_context(attention, step, partial(_Chunked, step, chunk, attention if tuned else None))


@dataclass(frozen=True)
class _Chunked:
    """The step's attention context in a layer that attends within chunks of `chunk` tokens (None: no chunks).

    `tuned`: the attention module, if the layer scales queries by position; else None.
    """

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
        """Returns the factor of each token's queries, float32 `[T]`."""
        steps = torch.floor((self.step.positions.flatten().float() + 1.0) / self.tuned.floor_scale)
        return torch.log1p(steps).mul(self.tuned.attn_scale).add(1.0)


ADAPTER = Adapter(_adapt)
