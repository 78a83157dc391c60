"""The inner loop of the attention kernels: an online softmax over the context, one block of tokens at a time.

The attention kernels differ in which tokens a query row sees. They share the arithmetic of this file, which gives a
row the same bits in every kernel and for every tile size. On a tensor core, the bits of a product depend only on the
order of the summed dimension, not on the tile or the instruction (`tests/kernels/layers/test_same_bits.py`). The
softmax weights are therefore summed by a product with a matrix of ones. The order of a reduction over threads would
depend on the tile's layout.

Where a compiler could fuse a multiplication and an addition, the code fuses them explicitly (`tl.fma`). A block in
which a row sees no token leaves the row's state unchanged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.common import LOG2_E, base2_parts, dot, halves, load_rows, load_scales, log2_of

TOTAL_COLUMNS = tl.constexpr(16)
"""Columns of `total`, all equal. 16 is the smallest size that `tl.dot` accepts."""


@triton.jit  # type: ignore[untyped-decorator]
def empty_state(ROWS: tl.constexpr, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Returns the softmax state before the first block: `largest`, `total` and `values_sum` as in `add_block`."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, TOTAL_COLUMNS], tl.float32)
    return largest, total, tl.zeros([ROWS, BLOCK_V], tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def add_block(  # type: ignore[no-untyped-def]
    # the state after the previous blocks
    largest,  # float32 [rows], largest score in units of log 2
    total,  # float32 [rows, TOTAL_COLUMNS], sum of the weights
    values_sum,  # float32 [rows, BLOCK_V]
    queries,  # [rows, BLOCK_K]; float16 for quantized KV with a 16-bit model
    # K and V of one KV head of the layer
    k,
    v,
    k_scales,
    v_scales,
    row_table,  # address of the sequence's row in the block table
    token,  # int32 [tokens], positions in the sequence
    last,  # end (exclusive) of the tokens that may be read
    visible,  # bool [rows or 1, tokens]; None: all rows see all tokens
    scaling,
    softcap,
    ALL_SEE: tl.constexpr,  # noqa: N803 - each row sees a token of this or an earlier block
    K_DIM: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    SLOT_STRIDE: tl.constexpr,  # noqa: N803
    SCALE_SLOT_STRIDE: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """Adds one block of tokens to the softmax state; returns the new `largest`, `total` and `values_sum`."""
    # Positions beyond the end load the last token again, and no row sees them. int64 before any product: a pool is
    # far larger than 2^31 elements.
    slot = tl.load(row_table + tl.minimum(token, last - 1)).to(tl.int64)
    keys = load_rows(k, slot, K_DIM, SLOT_STRIDE, FP8, BLOCK_K)
    values = load_rows(v, slot, V_DIM, SLOT_STRIDE, FP8, BLOCK_V)
    if k_scales is not None:
        # Load the scales together with the quantized values: a later load would stall the kernel a second time, after
        # the barriers of the first product.
        k_scale = load_scales(k_scales, slot, SCALE_SLOT_STRIDE)
        v_scale = load_scales(v_scales, slot, SCALE_SLOT_STRIDE)
        if queries.dtype == tl.float16:
            keys, values = halves(keys), halves(values)
    nothing = tl.zeros([queries.shape[0], token.shape[0]], tl.float32)
    products = dot(queries, tl.trans(keys.to(queries.dtype)), nothing)
    if k_scales is not None:
        products *= k_scale[None, :]
    raw, factor = base2_parts(products, scaling, softcap)
    if v_scales is None:
        scores = raw * factor
    else:
        v_level = log2_of(v_scale, queries.dtype == tl.float32)
        scores = tl.fma(raw, nothing + factor, nothing + v_level[None, :])
    seen = scores
    if visible is not None:
        seen = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(seen, 1))
    level = new_largest
    if not ALL_SEE:  # for rows that have seen no token yet
        level = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    if v_scales is None:
        weights = tl.exp2(tl.fma(raw, nothing + factor, nothing - level[:, None]))
    else:
        weights = tl.exp2(scores - level[:, None])
    if visible is not None:
        weights = tl.where(visible, weights, 0.0)
    shrink = tl.exp2(largest - level)[:, None]
    rounded = weights.to(queries.dtype)
    total *= shrink
    ones = tl.full([token.shape[0], TOTAL_COLUMNS], 1.0, tl.float32)
    if v_scales is None:
        summed = rounded
    elif queries.dtype == tl.float32:
        summed = weights * tl.exp2(-v_level)[None, :]
    else:  # unscaled weights exceed float16; one bfloat16 lacks precision, so two are summed
        unscaled = nothing + tl.exp2(-v_level)[None, :]
        summed = (weights * unscaled).to(tl.bfloat16)
        rest = tl.fma(weights, unscaled, nothing - summed.to(tl.float32)).to(tl.bfloat16)
        total = dot(rest, ones.to(tl.bfloat16), total)
    total = dot(summed, ones.to(summed.dtype), total)
    values_sum = dot(rounded, values.to(queries.dtype), values_sum * shrink)
    return new_largest, total, values_sum


@triton.jit
def join_states(largest, total, values_sum, more_largest, more_total, more_values):  # type: ignore[no-untyped-def]
    """Joins two softmax states, with `total` as `[rows, columns]`. Exact if one of the states has seen no token."""
    new_largest = tl.maximum(largest, more_largest)
    level = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    shrink, factor = tl.exp2(largest - level)[:, None], tl.exp2(more_largest - level)[:, None]
    total = tl.fma(more_total, tl.zeros_like(total) + factor, total * shrink)
    values_sum = tl.fma(more_values, tl.zeros_like(values_sum) + factor, values_sum * shrink)
    return new_largest, total, values_sum


@triton.jit
def attended(largest, total, values_sum, sink):  # type: ignore[no-untyped-def]
    """Returns the attention output, float32 `[rows, BLOCK_V]`, from the state after the whole context; zeros for a
    row that has seen no token."""
    if sink is not None:
        new_largest = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - new_largest)
        total = tl.fma(total, shrink, tl.exp2(sink - new_largest))
        values_sum = values_sum * shrink[:, None]
    return values_sum / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def sinks_of(sinks, q_head, real):  # type: ignore[no-untyped-def]
    """Returns the sinks of the query heads `q_head` in units of log 2, for `attended`; None without sinks."""
    found = None
    if sinks is not None:
        found = tl.load(sinks + q_head, mask=real, other=0.0).to(tl.float32) * LOG2_E
    return found
