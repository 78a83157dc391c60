"""Decode attention: one query token per sequence over the paged pool.

A program computes all query heads of one KV head of one sequence, for one split of the context
(`kernels.attention.splits`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.block import add_block, empty_state, sinks_of
from kernels.attention.common import (
    AttentionParams,
    block_of,
    check_numbers,
    check_queries,
    half_queries,
    multiprocessors,
    on_device,
    require_triton,
    shared_bytes,
)
from kernels.attention.layer_kv import LayerKV
from kernels.attention.splits import (
    Partials,
    Splits,
    cut_context,
    fixed_splits,
    splits_of,
    write_results,
)
from kernels.overlap import overlap, wait_for_previous

_PROGRAMS_PER_MULTIPROCESSOR = 64
"""Largest number of programs per multiprocessor when contexts are split. The grid fits the longest context, so most
programs end at once."""
_LEAST_SPLIT_TOKENS = ((1.4, 4096), (0.73, 640), (0.36, 128), (0.0, 64))
"""Minimum tokens of a split, by the number of programs per multiprocessor before any context is split. Measured on an
H200 with 1 to 128 sequences of 576 and 2,048 tokens."""
_STAGES_OF_MANY = ((11.0, 3), (8.0, 2), (5.0, 3))
"""Numbers of programs per multiprocessor from which small tiles are faster, with their pipeline stages. A
multiprocessor runs 5 programs with other tiles at the same time, 8 with small tiles of three stages, and 11 of two:
a few programs more would run alone at the end. Measured on an H200 with heads of 128 and contexts of 256 to 2,048
tokens."""
_SOME_PROGRAMS = (0.73, 3.0)
"""Numbers of programs per multiprocessor for which large tiles are faster: each multiprocessor runs one or two
programs, whose loads ahead must keep the memory busy."""
_MAX_GROUP_ROWS = {torch.float32: 16}
"""Largest number of query heads of one program, by type (64 for 16-bit types). More heads take several programs."""


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Tile sizes of a decode program."""

    tokens: int = 64
    warps: int = 4
    stages: int = 2
    """Pipeline stages: loads of one block overlap the arithmetic of another."""


_LARGE_TILE = DecodeTile(tokens=128)


def tile_of(
    dtype: torch.dtype, element_bytes: int, head_dim: int, load: float = 0.0, room_bytes: int = 0
) -> DecodeTile:
    """Returns the tile for queries of type `dtype`, pool elements of `element_bytes`, and the head size.

    `load`: programs per multiprocessor before contexts are split; `room_bytes`: shared memory of a program. The
    defaults give the tile of the deterministic mode.
    """
    if dtype == torch.float32:  # no tensor cores
        return DecodeTile(tokens=16, stages=2)
    if element_bytes == 2 and head_dim <= 128:
        for programs, stages in _STAGES_OF_MANY:
            if load >= programs:
                return DecodeTile(tokens=32, warps=2, stages=stages)
        large = 2 * element_bytes * _LARGE_TILE.tokens * head_dim * _LARGE_TILE.stages  # K and V
        if _SOME_PROGRAMS[0] <= load < _SOME_PROGRAMS[1] and room_bytes >= 1.25 * large:
            return _LARGE_TILE
    # Quantized values are converted in registers, so copying a stage ahead gains nothing.
    return DecodeTile(tokens=64 if head_dim <= 128 else 32, stages=1 if element_bytes == 1 else 2)


def decode_splits_of(programs: int, max_tokens: int, device: torch.device) -> Splits:
    """Returns the splits for `programs` (before any context is split) and contexts of up to `max_tokens`."""
    load = programs / multiprocessors(device)
    least_tokens = next(tokens for least, tokens in _LEAST_SPLIT_TOKENS if load >= least)
    most = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device)
    return splits_of(programs, most, max_tokens, least_tokens)


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
    max_tokens: int | None = None,
    splits: Splits | None = None,
    tile: DecodeTile | None = None,
) -> None:
    """Writes the attention of each sequence's last token to `out`.

    - q: float `[n, q_heads, k_dim]`, heads contiguous, other strides free; `q_heads` a multiple of the KV heads.
    - kv, table: K and V of the layer, and int32 `[rows, max_tokens]`, the slot of each token of each row.
    - rows: int32 or int64 `[n]`, each sequence's row in the table.
    - lengths: int32 or int64 `[n]`: tokens in the pool, including the query's own; 0 (a padding row) gives zeros.
    - out: `[n, q_heads, v_dim]` of q's type, contiguous.
    - deterministic: fixed splits. A sequence's result then has the same bits for any batch, and the same as from
      `prefill_attention`.
    - max_tokens: upper bound of the lengths, by default the table's width. A tighter bound launches fewer surplus
      programs.
    - splits, tile: derived from the device and the sizes if omitted.

    Quantized values are multiplied as float16, which represents all of them exactly, if the queries have 16 bits.

    On CUDA: one or two launches on the current stream, no synchronization; the host reads neither rows nor lengths.
    Tokens outside the window or beyond the length are never read, with one exception: with fixed splits, the first
    block of a window may include earlier tokens, whose K and V must be finite. Products use the queries' type
    (float32 without TF32); softmax and sums use float32. Raises ValueError (arguments), ConfigError (no Triton).
    """
    group = check_queries(q, kv, table, params, out)
    n = q.shape[0]
    check_numbers(n, rows=rows, lengths=lengths)
    require_triton(q.device)
    if n == 0:
        return
    block_rows = min(_MAX_GROUP_ROWS.get(q.dtype, 64), block_of(group))
    parts = -(-group // block_rows)
    seen = min(max_tokens or table.shape[1], params.window_tokens or table.shape[1])
    if splits is None and deterministic:
        splits = fixed_splits(seen, window=params.window_tokens is not None)
    programs = n * kv.k.shape[1] * parts
    splits = splits or decode_splits_of(programs, seen, q.device)
    load = 0.0 if deterministic else programs / multiprocessors(q.device)
    head_dim = block_of(max(q.shape[2], out.shape[2]))
    tile = tile or tile_of(q.dtype, kv.k.element_size(), head_dim, load, shared_bytes(q.device))
    partials = Partials(out, splits, unassigned=False)
    with on_device(q):
        _launch(q, kv, table, rows, lengths, params, out, partials, splits, tile, group, block_rows)
        partials.join(params.sinks)


def _launch(
    q: torch.Tensor,
    kv: LayerKV,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    params: AttentionParams,
    out: torch.Tensor,
    partials: Partials,
    splits: Splits,
    tile: DecodeTile,
    group: int,
    block_rows: int,
) -> None:
    n, _, k_dim = q.shape
    kv_heads, v_dim = kv.k.shape[1], out.shape[2]
    parts = -(-group // block_rows)
    decode_kernel[(kv_heads * parts, splits.most, n)](
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
        **overlap(q.device),
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window", "splits", "least_tokens"], do_not_specialize_on_alignment=["rows", "lengths"]
)
def decode_kernel(  # type: ignore[no-untyped-def]
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
    # parameters of the layer
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
    OVERLAP: tl.constexpr,  # noqa: N803
):
    wait_for_previous(OVERLAP)
    # Heads vary fastest: the heads of one token are adjacent in memory and read at about the same time.
    head, split, sequence = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence).to(tl.int32)
    low = 0
    if window is not None:
        low = tl.maximum(length - window, 0)
    start, first, split_tokens, used = cut_context(low, length, splits, least_tokens, FIXED, BLOCK_TOKENS)
    if split > 0 and split >= used:
        return  # surplus program: the join kernel reads only used splits
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
        # Every block has a visible token: ALL_SEE is True.
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
