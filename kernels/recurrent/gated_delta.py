"""The gated delta rule over the tokens of packed sequences (Qwen3-Next, OLMo Hybrid), also with a separate decay for
each key element (Kimi Linear).

A head has a state `[key_dim, value_dim]`. For each token, the state first decays. The value that the state returns
for the token's key then moves by the fraction `beta` toward the token's value. The output is the product of query and
state. Queries and keys are normalized to length 1; queries are then divided by `sqrt(key_dim)`.

A program computes a block of value elements of one head of one sequence, token by token, with the state in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.dispatch import Backend
from kernels.recurrent.slices import PackedSlices, require_shapes, uses_triton

_CHUNK_TOKENS = {2: 64, 3: 16}
"""Tokens of a chunk, by the number of dimensions of the decay. A decay for each key element needs more memory per
pair of tokens."""
_TILE_ELEMENTS = 4096
_EPSILON = tl.constexpr(1e-6)


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slices: PackedSlices,
    out: torch.Tensor,
    *,
    how: Backend = "torch",
) -> None:
    """Writes the outputs of the tokens in `slices` to `out`, and each sequence's new state to its slot.

    - q, k: float `[tokens, key_heads, key_dim]`, not yet normalized.
    - v, out: float `[tokens, heads, value_dim]`; consecutive heads share a key head. Other tokens of `out` keep their
      values.
    - decay: float `[tokens, heads]` or `[tokens, heads, key_dim]`, the logarithm of the state's factor, at most 0.
    - beta: float `[tokens, heads]`.
    - state: `[slots, heads, key_dim, value_dim]`, contiguous within a slot.

    The last dimension of all tensors is contiguous, other strides are free. The computation is in float32; the state
    is rounded to its type after the last token of a slice. On CUDA, `how="triton"` is one launch on the current
    stream, without synchronization. Raises ValueError (arguments) and ConfigError (Triton is not available).
    """
    _require(q, k, v, decay, beta, state, out)
    if not uses_triton(how, q.device):
        gated_delta_reference(q, k, v, decay, beta, state, slices, out)
        return
    if len(slices) and slices.most:
        _launch(q, k, v, decay, beta, state, slices, out)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slices: PackedSlices,
    out: torch.Tensor,
) -> None:
    _, heads, value_dim = v.shape
    keys = triton.next_power_of_2(q.shape[2])
    block = min(triton.next_power_of_2(value_dim), max(1, _TILE_ELEMENTS // keys))
    with on_device(q):
        gated_delta_kernel[(len(slices), heads, triton.cdiv(value_dim, block))](
            q,
            k,
            v,
            decay,
            beta,
            state,
            slices.slots,
            slices.firsts,
            slices.counts,
            slices.begun,
            out,
            value_dim,
            heads // q.shape[1],
            q.shape[2] ** -0.5,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *decay.stride()[:2],
            *beta.stride(),
            *out.stride()[:2],
            state.stride(0),
            KEY_DIM=q.shape[2],
            PER_ELEMENT=decay.dim() == 3,
            BLOCK_KEYS=keys,
            BLOCK_VALUES=block,
            num_warps=4,
        )


def _require(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[1:]
    if heads % key_heads:
        raise ValueError(f"q must have a divisor of {heads} heads; got {key_heads}")
    require_shapes(
        q=(q, (tokens, key_heads, key_dim)),
        k=(k, (tokens, key_heads, key_dim)),
        v=(v, (tokens, heads, value_dim)),
        out=(out, (tokens, heads, value_dim)),
        state=(state, (state.shape[0], heads, key_dim, value_dim)),
    )
    if decay.dim() == 3:
        require_shapes(decay=(decay, (tokens, heads, key_dim)))
    elif tuple(decay.shape) != (tokens, heads):
        raise ValueError(
            f"decay must be {[tokens, heads]}, or have a third dimension of {key_dim}; got {list(decay.shape)}"
        )
    if tuple(beta.shape) != (tokens, heads):
        raise ValueError(f"beta must be {[tokens, heads]}; got {list(beta.shape)}")
    if state.stride()[1:] != (key_dim * value_dim, value_dim, 1):
        raise ValueError(f"state must be contiguous within a slot; got strides {list(state.stride())}")


def gated_delta_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slices: PackedSlices,
    out: torch.Tensor,
) -> None:
    """Computes `gated_delta` in plain torch, on any device.

    If each slice has one token (`slices.host` is None), all sequences run together. Otherwise sequences run one by
    one, in chunks (Yang et al., 2024).
    """
    if slices.host is None:
        taken = _of_heads([one.index_select(0, slices.firsts) for one in (q, k, v, decay, beta)])
        found, new = _one_token(taken, state.index_select(0, slices.slots).float())
        state.index_copy_(0, slices.slots, new.to(state.dtype))
        out.index_copy_(0, slices.firsts, found.to(out.dtype))
        return
    for slot, first, count, begun in slices.host:
        if not count:
            continue
        held = state[slot].float() if begun else torch.zeros_like(state[slot], dtype=torch.float32)
        own = _of_heads([one[first : first + count] for one in (q, k, v, decay, beta)])
        size = _CHUNK_TOKENS[decay.dim()]
        for start in range(0, count, size):
            found, held = _one_chunk([one[start : start + size].transpose(0, 1) for one in own], held)
            span = slice(first + start, first + start + found.shape[1])
            out[span] = found.transpose(0, 1).to(out.dtype)
        state[slot] = held.to(state.dtype)


def _of_heads(tokens: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns q, k, v, decay and beta in float32, with q and k normalized and repeated for each head.

    `tokens`: q, k, v, decay and beta. The returned decay and beta have as many dimensions as q.
    """
    q, k, v, decay, beta = (one.float() for one in tokens)
    q, k = (
        (x * (x.square().sum(-1, keepdim=True) + _EPSILON.value).rsqrt()).repeat_interleave(
            v.shape[1] // x.shape[1], dim=1
        )
        for x in (q, k)
    )
    return q * q.shape[2] ** -0.5, k, v, decay if decay.dim() == 3 else decay[..., None], beta[..., None]


def _one_token(tokens: Sequence[torch.Tensor], held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one token for each of `n` sequences from their states `held`, `[n, heads, key_dim, value_dim]`.

    Returns the outputs `[n, heads, value_dim]` and the new states.
    """
    q, k, v, decay, beta = tokens
    held = held * decay.exp()[..., None]
    change = (v - (k[:, :, None] @ held)[:, :, 0]) * beta
    held = held + k[..., None] * change[:, :, None]
    return (q[:, :, None] @ held)[:, :, 0], held


def _one_chunk(tokens: Sequence[torch.Tensor], held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a chunk `[heads, tokens, ...]` of one sequence from the state `held`, `[heads, key_dim, value_dim]`.

    Returns the outputs `[heads, tokens, value_dim]` and the new state.
    """
    q, k, v, decay, beta = tokens
    levels = decay.double().cumsum(1)  # [heads, tokens, 1 or key_dim]; double for precise differences

    def products(x: torch.Tensor) -> torch.Tensor:
        """Returns the products of each token's x with the keys up to that token, with the decay between the two
        tokens."""
        pairs = (levels[:, :, None] - levels[:, None]).float()
        earlier = torch.ones(pairs.shape[1:3], dtype=torch.bool, device=x.device).tril()
        pairs = pairs.masked_fill(~earlier[..., None], -torch.inf).exp()
        return (
            x @ k.mT * pairs[..., 0]
            if pairs.shape[3] == 1
            else torch.einsum("hik,hjk,hijk->hij", x, k, pairs)
        )

    since_start = levels.float().exp()
    wanted = (v - (k * since_start) @ held) * beta
    changes = torch.linalg.solve_triangular(products(k * beta), wanted, upper=False, unitriangular=True)
    found = (q * since_start) @ held + products(q) @ changes
    to_end = (levels[:, -1:] - levels).float().exp()
    return found, held * since_start[:, -1, :, None] + (k * to_end).mT @ changes


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["value_dim", "heads_per_key"]
)
def gated_delta_kernel(  # type: ignore[no-untyped-def]
    # tensors
    q,
    k,
    v,
    decay,
    beta,
    state,
    slots,
    firsts,
    counts,
    begun,
    out,
    # sizes
    value_dim,
    heads_per_key,
    scaling,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    decay_token_stride,
    decay_head_stride,
    beta_token_stride,
    beta_head_stride,
    out_token_stride,
    out_head_stride,
    state_slot_stride,
    # meta
    KEY_DIM: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    PER_ELEMENT: tl.constexpr,  # noqa: N803
    BLOCK_KEYS: tl.constexpr,  # noqa: N803
    BLOCK_VALUES: tl.constexpr,  # noqa: N803
):
    index, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(counts + index)
    value = tl.program_id(2) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    element = tl.arange(0, BLOCK_KEYS)
    inside, within = value < value_dim, element < KEY_DIM
    first = tl.load(firsts + index).to(tl.int64)  # int64 before any product
    key_head = head // heads_per_key
    q += first * q_token_stride + key_head * q_head_stride + element
    k += first * k_token_stride + key_head * k_head_stride + element
    v += first * v_token_stride + head * v_head_stride + value
    out += first * out_token_stride + head * out_head_stride + value
    decay += first * decay_token_stride + head * decay_head_stride
    beta += first * beta_token_stride + head * beta_head_stride
    both = within[:, None] & inside[None, :]
    state += tl.load(slots + index).to(tl.int64) * state_slot_stride
    state += (head * KEY_DIM + element)[:, None] * value_dim + value[None, :]
    held = tl.load(state, mask=both & (tl.load(begun + index) != 0), other=0.0).to(tl.float32)
    for token in range(count):
        query = tl.load(q + token * q_token_stride, mask=within, other=0.0).to(tl.float32)
        key = tl.load(k + token * k_token_stride, mask=within, other=0.0).to(tl.float32)
        query *= scaling / tl.sqrt(tl.sum(query * query, axis=0) + _EPSILON)
        key *= 1.0 / tl.sqrt(tl.sum(key * key, axis=0) + _EPSILON)
        wanted = tl.load(v + token * v_token_stride, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(beta + token * beta_token_stride).to(tl.float32)
        if PER_ELEMENT:
            level = tl.load(decay + token * decay_token_stride + element, mask=within, other=0.0)
            held *= tl.exp(level.to(tl.float32))[:, None]
        else:
            held *= tl.exp(tl.load(decay + token * decay_token_stride).to(tl.float32))
        change = (wanted - tl.sum(held * key[:, None], axis=0)) * share
        held += key[:, None] * change[None, :]
        found = tl.sum(held * query[:, None], axis=0)
        tl.store(out + token * out_token_stride, found.to(out.dtype.element_ty), mask=inside)
    tl.store(state, held.to(state.dtype.element_ty), mask=both & (count > 0))
