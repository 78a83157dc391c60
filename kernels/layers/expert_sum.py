"""The weighted sum of a token's experts, in one launch instead of torch's product, sum and conversion."""

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


def expert_sum(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Returns `sum over c of x[token * choices + c] * weights[token, c]`: `[tokens, columns]` of the type of `x`.

    - x: results of experts by pair, float32, bfloat16 or float16 `[tokens * choices, columns]`, contiguous.
    - weights: `[tokens, choices]` of the type of `x` or float32, contiguous.
    - chosen: numbers of experts, int64 or int32, `[tokens, choices]`, contiguous. Choices with a number of `experts`
      or more add nothing, and their rows of `x` are not read.

    Products are rounded to the type of `weights`, as in torch, and added in float32 in the order of choices. On CUDA:
    one launch on the current stream, no synchronization. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    _check(x, weights, chosen)
    if backend(x.device) != "triton":
        return expert_sum_reference(x, weights, chosen, experts)
    tokens, choices = weights.shape
    out = torch.empty(tokens, x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    with on_device(x):
        expert_sum_kernel[(tokens, triton.cdiv(x.shape[1], _BLOCK))](
            x,
            weights,
            chosen,
            out,
            x.shape[1],
            experts,
            CHOICES=choices,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # the same rounding as torch
        )
    return out


def expert_sum_reference(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: int
) -> torch.Tensor:
    """Computes `expert_sum` in plain torch, on any device."""
    _check(x, weights, chosen)
    products = x.view(*weights.shape, x.shape[1]) * weights.unsqueeze(-1)
    products = products.masked_fill((chosen >= experts).unsqueeze(-1), 0.0)
    total = torch.zeros(weights.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    for choice in range(weights.shape[1]):
        total += products[:, choice].float()
    return total.to(x.dtype)


def _check(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> None:
    if x.dim() != 2 or x.dtype not in DTYPES or not x.is_contiguous():
        raise ValueError(
            f"x must be float32, bfloat16 or float16 [pairs, columns], contiguous; got {describe(x)}"
        )
    fits = weights.dim() == 2 and weights.numel() == x.shape[0] and weights.is_contiguous()
    if not fits or weights.dtype not in (x.dtype, torch.float32) or weights.device != x.device:
        raise ValueError(
            f"weights must be contiguous {x.dtype} or float32 [tokens, choices] with {x.shape[0]} elements; got "
            f"{describe(weights)}"
        )
    if chosen.shape != weights.shape or chosen.is_floating_point() or not chosen.is_contiguous():
        raise ValueError(f"chosen must be integers {list(weights.shape)}, contiguous; got {describe(chosen)}")


@triton.jit  # type: ignore[untyped-decorator]
def expert_sum_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,
    weights,
    chosen,
    out,
    # sizes
    columns,
    experts,
    # meta
    CHOICES: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    BLOCK: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        weight, is_expert = tl.load(weights + pair), tl.load(chosen + pair) < experts
        found = tl.load(x + pair * columns + column, mask=mask & is_expert, other=0.0).to(tl.float32)
        product = (found * weight.to(tl.float32)).to(weight.dtype)
        total += product.to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=mask)
