"""Attention of one query token per sequence over the paged pool, split over the context (FlashDecoding).

A program takes one KV head of one sequence, all query heads of that head, and one *split* of the tokens; a second
kernel joins the splits. How many splits a sequence has follows from its length, which only the device knows: it takes
as many as give each some tokens to do, and who has one writes its result at once. The grid depends on nothing but the
number of sequences, so the launch can be recorded in a CUDA graph; programs beyond a sequence's splits end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention import (
    LOG2_E,
    AttentionParams,
    block_of,
    check_numbers,
    check_queries,
    half_queries,
    on_device,
    require_triton,
)
from kernels.attention_block import add_block
from kernels.layer_kv import LayerKV

_MAX_SPLITS = 128
_PROGRAMS_PER_MULTIPROCESSOR = 64
"""Of the grid, most of which end at once: that of the longest contexts, split as far as their number allows."""
_LEAST_SPLIT_TOKENS = (256, 4096)
"""Where the splits are all that fills the device, and where the sequences do it by themselves."""
_MAX_GROUP_ROWS = {torch.float32: 16}
"""Query heads of one program, 64 in 16 bits; more of one KV head take further programs."""
_COMBINED_ELEMENTS = 4096
"""Of partial outputs that a program of the second kernel holds at a time."""


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
    if element_bytes == 1:  # codes pass through registers in any case: nothing is copied ahead
        return DecodeTile(tokens=128 if head_dim <= 128 else 64, stages=1)
    return DecodeTile(tokens=64 if head_dim <= 128 else 32)


@dataclass(frozen=True, slots=True)
class Splits:
    """How contexts are cut, whatever their lengths will be."""

    most: int
    """Of one sequence."""
    least_tokens: int
    """Of one split, but for a sequence's last one."""


def splits_of(programs: int, max_tokens: int, device: torch.device) -> Splits:
    """For so many `programs` before any context is cut, and contexts of up to `max_tokens`.

    Of the splits of 8 x 4,096 tokens on an H200 (64 programs) those of 1,024 are quickest, and with 512 programs none
    at all: the least grows with the programs in between.
    """
    least, enough = _LEAST_SPLIT_TOKENS
    least_tokens = min(max(enough * programs // (2 * _multiprocessors(device)), least), enough)
    most = _PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(device) // max(1, programs)
    return Splits(max(1, min(most, _MAX_SPLITS, -(-max_tokens // least_tokens))), least_tokens)


def decode_attention(
    q: torch.Tensor,
    kv: LayerKV,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    params: AttentionParams,
    out: torch.Tensor,
    *,
    splits: Splits | None = None,
    tile: DecodeTile | None = None,
) -> None:
    """Writes the attention of each sequence's last token to `out`.

    - q: float `[n, q_heads, k_dim]`, heads contiguous, other strides free; `q_heads` a multiple of the KV heads.
    - kv, table: K and V of the layer, and int32 `[rows, max_tokens]`, the slot of each token of each row.
    - rows: int32 or int64 `[n]`, each sequence's row in the table.
    - lengths: int32 or int64 `[n]`: tokens in the pool, the query's own included; 0 (a padding row) gives zeros.
    - out: `[n, q_heads, v_dim]` of q's type, contiguous.
    - splits, tile: chosen by the device and the sizes when left out.

    Codes are multiplied as float16, which has all of them exactly, where the queries have 16 bits.

    On CUDA: one or two launches on the current stream, no synchronization, nothing about rows and lengths known to
    the host. Tokens outside the window and beyond the length are never read. Products in the queries' type (float32:
    exact, no TF32), softmax and sums in float32. Raises ValueError (arguments), ConfigError (no Triton).
    """
    group = check_queries(q, kv, table, params, out)
    n, q_heads, k_dim = q.shape
    check_numbers(n, rows=rows, lengths=lengths)
    require_triton(q.device)
    if n == 0:
        return
    kv_heads, v_dim = kv.k.shape[1], out.shape[2]
    tile = tile or tile_of(q.dtype, kv.k.element_size(), max(k_dim, v_dim))
    block_rows = min(_MAX_GROUP_ROWS.get(q.dtype, 64), block_of(group))
    parts = -(-group // block_rows)
    splits = splits or splits_of(n * kv_heads * parts, table.shape[1], q.device)
    partial = lse = None
    if splits.most > 1:
        partial = torch.empty(n, q_heads, splits.most, v_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(n, q_heads, splits.most, dtype=torch.float32, device=q.device)
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
            partial,
            lse,
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
            BLOCK_ROWS=block_rows,
            BLOCK_TOKENS=tile.tokens,
            BLOCK_K=block_of(k_dim),
            BLOCK_V=block_of(v_dim),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )
        if splits.most > 1:
            block_v = block_of(v_dim)
            _combine_kernel[(q_heads, n)](
                partial,
                lse,
                lengths,
                params.sinks,
                out,
                params.window_tokens or None,
                splits.most,
                splits.least_tokens,
                V_DIM=v_dim,
                BLOCK_TOKENS=tile.tokens,
                BLOCK_SPLITS=max(1, _COMBINED_ELEMENTS // block_v),
                BLOCK_V=block_v,
                enable_fp_fusion=True,
            )


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit  # type: ignore[untyped-decorator]
def _visible(lengths, sequence, window, splits, least_tokens, BLOCK_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """First visible token, the sequence's length, tokens of a split (whole blocks)."""
    length = tl.load(lengths + sequence).to(tl.int32)
    low = 0
    if window is not None:
        low = tl.maximum(length - window, 0)
    split_tokens = tl.maximum(tl.cdiv(length - low, splits), least_tokens)
    return low, length, tl.cdiv(split_tokens, BLOCK_TOKENS) * BLOCK_TOKENS


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
    partial,
    lse,
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
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    # Heads run fastest: those of one token lie side by side in memory and are read at about the same time.
    head, split, sequence = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    low, length, split_tokens = _visible(lengths, sequence, window, splits, least_tokens, BLOCK_TOKENS)
    first = low + split * split_tokens
    last = tl.minimum(first + split_tokens, length)
    if split > 0 and first >= last:
        return  # the second kernel knows as well that this split is empty

    member = (tl.program_id(0) % PARTS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = member < GROUP  # tl.dot needs 16 rows or more
    q_head = head * GROUP + member
    k_element, v_element = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
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
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    values_sum = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
    for start in range(first, last, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        # Each block has a token that is visible.
        largest, total, values_sum = add_block(
            largest, total, values_sum, queries, k, v, k_scales, v_scales, row_table, token, last,
            token[None, :] < last, scaling, softcap, True, K_DIM, V_DIM, SLOT_STRIDE, SCALE_SLOT_STRIDE, FP8,
            BLOCK_K, BLOCK_V,
        )  # fmt: skip

    out_row = sequence * (KV_HEADS * GROUP) + q_head
    mask = real[:, None] & (v_element < V_DIM)[None, :]
    if partial is not None and length - low > split_tokens:
        place = out_row * splits + split
        tl.store(
            partial + place[:, None] * V_DIM + v_element[None, :], values_sum / total[:, None], mask=mask
        )
        tl.store(lse + place, largest + tl.log2(total), mask=real)
    else:
        if sinks is not None:
            sink = tl.load(sinks + q_head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            new_largest = tl.maximum(largest, sink)
            shrink = tl.exp2(largest - new_largest)
            total = total * shrink + tl.exp2(sink - new_largest)
            values_sum = values_sum * shrink[:, None]
        total = tl.where(total == 0.0, 1.0, total)  # a sequence of length 0
        result = (values_sum / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_row[:, None] * V_DIM + v_element[None, :], result, mask=mask)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window", "splits", "least_tokens"], do_not_specialize_on_alignment=["lengths"]
)
def _combine_kernel(  # type: ignore[no-untyped-def]
    # tensors
    partial,
    lse,
    lengths,
    sinks,
    out,
    # what the layer asks for
    window,
    splits,
    least_tokens,
    # meta
    V_DIM: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_SPLITS: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    q_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    low, length, split_tokens = _visible(lengths, sequence, window, splits, least_tokens, BLOCK_TOKENS)
    used = tl.cdiv(length - low, split_tokens)  # the others were not written
    if used <= 1:
        return  # its program has written the result
    row = sequence * tl.num_programs(0) + q_head
    element = tl.arange(0, BLOCK_V)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + q_head + tl.arange(0, 1)).to(tl.float32) * LOG2_E
        total = total + 1.0  # exp2(sink - largest)
    values_sum = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, used, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        inside = split < used
        place = row * splits + split
        level = tl.load(lse + place, mask=inside, other=float("-inf"))
        found = tl.load(
            partial + place[:, None] * V_DIM + element[None, :],
            mask=inside[:, None] & (element < V_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(level, 0))
        weights = tl.exp2(level - new_largest)
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 0)
        values_sum = values_sum * shrink + tl.sum(found * weights[:, None], 0)
        largest = new_largest
    tl.store(out + row * V_DIM + element, (values_sum / total).to(out.dtype.element_ty), mask=element < V_DIM)
