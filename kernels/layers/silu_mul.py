"""The gate of a gated MLP, `silu(gate) * up`, in one launch instead of torch's two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.rms_norm import DTYPES
from kernels.overlap import overlap, wait_for_previous

_BLOCK = 1024
_WARPS = 4


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns `silu(gate) * up` as a new contiguous tensor; silu is rounded to the type before the product, as in
    torch.

    `gate` and `up`: float32, bfloat16 or float16, of one shape; both contiguous, or `[.., columns]` with contiguous
    rows and one row stride, like the two halves of a merged projection. On CUDA: one launch on the current stream, no
    synchronization. Raises ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    _check(gate, up)
    if backend(gate.device) != "triton":
        return silu_mul_reference(gate, up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    if gate.is_contiguous() and up.is_contiguous():
        columns, gate_stride, up_stride = out.numel(), 0, 0
    else:
        columns, gate_stride, up_stride = gate.shape[-1], gate.stride(-2), up.stride(-2)
    blocks = triton.cdiv(columns, _BLOCK)
    with on_device(gate):
        silu_mul_kernel[(out.numel() // columns * blocks,)](
            gate,
            up,
            out,
            columns,
            blocks,
            gate_stride,
            up_stride,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # the same rounding as torch
            **overlap(gate.device),
        )
    return out


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes `silu_mul` in plain torch, on any device."""
    _check(gate, up)
    return torch.nn.functional.silu(gate) * up


def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    for name, x in (("gate", gate), ("up", up)):
        alike = x.shape == gate.shape and x.dtype == gate.dtype and x.device == gate.device
        if not alike or x.dtype not in DTYPES or not (x.is_contiguous() or _has_regular_rows(x)):
            raise ValueError(
                f"{name} must be float32, bfloat16 or float16, contiguous or with contiguous rows of one stride, "
                f"and gate and up of one shape and type; got {describe(x)}"
            )


def _has_regular_rows(x: torch.Tensor) -> bool:
    if x.dim() < 2 or x.stride(-1) != 1:
        return False
    sizes, strides = x.shape[:-1], x.stride()[:-1]
    after = zip(sizes[1:], strides[1:], strict=True)
    return all(stride == size * inner for stride, (size, inner) in zip(strides[:-1], after, strict=True))


@triton.jit(do_not_specialize=["blocks"])  # type: ignore[untyped-decorator]
def silu_mul_kernel(  # type: ignore[no-untyped-def]
    # tensors
    gate,
    up,
    out,
    # sizes
    columns,
    blocks,
    gate_stride,
    up_stride,
    # meta
    BLOCK: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    OVERLAP: tl.constexpr,  # noqa: N803
):
    wait_for_previous(OVERLAP)
    # int64 before any product: a long prompt's rows have more than 2^31 elements.
    row, block = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    element = block * BLOCK + tl.arange(0, BLOCK)
    mask = element < columns  # vector accesses if Triton knows that 16 divides `columns`
    found = tl.load(gate + row * gate_stride + element, mask=mask, other=0.0)
    factor = tl.load(up + row * up_stride + element, mask=mask, other=0.0)
    tl.store(out + row * columns + element, gated(found, factor), mask=mask)


@triton.jit
def gated(gate, up):  # type: ignore[no-untyped-def]
    """Returns `silu(gate) * up` in the type of `gate`; silu is rounded before the product."""
    wide = gate.to(tl.float32)
    silu = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(gate.dtype)
