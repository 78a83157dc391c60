"""Where K and V of one layer lie in a pool, and in which type.

Quantized K and V are *codes* of 8 bits (int8, or fp8 as uint8), each head of each token with a scale of its own:
what a code stands for is the code times the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

FP8: dict[torch.dtype, Any] = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
"""Triton's types."""
QUANTIZED = (torch.int8, *FP8)
"""Types that are stored as codes with scales."""


def code_limit(dtype: torch.dtype) -> float:
    """The largest code; its negative is one too."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer in a pool."""

    k: torch.Tensor
    """`[slots, kv_heads, head_dim]`, the last axis contiguous; float, or codes (uint8 for fp8, int8)."""
    v: torch.Tensor
    """As `k`, with the same strides."""
    dtype: torch.dtype
    """What an element of K and V means: for codes, the type that they encode in."""
    k_scales: torch.Tensor | None = None
    """bfloat16 `[slots, kv_heads]`: K is codes times this. None where K and V are no codes."""
    v_scales: torch.Tensor | None = None
    """As `k_scales`, with the same strides."""

    @property
    def fp8(self) -> Any:
        """Triton's type of the codes; None when they are integers, or when there are none."""
        return FP8.get(self.dtype)

    def strides(self) -> dict[str, int]:
        """Distances of slots and heads, as the kernels' constants. They are no argument, so that the compiler knows
        how rows are aligned."""
        slot, head = self.k.stride()[:2]
        scale_slot, scale_head = self.k_scales.stride() if self.k_scales is not None else (0, 0)
        return {
            "SLOT_STRIDE": slot,
            "HEAD_STRIDE": head,
            "SCALE_SLOT_STRIDE": scale_slot,
            "SCALE_HEAD_STRIDE": scale_head,
        }

    def check(self) -> None:
        """Raises ValueError for tensors that the kernels cannot read."""
        same = self.k.shape == self.v.shape and self.k.stride() == self.v.stride()
        if self.k.dim() != 3 or not same or self.k.stride(2) != 1 or self.k.dtype != self.v.dtype:
            raise ValueError(
                f"k and v must be [slots, kv_heads, head_dim] alike, heads contiguous; got {told(self.k)} and "
                f"{told(self.v)}"
            )
        for name, scales in (("k_scales", self.k_scales), ("v_scales", self.v_scales)):
            coded = self.k.element_size() == 1
            if coded != (scales is not None):
                raise ValueError(f"{name} must be given with codes of 8 bits, and only then")
            if scales is not None and (scales.dtype != torch.bfloat16 or scales.shape != self.k.shape[:2]):
                raise ValueError(
                    f"{name} must be bfloat16 {list(self.k.shape[:2])} [slots, kv_heads]; got {told(scales)}"
                )


def layer_of_codes(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> LayerKV:
    """Views of uint8 `[slots, kv_heads, 2 * (head_dim + 2)]`: codes of K, codes of V, scale of K, scale of V."""
    codes = rows.view(torch.int8) if dtype == torch.int8 else rows
    k, v = codes[..., :head_dim], codes[..., head_dim : 2 * head_dim]
    scales = rows.view(torch.bfloat16)
    return LayerKV(k, v, dtype, scales[..., -2], scales[..., -1])


def told(tensor: torch.Tensor) -> str:
    """What an error says of a tensor."""
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
