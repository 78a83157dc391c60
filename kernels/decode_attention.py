"""Attention of one query token per sequence over the paged pool.

A program takes one KV head of one sequence, all query heads of that head, and one split of the tokens it sees (see
`kernels.attention_splits`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention import (
    AttentionParams,
    block_of,
    check_numbers,
    check_queries,
    half_queries,
    multiprocessors,
    on_device,
    require_triton,
)
from kernels.attention_block import add_block, empty_state, sinks_of
from kernels.attention_splits import (
    Partials,
    Splits,
    cut_context,
    fixed_splits,
    splits_of,
    write_results,
)
from kernels.layer_kv import LayerKV

_PROGRAMS_PER_MULTIPROCESSOR = 64
"""Of the grid, most of which end at once: that of the longest contexts, split as far as their number allows."""
_LEAST_SPLIT_TOKENS = (256, 4096)
"""Where the splits are all that fills the device, and where the sequences do it by themselves."""
_MAX_GROUP_ROWS = {torch.float32: 16}
"""Query heads of one program, 64 in 16 bits; more of one KV head take further programs."""


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How a program goes over its tokens."""

    tokens: int = 64
    warps: int = 4
    stages: int = 2
    """Blocks of tokens under way: the loads of one beside the arithmetic of another."""


def tile_of(dtype: torch.dtype, element_bytes: int, head_dim: int) -> DecodeTile:
    """By the queries' type, and an element and a head in the pool: a multiprocessor has room for several programs."""
    if dtype == torch.float32:  # no tensor cores
        return DecodeTile(tokens=16, stages=2)
    # Codes pass through registers in any case: nothing is copied ahead.
    return DecodeTile(tokens=64 if head_dim <= 128 else 32, stages=1 if element_bytes == 1 else 2)


def decode_splits_of(programs: int, max_tokens: int, device: torch.device) -> Splits:
    """For so many `programs` before any context is cut, and contexts of up to `max_tokens`.

    Of the splits of 8 x 4,096 tokens on an H200 (64 programs) those of 1,024 are quickest, and with 512 programs none
    at all: the least grows with the programs in between.
    """
    least, enough = _LEAST_SPLIT_TOKENS
    there = multiprocessors(device)
    least_tokens = min(max(enough * programs // (2 * there), least), enough)
    return splits_of(programs, _PROGRAMS_PER_MULTIPROCESSOR * there, max_tokens, least_tokens)


def decode_attention(
    q: torch.Tensor,
    kv: LayerKV,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    params: AttentionParams,
    out: torch.Tensor,
    *,
    deterministic: bool = False,
    splits: Splits | None = None,
    tile: DecodeTile | None = None,
) -> None:
    """Writes the attention of each sequence's last token to `out`.

    - q: float `[n, q_heads, k_dim]`, heads contiguous, other strides free; `q_heads` a multiple of the KV heads.
    - kv, table: K and V of the layer, and int32 `[rows, max_tokens]`, the slot of each token of each row.
    - rows: int32 or int64 `[n]`, each sequence's row in the table.
    - lengths: int32 or int64 `[n]`: tokens in the pool, the query's own included; 0 (a padding row) gives zeros.
    - out: `[n, q_heads, v_dim]` of q's type, contiguous.
    - deterministic: fixed splits. A sequence's result then has the same bits whatever else is in the launch, and the
      same as from `prefill_attention`.
    - splits, tile: chosen by the device and the sizes when left out.

    Codes are multiplied as float16, which has all of them exactly, where the queries have 16 bits.

    On CUDA: one or two launches on the current stream, no synchronization, nothing about rows and lengths known to
    the host. Tokens outside the window and beyond the length are never read, but for those of a window's first block
    with fixed splits, which must be finite. Products in the queries' type (float32: exact, no TF32), softmax and sums
    in float32. Raises ValueError (arguments), ConfigError (no Triton).
    """
    group = check_queries(q, kv, table, params, out)
    n, _, k_dim = q.shape
    check_numbers(n, rows=rows, lengths=lengths)
    require_triton(q.device)
    if n == 0:
        return
    kv_heads, v_dim = kv.k.shape[1], out.shape[2]
    tile = tile or tile_of(q.dtype, kv.k.element_size(), max(k_dim, v_dim))
    block_rows = min(_MAX_GROUP_ROWS.get(q.dtype, 64), block_of(group))
    parts = -(-group // block_rows)
    seen = min(table.shape[1], params.window_tokens or table.shape[1])
    if splits is None and deterministic:
        splits = fixed_splits(seen, window=params.window_tokens is not None)
    splits = splits or decode_splits_of(n * kv_heads * parts, seen, q.device)
    partials = Partials(out, splits, strangers=False)
    with on_device(q):
        _decode_kernel[(kv_heads * parts, splits.most, n)](
            q,
            kv.k,
            kv.v,
            kv.k_scales,
            kv.v_scales,
            table,
            rows,
            lengths,
            params.sinks,
            out,
            partials.values,
            partials.levels,
            partials.used,
            *q.stride()[:2],
            table.shape[1],
            params.scaling,
            params.softcap,
            params.window_tokens or None,
            splits.most,
            splits.least_tokens,
            KV_HEADS=kv_heads,
            GROUP=group,
            PARTS=parts,
            K_DIM=k_dim,
            V_DIM=v_dim,
            **kv.strides(),
            FP8=kv.fp8,
            FIXED=splits.fixed,
            BLOCK_ROWS=block_rows,
            BLOCK_TOKENS=tile.tokens,
            BLOCK_K=block_of(k_dim),
            BLOCK_V=block_of(v_dim),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )
        partials.join(params.sinks)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window", "splits", "least_tokens"], do_not_specialize_on_alignment=["rows", "lengths"]
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    # tensors
    q,
    k,
    v,
    k_scales,
    v_scales,
    table,
    rows,
    lengths,
    sinks,
    out,
    partial_values,
    partial_levels,
    used_splits,
    # sizes
    q_stride,
    q_head_stride,
    table_stride,
    # what the layer asks for
    scaling,
    softcap,
    window,
    splits,
    least_tokens,
    # meta
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    K_DIM: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    SLOT_STRIDE: tl.constexpr,  # noqa: N803
    HEAD_STRIDE: tl.constexpr,  # noqa: N803
    SCALE_SLOT_STRIDE: tl.constexpr,  # noqa: N803
    SCALE_HEAD_STRIDE: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    FIXED: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    # Heads run fastest: those of one token lie side by side in memory and are read at about the same time.
    head, split, sequence = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence).to(tl.int32)
    low = 0
    if window is not None:
        low = tl.maximum(length - window, 0)
    start, first, split_tokens, used = cut_context(low, length, splits, least_tokens, FIXED, BLOCK_TOKENS)
    if split > 0 and split >= used:
        return  # the second kernel is told how many there are
    begin = tl.maximum(first + split * split_tokens, start)
    end = tl.minimum(first + (split + 1) * split_tokens, length)

    member = (tl.program_id(0) % PARTS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = member < GROUP  # tl.dot needs 16 rows or more
    q_head = head * GROUP + member
    k_element = tl.arange(0, BLOCK_K)
    queries = tl.load(
        q + sequence * q_stride + q_head[:, None].to(tl.int64) * q_head_stride + k_element[None, :],
        mask=real[:, None] & (k_element < K_DIM)[None, :],
        other=0.0,
    )
    k += head * HEAD_STRIDE
    v += head * HEAD_STRIDE
    if k_scales is not None:
        k_scales += head * SCALE_HEAD_STRIDE
        v_scales += head * SCALE_HEAD_STRIDE
        if queries.dtype != tl.float32:
            queries, power = half_queries(queries)
            scaling = (scaling * power)[:, None]
    row_table = table + tl.load(rows + sequence).to(tl.int64) * table_stride
    largest, total, values_sum = empty_state(BLOCK_ROWS, BLOCK_V)
    for token_start in range(begin, end, BLOCK_TOKENS):
        token = token_start + tl.arange(0, BLOCK_TOKENS)
        visible = (token < end)[None, :]
        if FIXED and window is not None:
            visible &= (token >= low)[None, :]
        # Each block has a token that is visible.
        largest, total, values_sum = add_block(
            largest, total, values_sum, queries, k, v, k_scales, v_scales, row_table, token, end,
            visible, scaling, softcap, True, K_DIM, V_DIM, SLOT_STRIDE, SCALE_SLOT_STRIDE, FP8,
            BLOCK_K, BLOCK_V,
        )  # fmt: skip

    write_results(
        largest, total, values_sum, sequence * (KV_HEADS * GROUP) + q_head, real, split, used, splits,
        partial_values, partial_levels, used_splits, tl.num_programs(2).to(tl.int64) * (KV_HEADS * GROUP),
        sinks_of(sinks, q_head, real), out, V_DIM, BLOCK_V,
    )  # fmt: skip
