"""Rotary embeddings (Su et al., 2021) of queries and keys in one launch instead of torch's ten.

The two halves of a head are rotated, as in Llama and GPT-NeoX. Results equal torch's `x * cos + rotate_half(x) * sin`
bit for bit, because products and their sum are rounded to the type of cos and sin, as in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.layers.rms_norm import DTYPES
from kernels.overlap import overlap, wait_for_previous

_TILE_ELEMENTS = 1024
_WARP_ELEMENTS = 512


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `q` and `k` rotated, as new tensors with the same layout.

    - q, k: float32, bfloat16 or float16 `[batch, heads, tokens, dim]`, heads contiguous, other strides free. Only the
      numbers of heads may differ.
    - cos, sin: both of the type of q or both float32, `[batch or 1, tokens, rotary_dim]`, contiguous in the last
      dimension; an even rotary_dim of at most dim. Elements beyond rotary_dim are copied unchanged.

    On CUDA: one launch on the current stream, no synchronization. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    why = misfit(q, k, cos, sin)
    if why:
        raise ValueError(why)
    if backend(q.device) != "triton":
        return rotary_reference(q, k, cos, sin)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, q_heads, tokens, dim = q.shape
    if batch * tokens == 0:
        return q_out, k_out
    half, rest = cos.shape[2] // 2, dim - cos.shape[2]
    block = triton.next_power_of_2(max(half, rest))
    block_heads = min(max(1, _TILE_ELEMENTS // (2 * block)), triton.next_power_of_2(max(q_heads, k.shape[1])))
    q_blocks, k_blocks = triton.cdiv(q_heads, block_heads), triton.cdiv(k.shape[1], block_heads)
    repeat = 0 if cos.shape[0] == 1 else 1  # stride 0: one table for the whole batch
    with on_device(q):
        rotary_kernel[(batch * tokens, q_blocks + k_blocks)](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            tokens,
            q_heads,
            k.shape[1],
            q_blocks,
            *q.stride()[:3],
            *k.stride()[:3],
            *q_out.stride()[:3],
            *k_out.stride()[:3],
            cos.stride(0) * repeat,
            cos.stride(1),
            sin.stride(0) * repeat,
            sin.stride(1),
            HALF=half,
            REST=rest,
            BLOCK_HEADS=block_heads,
            BLOCK=block,
            num_warps=min(8, max(1, 2 * block * block_heads // _WARP_ELEMENTS)),
            enable_fp_fusion=False,  # products are rounded before they are added
            **overlap(q.device),
        )
    return q_out, k_out


def rotary_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `rotary` in plain torch, on any device."""
    why = misfit(q, k, cos, sin)
    if why:
        raise ValueError(why)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, rest = x[..., : cos.shape[2]], x[..., cos.shape[2] :]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[3] else turned


def misfit(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str:
    """Returns the reason why `rotary` does not support these tensors; empty if `rotary` supports them."""
    for name, x in (("q", q), ("k", k)):
        alike = x.dim() == 4 and q.dim() == 4 and x.shape[::2] == q.shape[::2] and x.shape[3] == q.shape[3]
        if not alike or x.dtype != q.dtype or x.dtype not in DTYPES or x.stride(3) != 1:
            return (
                f"{name} must be float32, bfloat16 or float16 [batch, heads, tokens, dim], heads contiguous, "
                f"q and k equal but for the number of heads; got {describe(x)}"
            )
    for name, x in (("cos", cos), ("sin", sin)):
        fits = x.dim() == 3 and x.shape[0] in (1, q.shape[0]) and x.shape[1] == q.shape[2]
        if not fits or x.shape != cos.shape or x.stride(2) != 1 or x.dtype != cos.dtype:
            return (
                f"{name} must be {cos.dtype} [{q.shape[0]} or 1, {q.shape[2]}, rotary_dim], contiguous in the last "
                f"dimension; got {describe(x)}"
            )
    if cos.dtype not in (q.dtype, torch.float32):
        return f"cos and sin must be {q.dtype} or float32; got {cos.dtype}"
    if cos.shape[2] % 2 or not 0 < cos.shape[2] <= q.shape[3]:
        return f"rotary_dim must be even and 2 to {q.shape[3]}; got {cos.shape[2]}"
    if {x.device for x in (k, cos, sin)} != {q.device}:
        return (
            f"q, k, cos and sin must be on one device; got {q.device}, {k.device}, {cos.device}, {sin.device}"
        )
    return ""


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "q_heads", "k_heads", "q_blocks"]
)
def rotary_kernel(  # type: ignore[no-untyped-def]
    # tensors
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    # sizes
    tokens,
    q_heads,
    k_heads,
    q_blocks,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    q_out_batch_stride,
    q_out_head_stride,
    q_out_token_stride,
    k_out_batch_stride,
    k_out_head_stride,
    k_out_token_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    # meta
    HALF: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    REST: tl.constexpr,  # noqa: N803
    BLOCK_HEADS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    wait_for_previous(OVERLAP)
    # int64 before any product: a long prompt's queries have more than 2^31 elements.
    batch, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    cos += batch * cos_batch_stride + token * cos_token_stride
    sin += batch * sin_batch_stride + token * sin_token_stride
    block = tl.program_id(1)
    if block < q_blocks:
        _rotate_heads(
            q + batch * q_batch_stride + token * q_token_stride,
            q_out + batch * q_out_batch_stride + token * q_out_token_stride,
            cos,
            sin,
            block * BLOCK_HEADS,
            q_heads,
            q_head_stride,
            q_out_head_stride,
            HALF,
            REST,
            BLOCK_HEADS,
            BLOCK,
        )
    else:
        _rotate_heads(
            k + batch * k_batch_stride + token * k_token_stride,
            k_out + batch * k_out_batch_stride + token * k_out_token_stride,
            cos,
            sin,
            (block - q_blocks) * BLOCK_HEADS,
            k_heads,
            k_head_stride,
            k_out_head_stride,
            HALF,
            REST,
            BLOCK_HEADS,
            BLOCK,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(  # type: ignore[no-untyped-def]
    source,  # addresses of the token's head 0, and of its cos and sin
    target,
    cos,
    sin,
    first,
    heads,
    stride,
    target_stride,
    HALF: tl.constexpr,  # noqa: N803
    REST: tl.constexpr,  # noqa: N803
    BLOCK_HEADS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    head = first + tl.arange(0, BLOCK_HEADS)
    inside = (head < heads)[:, None]
    head = head.to(tl.int64)[:, None]
    element = tl.arange(0, BLOCK)[None, :]
    source += head * stride + element
    target += head * target_stride + element
    own = element < HALF
    mask = inside & own
    low = tl.load(source, mask=mask, other=0.0)
    high = tl.load(source + HALF, mask=mask, other=0.0)
    low_cos = tl.load(cos + element, mask=own, other=0.0)
    high_cos = tl.load(cos + HALF + element, mask=own, other=0.0)
    low_sin = tl.load(sin + element, mask=own, other=0.0)
    high_sin = tl.load(sin + HALF + element, mask=own, other=0.0)
    new_low = _product(low, low_cos) - _product(high, low_sin)
    new_high = _product(high, high_cos) + _product(low, high_sin)
    tl.store(target, new_low.to(low.dtype), mask=mask)
    tl.store(target + HALF, new_high.to(low.dtype), mask=mask)
    if REST > 0:
        mask = inside & (element < REST)
        tl.store(target + 2 * HALF, tl.load(source + 2 * HALF, mask=mask, other=0.0), mask=mask)


@triton.jit
def _product(x, y):  # type: ignore[no-untyped-def]
    """Returns the product in float32, rounded to the type of `y`, which is the wider type, like torch."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(y.dtype).to(tl.float32)
