"""Adapter of JetMoe: attention has experts. Each expert has one query head for every KV head, and query heads are
ordered by expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from disagg.model.adapters.base import Adapter, StepInputs, pass_context
from disagg.model.attention.paged import AttentionContext
from kernels.attention.common import AttentionParams


def _adapt(model: Any, step: StepInputs) -> None:
    for layer in model.model.layers:
        pass_context(layer.self_attention, step, partial(_ByExpert, model.config.num_key_value_heads))


@dataclass(frozen=True)
class _ByExpert:
    """The step's attention context, which reorders queries by KV head. K and V are stored once, not per expert."""

    kv_heads: int
    own: AttentionContext

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        by_head = q.view(len(q), -1, self.kv_heads, q.shape[-1]).transpose(1, 2)
        out = self.own.attend(
            layer, by_head.flatten(1, 2), k[:, : self.kv_heads], v[:, : self.kv_heads], params
        )
        return out.view(*by_head.shape[:3], -1).transpose(1, 2).flatten(1, 2)


ADAPTER = Adapter(_adapt)
