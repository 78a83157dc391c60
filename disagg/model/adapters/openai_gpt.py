"""Adapter of GPT (2018): one projection computes all queries, all keys, then all values. Positions are learned."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from disagg.model.adapters.base import Adapter, StepInputs


def _adapt(model: Any, step: StepInputs) -> None:
    for layer, block in enumerate(model.transformer.h):
        block.attn.layer_idx = layer
        block.attn.bias = None  # frees an unused mask, `[context, context]`
        block.attn.forward = partial(_forward, block.attn, step)


def _forward(attention: Any, step: StepInputs, x: torch.Tensor, **_: Any) -> list[torch.Tensor]:
    parts = attention.c_attn(x).chunk(3, dim=-1)
    q, k, v = (part.view(*part.shape[:2], attention.n_head, -1) for part in parts)
    return [attention.c_proj(step.attend(attention, q, k, v))]


ADAPTER = Adapter(_adapt)
