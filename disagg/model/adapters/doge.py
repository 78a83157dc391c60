"""Adapter of Doge: adds a score to the attention scores of each key, computed from the values at the key's position.

The KV cache stores the score as one more element of the key; the matching query element is `1 / scaling`.
Beyond `keep_window_size` tokens, the model drops keys in a way that depends on all other keys. The context is
therefore limited to this size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad, softplus
from transformers.models.doge.modeling_doge import apply_rotary_pos_emb

from disagg.model.adapters.base import Adapter, StepInputs, plan_of, projected
from disagg.model.spec.shapes import DOGE_ELEMENTS


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
    q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
    scores = torch.exp(attention.A * softplus(attention.dt_proj(v.flatten(2))))  # [rows, tokens, KV heads]
    k = pad(torch.cat([k, scores[..., None]], dim=-1), (0, DOGE_ELEMENTS - 1))
    q = pad(q, (0, 1), value=1 / attention.scaling)
    q = pad(q, (0, DOGE_ELEMENTS - 1))
    window = attention.config.sliding_window
    out = step.attend(attention, q, k, v, scaling=attention.scaling, sliding_window=window)
    return attention.o_proj(out), None


def _refused(config: Any) -> str:
    # In transformers, the routing of a token depends on the other tokens of the call.
    return "experts whose routing mixes tokens (is_moe)" if config.is_moe else ""


ADAPTER = Adapter(_adapt, _refused, plan_of("layers.*.mlp", ["gate_proj", "up_proj"], "down_proj"))
