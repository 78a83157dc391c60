"""Adapter of GPT-Neo: attention scores are not scaled, and local layers have a sliding window."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from disagg.model.adapters.base import QKV, Adapter, StepInputs, plan_of, projected


def _adapt(model: Any, step: StepInputs) -> None:
    for layer, block in enumerate(model.transformer.h):
        attention = block.attn.attention
        attention.layer_idx = layer
        attention.bias = None  # frees the unused mask `[context, context]`
        window = model.config.window_size if attention.attention_type == "local" else None
        attention.forward = partial(_forward, attention, step, window)


def _forward(
    attention: Any, step: StepInputs, window: int | None, hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = projected(attention, hidden_states)
    out = step.attend(attention, q, k, v, scaling=1.0, sliding_window=window)
    return attention.out_proj(out), None


_PLAN = plan_of("h.*.attn.attention", QKV, "out_proj") | plan_of("h.*.mlp", ["c_fc"], "c_proj")
ADAPTER = Adapter(_adapt, plan=_PLAN)
