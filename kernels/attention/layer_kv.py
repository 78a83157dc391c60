"""Layout and type of one layer's K and V in a pool.

Quantized K and V have 8 bits (int8, or fp8 as uint8) and one scale for each head of each token. The represented value
is the quantized value times the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

FP8: dict[torch.dtype, Any] = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
"""Triton's type for each fp8 type of torch."""
QUANTIZED = (torch.int8, *FP8)
"""Types stored as quantized values with scales."""


def quantized_limit(dtype: torch.dtype) -> float:
    """Returns the largest quantized value; its negative is the smallest."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer in a pool."""

    k: torch.Tensor
    """K, `[slots, kv_heads, head_dim]`, the last axis contiguous; float, or quantized (uint8 for fp8, int8)."""
    v: torch.Tensor
    """V in the layout of `k`, with the same strides."""
    dtype: torch.dtype
    """Type of K and V; for quantized values, the 8-bit type."""
    k_scales: torch.Tensor | None = None
    """bfloat16 `[slots, kv_heads]`: factors of the quantized K. None if K and V are not quantized."""
    v_scales: torch.Tensor | None = None
    """Factors of the quantized V, in the layout of `k_scales`, with the same strides."""

    @property
    def fp8(self) -> Any:
        """Triton's type of fp8 values; None for int8 and for unquantized KV."""
        return FP8.get(self.dtype)

    def strides(self) -> dict[str, int]:
        """Returns the strides of slots and heads, in elements, as constexpr arguments of the kernels.

        From constant strides, the compiler can infer the alignment of rows.
        """
        slot, head = self.k.stride()[:2]
        scale_slot, scale_head = self.k_scales.stride() if self.k_scales is not None else (0, 0)
        return {
            "SLOT_STRIDE": slot,
            "HEAD_STRIDE": head,
            "SCALE_SLOT_STRIDE": scale_slot,
            "SCALE_HEAD_STRIDE": scale_head,
        }

    def check(self) -> None:
        """Raises ValueError for tensors whose shapes, strides or types the kernels do not support."""
        same = self.k.shape == self.v.shape and self.k.stride() == self.v.stride()
        if self.k.dim() != 3 or not same or self.k.stride(2) != 1 or self.k.dtype != self.v.dtype:
            raise ValueError(
                "k and v must be [slots, kv_heads, head_dim] with equal shapes and strides, heads contiguous; "
                f"got {describe(self.k)} and {describe(self.v)}"
            )
        for name, scales in (("k_scales", self.k_scales), ("v_scales", self.v_scales)):
            coded = self.k.element_size() == 1
            if coded != (scales is not None):
                raise ValueError(f"{name} must be given for 8-bit quantized values, and only for them")
            if scales is not None and (scales.dtype != torch.bfloat16 or scales.shape != self.k.shape[:2]):
                raise ValueError(
                    f"{name} must be bfloat16 {list(self.k.shape[:2])} [slots, kv_heads]; got {describe(scales)}"
                )


def quantized_layer(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> LayerKV:
    """Returns the K, V and scales of a quantized layer as views of `rows`.

    `rows`: uint8 `[slots, kv_heads, 2 * (head_dim + 2)]`; a row has quantized K, quantized V, scale of K, scale of V.
    """
    quantized = rows.view(torch.int8) if dtype == torch.int8 else rows
    k, v = quantized[..., :head_dim], quantized[..., head_dim : 2 * head_dim]
    scales = rows.view(torch.bfloat16)
    return LayerKV(k, v, dtype, scales[..., -2], scales[..., -1])


def describe(tensor: torch.Tensor) -> str:
    """Returns a tensor's type, shape and strides, for error messages."""
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
