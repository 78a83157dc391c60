"""Adapter of CodeGen: GPT-J with a single projection, whose output has four parts.

Each part has the queries, values and keys of a quarter of the heads. Ranks share the parts, if they can.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from disagg.model.adapters.base import Adapter, StepInputs, plan_of
from disagg.model.adapters.gptj import needs_rotary_dim, rotate

_PARTS = 4


def _adapt(model: Any, step: StepInputs) -> None:
    for block in model.transformer.h:
        block.attn.forward = partial(_forward, block.attn, step)


def _forward(
    attention: Any, step: StepInputs, hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    each = attention.num_attention_heads // _PARTS  # a rank has some of the parts
    fused = attention.qkv_proj(hidden_states).unflatten(-1, (-1, 3, each, attention.head_dim))
    q, v, k = (x.flatten(2, 3) for x in fused.unbind(3))
    q, k = (rotate(attention, x, step.positions) for x in (q, k))
    return attention.out_proj(step.attend(attention, q, k, v)), None


def _refused(config: Any) -> str:
    if config.n_head % _PARTS:
        return f"{config.n_head} heads, not a multiple of {_PARTS}"
    return needs_rotary_dim(config)


ADAPTER = Adapter(_adapt, _refused, plan_of("h.*.mlp", ["fc_in"], "fc_out"))
