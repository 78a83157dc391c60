"""Adapter of GPT-J: pairs of adjacent elements are rotated, by a table of angles in each attention module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

from disagg.model.adapters.base import QKV, Adapter, StepInputs, plan_of, projected


def rotate(attention: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates the first `rotary_dim` elements of each head of `x` `[rows, tokens, heads, dim]`, in float32."""
    sin, cos = attention.embed_positions[positions].chunk(2, dim=-1)
    turned, kept = x.tensor_split([attention.rotary_dim], dim=-1)
    return torch.cat([apply_rotary_pos_emb(turned, sin, cos).to(x.dtype), kept], dim=-1)


def needs_rotary_dim(config: Any) -> str:
    """Returns the reason why a configuration is unsupported: transformers fails without rotary elements. Empty if
    supported."""
    return "" if config.rotary_dim else "rotary_dim = 0"


def _adapt(model: Any, step: StepInputs) -> None:
    for block in model.transformer.h:
        block.attn.forward = partial(_forward, block.attn, step)


def _forward(
    attention: Any, step: StepInputs, hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = projected(attention, hidden_states)
    q, k = (rotate(attention, x, step.positions) for x in (q, k))
    return attention.out_proj(step.attend(attention, q, k, v)), None


_PLAN = plan_of("h.*.attn", QKV, "out_proj") | plan_of("h.*.mlp", ["fc_in"], "fc_out")
ADAPTER = Adapter(_adapt, needs_rotary_dim, _PLAN)
