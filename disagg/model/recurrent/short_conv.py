"""Packed steps of transformers' short convolutions (LFM2, LFM3)."""

from __future__ import annotations

from typing import Any

import torch

from disagg.model.recurrent.step import PackedStates


def short_conv(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the module's output, `[T, hidden_size]`, for the hidden states `hidden` of the same shape."""
    b, c, x = module.in_proj(hidden).chunk(3, dim=-1)
    mixed = states.conv(module.layer_idx, b * x, module.conv.weight, module.conv.bias, silu=False)
    out: torch.Tensor = module.out_proj(c * mixed)
    return out
