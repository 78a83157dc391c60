"""Adapter of BLOOM: one projection computes query, key and value of each head, which are adjacent. Positions enter by
ALiBi."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from disagg.model.adapters.base import Adapter, Constant, StepInputs, plan_of


def _adapt(model: Any, step: StepInputs) -> None:
    of_two_positions = build_alibi_tensor(torch.ones(1, 2), model.config.n_head, torch.float32)
    slopes = of_two_positions[:, 0, 1]
    for block in model.transformer.h:
        attention = block.self_attention
        before_scaling = Constant(slopes / attention.inv_norm_factor)
        attention.forward = partial(_forward, attention, step, before_scaling)


def _forward(
    attention: Any,
    step: StepInputs,
    slopes: Constant,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    fused = attention.query_key_value(hidden_states)
    q, k, v = fused.unflatten(-1, (attention.num_heads, 3, attention.head_dim)).unbind(-2)
    out = step.attend(attention, q, k, v, alibi_slopes=slopes.on(q.device))
    return attention.dense(out) + residual, None


def _refused(config: Any) -> str:
    # With these settings transformers omits biases.
    exact = config.slow_but_exact and config.pretraining_tp > 1
    return "slow_but_exact with pretraining_tp > 1" if exact else ""


ADAPTER = Adapter(_adapt, _refused, plan_of("h.*.mlp", ["dense_h_to_4h"], "dense_4h_to_h"))
