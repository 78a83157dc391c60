"""Adapter of MPT: one projection computes all queries, then all keys, then all values. Positions enter by ALiBi."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from disagg.model.adapters.base import Adapter, Constant, StepInputs, heads, plan_of

_COMPUTED = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
}
"""Settings of `attn_config` that transformers ignores, with the values that transformers' code always uses."""


def _adapt(model: Any, step: StepInputs) -> None:
    decoder = model.transformer
    decoder.forward = partial(_decode, decoder)
    slopes = -build_mpt_alibi_tensor(model.config.n_heads, 2)[:, 0, 0]
    for block in decoder.blocks:
        before_scaling = Constant(slopes / block.attn.softmax_scale)
        block.attn.forward = partial(_forward, block.attn, step, before_scaling)


def _decode(decoder: Any, input_ids: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
    """Replaces the decoder's `forward`. Does not build the biases and masks of the whole context, as the original
    does."""
    hidden = decoder.wte(input_ids)
    for block in decoder.blocks:
        hidden, _ = block(hidden, position_bias=None, attention_mask=None)
    return BaseModelOutputWithPast(last_hidden_state=decoder.norm_f(hidden))


def _forward(
    attention: Any, step: StepInputs, slopes: Constant, hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    fused = attention.Wqkv(hidden_states)
    if attention.clip_qkv:
        fused = fused.clamp(min=-attention.clip_qkv, max=attention.clip_qkv)
    q, k, v = (heads(x, attention.head_dim) for x in fused.chunk(3, dim=-1))
    out = step.attend(attention, q, k, v, scaling=attention.softmax_scale, alibi_slopes=slopes.on(q.device))
    return attention.out_proj(out), None


def _refused(config: Any) -> str:
    other = [name for name, value in _COMPUTED.items() if getattr(config.attn_config, name) != value]
    return f"attn_config.{other[0]} = {getattr(config.attn_config, other[0])}" if other else ""


ADAPTER = Adapter(_adapt, _refused, plan_of("blocks.*.ffn", ["up_proj"], "down_proj"))
