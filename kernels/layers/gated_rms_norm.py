"""The gated RMSNorm at the end of a recurrent layer, in one launch instead of torch's ten.

Mamba-2 layers apply the gate before the norm; layers of the gated delta rule apply the gate after the norm. All
operations are in float32.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.rms_norm import DTYPES, MAX_BLOCK
from kernels.overlap import overlap, wait_for_previous

GateOrder = Literal["gate_first", "gate_last"]
GATE_ORDERS: tuple[GateOrder, ...] = get_args(GateOrder)
"""Orders of gate and norm: `norm(x * silu(gate)) * weight` (Mamba-2), `norm(x) * weight * silu(gate)` (Qwen3-Next).
The normed row is rounded to the type of `x` before the product with the weight."""
_WARP_ELEMENTS = 512


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int, order: GateOrder
) -> torch.Tensor:
    """Returns the gated norm of `x`, over groups of `group` elements of the last dimension, as a new contiguous
    tensor.

    - x, gate: float32, bfloat16 or float16 `[rows, dim]` of one type, contiguous in the last dimension.
    - weight: `[dim]` of the same type, contiguous.
    - group: a divisor of `dim`, at most `MAX_BLOCK`.

    On CUDA: one launch on the current stream, no synchronization. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    _check(x, gate, weight, group, order)
    if backend(x.device) != "triton":
        return gated_rms_norm_reference(x, gate, weight, eps, group, order)
    rows, dim = x.shape
    out = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(group)
    if rows:
        with on_device(x):
            gated_norm_kernel[(rows, dim // group)](
                x,
                gate,
                weight,
                out,
                x.stride(0),
                gate.stride(0),
                dim,
                eps,
                GROUP=group,
                GATE_FIRST=order == "gate_first",
                BLOCK=block,
                num_warps=min(16, max(1, block // _WARP_ELEMENTS)),
                enable_fp_fusion=False,  # the same rounding as torch
                **overlap(x.device),
            )
    return out


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int, order: GateOrder
) -> torch.Tensor:
    """Computes `gated_rms_norm` in plain torch, on any device, with the operations of transformers' models."""
    _check(x, gate, weight, group, order)
    wide, factor = x.float(), torch.nn.functional.silu(gate.float())
    if order == "gate_first":
        wide = wide * factor
    grouped = wide.view(len(x), x.shape[1] // group, group)
    grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)
    normed = weight * grouped.view(x.shape).to(x.dtype)
    return normed if order == "gate_first" else (normed * factor).to(x.dtype)


def _check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, group: int, order: str) -> None:
    if order not in GATE_ORDERS:
        raise ValueError(f"order must be one of {', '.join(GATE_ORDERS)}; got {order!r}")
    for name, tensor in (("x", x), ("gate", gate)):
        alike = tensor.shape == x.shape and tensor.dtype == x.dtype and tensor.device == x.device
        if not alike or tensor.dim() != 2 or tensor.dtype not in DTYPES or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be float32, bfloat16 or float16 [rows, dim], contiguous in the last dimension, and x "
                f"and gate of one shape and type; got {describe(tensor)}"
            )
    if not 1 <= group <= MAX_BLOCK or x.shape[1] % group:
        raise ValueError(f"group must be a divisor of {x.shape[1]} of at most {MAX_BLOCK}; got {group}")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous {x.dtype} [{x.shape[1]}]; got {describe(weight)}")


@triton.jit  # type: ignore[untyped-decorator]
def gated_norm_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,
    gate,
    weight,
    out,
    # sizes
    x_stride,
    gate_stride,
    dim,
    eps,
    # meta
    GROUP: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    GATE_FIRST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    wait_for_previous(OVERLAP)
    # int64 before any product: a long prompt's rows have more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    mask = offset < GROUP
    element = tl.program_id(1) * GROUP + offset
    found = tl.load(x + row * x_stride + element, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + element, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + element, mask=mask, other=0.0)
    silu = tl.div_rn(gates, 1.0 + tl.exp(-gates))
    if GATE_FIRST:
        found *= silu
    scale = tl.rsqrt(tl.sum(found * found, 0) / GROUP + eps)
    normed = (found * scale).to(factor.dtype).to(tl.float32) * factor.to(tl.float32)
    if not GATE_FIRST:
        normed = normed.to(factor.dtype).to(tl.float32) * silu
    tl.store(out + row * dim + element, normed.to(out.dtype.element_ty), mask=mask)
