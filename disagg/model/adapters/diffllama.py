"""Adapter of DiffLlama: each head subtracts a second attention from a first one. Both use the values of two KV heads.

The cache stores, for each K head, the values of both KV heads as one V head. Values are thus written and read once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.models.diffllama.modeling_diffllama import apply_rotary_pos_emb

from disagg.model.adapters.base import Adapter, StepInputs, heads, plan_of, projected


def _adapt(model: Any, step: StepInputs) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = partial(_forward, layer.self_attn, step)


def _forward(
    attention: Any,
    step: StepInputs,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = projected(attention, hidden_states)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
    of_both = torch.cat([half.repeat(1, 1, 2, 1) for half in v.chunk(2, dim=2)], dim=-1)
    out = heads(step.attend(attention, q, k, of_both), 2 * attention.head_dim)
    first, second = out.chunk(2, dim=2)
    normed = attention.groupnorm(first - _factor(attention, q.dtype) * second)
    return attention.o_proj(((1 - attention.lambda_init) * normed).flatten(2)), None


def _factor(attention: Any, dtype: torch.dtype) -> Any:
    """Returns the scalar by which the second attention is multiplied before it is subtracted from the first one."""
    pairs = ((attention.lambda_q1, attention.lambda_k1), (attention.lambda_q2, attention.lambda_k2))
    first, second = (torch.exp(torch.sum(q * k, dtype=torch.float32)).to(dtype) for q, k in pairs)
    return first - second + attention.lambda_init


ADAPTER = Adapter(_adapt, plan=plan_of("layers.*.mlp", ["gate_proj", "up_proj"], "down_proj"))
