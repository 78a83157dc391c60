"""The middle of a gated MLP, `silu(gate) * up`, in one launch instead of torch's two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.rms_norm import DTYPES

_BLOCK = 1024
_WARPS = 4


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns `silu(gate) * up`, a new tensor; silu is rounded to the type before the product, as in torch.

    `gate` and `up`: float32, bfloat16 or float16, of one shape, contiguous. On CUDA: one launch on the
    current stream, no synchronization. Raises ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    _check(gate, up)
    if backend(gate.device) != "triton":
        return silu_mul_reference(gate, up)
    out = torch.empty_like(gate)
    if out.numel():
        with on_device(gate):
            silu_mul_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
                gate,
                up,
                out,
                out.numel(),
                BLOCK=_BLOCK,
                num_warps=_WARPS,
                enable_fp_fusion=False,  # as torch computes it
            )
    return out


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` in plain torch, on any device."""
    _check(gate, up)
    return torch.nn.functional.silu(gate) * up


def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    for name, x in (("gate", gate), ("up", up)):
        alike = x.shape == gate.shape and x.dtype == gate.dtype and x.device == gate.device
        if not alike or x.dtype not in DTYPES or not x.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32, bfloat16 or float16, gate and up alike; got {describe(x)}"
            )


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(gate, up, out, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    # int64 before the product: a long prompt's rows have more than 2^31 elements.
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements  # mostly known to be a multiple of 16: otherwise accesses would be scalar
    found = tl.load(gate + element, mask=mask, other=0.0)
    wide = found.to(tl.float32)
    silu = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(found.dtype).to(tl.float32)
    factor = tl.load(up + element, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + element, (silu * factor).to(found.dtype), mask=mask)
