"""The inner loop of the attention kernels: a running softmax over the context, a block of tokens at a time.

What differs between them is which tokens a row of queries sees, and they say so: everything else is here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention import base2_scores, dot, halves, load_rows, load_scales, log2_of


@triton.jit  # type: ignore[untyped-decorator]
def add_block(  # type: ignore[no-untyped-def]
    # what the blocks before have left
    largest,  # float32 [rows], of the scores, in units of log 2
    total,  # float32 [rows], of the weights
    values_sum,  # float32 [rows, BLOCK_V]
    queries,  # [rows, BLOCK_K]; float16 where there are codes and the model has 16 bits
    # of the layer and of the KV head
    k,
    v,
    k_scales,
    v_scales,
    row_table,  # address of the sequence's first slot
    token,  # int32 [tokens], positions in the sequence
    last,  # behind the last token that may be read
    visible,  # bool [rows or 1, tokens]; None: all rows see all tokens
    scaling,
    softcap,
    ALL_SEE: tl.constexpr,  # noqa: N803 - every row sees some token of this block, or of one before
    K_DIM: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    SLOT_STRIDE: tl.constexpr,  # noqa: N803
    SCALE_SLOT_STRIDE: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """`largest`, `total` and `values_sum` with one block of tokens more."""
    # What is beyond the end reads the last token again, and nobody sees it. int64 before any product: a pool is far
    # larger than 2^31 elements.
    slot = tl.load(row_table + tl.minimum(token, last - 1)).to(tl.int64)
    keys = load_rows(k, slot, K_DIM, SLOT_STRIDE, FP8, BLOCK_K)
    values = load_rows(v, slot, V_DIM, SLOT_STRIDE, FP8, BLOCK_V)
    if k_scales is not None:
        # With the codes: behind the first product's barriers they would be waited for once more.
        k_scale = load_scales(k_scales, slot, SCALE_SLOT_STRIDE)
        v_scale = load_scales(v_scales, slot, SCALE_SLOT_STRIDE)
        if queries.dtype == tl.float16:
            keys, values = halves(keys), halves(values)
    nothing = tl.zeros([queries.shape[0], token.shape[0]], tl.float32)
    products = dot(queries, tl.trans(keys.to(queries.dtype)), nothing)
    if k_scales is not None:
        products *= k_scale[None, :]
    scores = base2_scores(products, scaling, softcap)
    if v_scales is not None:
        v_level = log2_of(v_scale, queries.dtype == tl.float32)
        scores += v_level[None, :]
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    level = new_largest
    if not ALL_SEE:  # a row that has seen nothing yet
        level = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(largest - level)
    if v_scales is None:
        total = total * shrink + tl.sum(weights, 1)
    else:
        total = total * shrink + tl.sum(weights * tl.exp2(-v_level)[None, :], 1)
    values_sum = dot(weights.to(queries.dtype), values.to(queries.dtype), values_sum * shrink[:, None])
    return new_largest, total, values_sum
