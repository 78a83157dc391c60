"""Adapter of XGLM: its own attention code scales queries before the product with the keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from disagg.model.adapters.base import QKV, Adapter, StepInputs, plan_of, projected


def _adapt(model: Any, step: StepInputs) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = partial(_forward, layer.self_attn, step)


def _forward(
    attention: Any, step: StepInputs, hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = projected(attention, hidden_states)
    return attention.out_proj(step.attend(attention, q, k, v, scaling=attention.scaling)), None


def _refused(config: Any) -> str:
    return "cross-attention" if config.add_cross_attention else ""


ADAPTER = Adapter(_adapt, _refused, plan_of("layers.*.self_attn", QKV, "out_proj"))
