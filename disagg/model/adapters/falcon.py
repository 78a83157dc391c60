"""Adapter of Falcon: one projection with three possible orders of heads; rotary embeddings, or ALiBi in bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, build_alibi_tensor

from disagg.model.adapters.base import Adapter, Constant, StepInputs, heads, plan_of

_MLP = ("dense_h_to_4h", "dense_4h_to_h")
_ATTENTION = ("query_key_value", "dense")


def _adapt(model: Any, step: StepInputs) -> None:
    slopes = None
    if model.config.alibi:
        of_two_positions = build_alibi_tensor(
            torch.ones(1, 2, dtype=torch.long), model.config.num_attention_heads, torch.float32
        )
        slopes = Constant(of_two_positions[:, 0, 1])
    for block in model.transformer.h:
        attention = block.self_attention
        for owner, names in ((block.mlp, _MLP), (attention, _ATTENTION)):
            for name in names:
                setattr(owner, name, _plain(getattr(owner, name)))
        attention.forward = partial(_forward, attention, step, slopes)


def _plain(linear: Any) -> nn.Linear:
    """Returns an `nn.Linear` of equal shape, to replace a layer of Falcon's own class, which cannot be split."""
    return nn.Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        device="meta",
        dtype=linear.weight.dtype,
    )


def _forward(
    attention: Any,
    step: StepInputs,
    slopes: Constant | None,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = _split(attention, attention.query_key_value(hidden_states))
    if slopes is None:
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        out = step.attend(attention, q, k, v)
    else:
        out = step.attend(attention, q, k, v, alibi_slopes=slopes.on(q.device), alibi_dtype=torch.bfloat16)
    return attention.dense(out), None


def _split(attention: Any, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits the projection's output into queries, keys and values, each `[rows, tokens, heads, dim]`."""
    if attention.new_decoder_architecture:  # per KV head: its queries, key and value
        group = attention.num_heads // attention.num_kv_heads
        in_groups = fused.view(*fused.shape[:2], -1, group + 2, attention.head_dim)
        q, k, v = (x.flatten(2, 3) for x in torch.split(in_groups, [group, 1, 1], dim=-2))
    elif attention.multi_query:  # all queries, then the shared key and value
        q, k, v = torch.split(heads(fused, attention.head_dim), [attention.num_heads, 1, 1], dim=-2)
    else:
        q, k, v = fused.view(*fused.shape[:2], -1, 3, attention.head_dim).unbind(-2)
    return q, k, v


ADAPTER = Adapter(_adapt, plan=plan_of("h.*.mlp", _MLP[:1], _MLP[1]))
