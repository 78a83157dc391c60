"""Adapter of GPT-NeoX Japanese: one projection computes query, key and value of each head, which are adjacent. Only a
part of each head is rotated."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import apply_rotary_pos_emb

from disagg.model.adapters.base import Adapter, StepInputs, heads, plan_of


def _adapt(model: Any, step: StepInputs) -> None:
    for layer in model.base_model.layers:
        layer.attention.forward = partial(_forward, layer.attention, step)


def _forward(
    attention: Any,
    step: StepInputs,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    fused = heads(attention.query_key_value(hidden_states), 3 * attention.head_size)
    q, k, v = fused.chunk(3, dim=-1)
    (q, q_kept), (k, k_kept) = (x.tensor_split([attention.rotary_ndims], dim=-1) for x in (q, k))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
    out = step.attend(attention, torch.cat([q, q_kept], dim=-1), torch.cat([k, k_kept], dim=-1), v)
    return attention.dense(out), None, attention.dense_bias


ADAPTER = Adapter(_adapt, plan=plan_of("layers.*.mlp", ["dense_h_to_4h"], "dense_4h_to_h"))
