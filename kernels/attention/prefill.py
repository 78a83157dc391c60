"""Prefill attention: causal attention of many query tokens per sequence over the paged pool. The pool already has the
K and V of the query tokens.

A program computes one KV head and a block of *rows*: query tokens x the query heads of that KV head. The program
reads K and V once for all its rows, which are adjacent in `q`. It first processes the tokens that all its rows see,
then the tokens that only some of its rows see. Scores stay in registers (FlashAttention 2).

A short prompt after a long cached prefix has too few blocks to fill the device. The context of a block is then split
over several programs (`kernels.attention.splits`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.block import TOTAL_COLUMNS, add_block, empty_state, join_states, sinks_of
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
    partials_bytes,
    splits_of,
    write_results,
)

_LEAST_SPLIT_TOKENS = 512
"""Minimum tokens of a split. With fewer tokens, the join kernel costs more than the split saves (measured on an
H200)."""
_MOST_PARTIALS_BYTES = 256 << 20
"""Limit of the memory for partial results of fixed splits. The profile run of the largest step, which sizes the KV
pool, does not include this memory."""
SPARE_SHARED_BYTES = 2048
"""Shared memory reserved for exchanges between threads, in addition to the tiles."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Tile sizes of a prefill program."""

    rows: int = 128
    tokens: int = 64
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True, slots=True)
class PackedQueries:
    """The query tokens of each sequence of a step. Tensors are int32 or int64 `[sequences]`, on the device."""

    rows: torch.Tensor
    """Row of the block table."""
    firsts: torch.Tensor
    """Index of the first query token in `q`."""
    starts: torch.Tensor
    """Position of the first query token in its sequence, which equals the number of earlier tokens in the pool."""
    counts: torch.Tensor
    """Number of query tokens."""
    most: int
    """Upper bound of `counts`, known to the host, which derives the grid from it."""

    def check(self) -> None:
        """Raises ValueError for tensors with wrong types or shapes."""
        n = self.rows.shape[0]
        check_numbers(n, rows=self.rows, firsts=self.firsts, starts=self.starts, counts=self.counts)


_TILES = (
    PrefillTile(rows=128, tokens=128, warps=8, stages=3),
    PrefillTile(),
    PrefillTile(stages=2),
    PrefillTile(rows=64, tokens=32, warps=4, stages=2),
)
"""Tiles for many rows in 16 bits, fastest first (measured on an H200). The first tile that fits into shared memory is
used."""
_FEW_BLOCKS = PrefillTile(rows=64, warps=4)
"""Tile for launches that would use at most half of the multiprocessors with blocks of 128 rows: twice as many
programs, two of which fit on a multiprocessor."""


def prefill_tile_of(
    dtype: torch.dtype,
    rows: int,
    head_dim: int,
    element_bytes: int,
    shared_bytes: int,
    *,
    few_blocks: bool = False,
) -> PrefillTile:
    """Returns the tile for queries of type `dtype` and at most `rows` rows per sequence, given the sizes of a head, a
    pool element, and a program's shared memory.

    `few_blocks`: whether blocks of 128 rows would use at most half of the multiprocessors.
    """
    if dtype == torch.float32:  # no tensor cores: small tiles, whose sums fit in registers
        return PrefillTile(rows=32 if head_dim <= 128 else 16, tokens=16, stages=2)
    if rows <= 32:
        return PrefillTile(rows=16 if rows <= 16 else 32, warps=4)
    if rows <= 64 or head_dim > 128:
        return PrefillTile(rows=64, tokens=64 if head_dim <= 128 else 32, warps=4, stages=2)
    room = shared_bytes - SPARE_SHARED_BYTES
    if few_blocks and element_bytes == 2 and tile_shared_bytes(_FEW_BLOCKS, head_dim) <= room:
        return _FEW_BLOCKS
    tiles = _TILES if element_bytes == 2 else _TILES[1:]  # quantized values pass through registers
    return next((tile for tile in tiles if tile_shared_bytes(tile, head_dim) <= room), tiles[-1])


def tile_shared_bytes(tile: PrefillTile, head_dim: int) -> int:
    """Returns the shared memory of a tile with 16-bit elements, in bytes, as Triton uses it on Hopper.

    The shared memory holds the queries, the prefetched blocks of K and V, and the matrix of ones that sums the
    weights. On Ampere, Triton uses less.
    """
    ones = int(TOTAL_COLUMNS.value) * tile.tokens
    return 2 * (head_dim * (tile.rows + 2 * (tile.stages - 1) * tile.tokens) + ones)


def fixed_tile_of(
    dtype: torch.dtype, rows: int, programs: int, head_dim: int, device: torch.device
) -> PrefillTile:
    """Returns the tile for fixed splits. Its blocks have the same number of tokens as in the decode kernel, so that
    both kernels give the same bits.

    `rows` is the largest number of rows of a sequence. `programs` is the number of blocks of 128 rows, before any
    context is split.
    """
    if dtype == torch.float32:
        return PrefillTile(rows=32 if head_dim <= 128 else 16, tokens=16, stages=2)
    if head_dim > 128:
        return PrefillTile(rows=16 if rows <= 16 else 64, tokens=32, warps=4, stages=2)
    if rows <= 32:
        return PrefillTile(rows=16 if rows <= 16 else 32, tokens=64, warps=4, stages=2)
    if rows <= 64 or programs < multiprocessors(device):
        return PrefillTile(rows=64, tokens=64, warps=4, stages=2)
    return PrefillTile(rows=128, tokens=64, warps=8, stages=3)


def prefill_splits_of(programs: int, max_tokens: int, tile: PrefillTile, device: torch.device) -> Splits:
    """Returns the splits for `programs` before any context is split; splits create at most as many programs as run at
    the same time."""
    twice = tile == _FEW_BLOCKS and 2 * tile_shared_bytes(tile, 128) <= shared_bytes(device)
    return splits_of(programs, multiprocessors(device) * (1 + twice), max_tokens, _LEAST_SPLIT_TOKENS)


def prefill_attention(
    q: torch.Tensor,
    kv: LayerKV,
    table: torch.Tensor,
    queries: PackedQueries,
    params: AttentionParams,
    out: torch.Tensor,
    *,
    deterministic: bool = False,
    splits: Splits | None = None,
    tile: PrefillTile | None = None,
) -> None:
    """Writes the attention of each sequence's query tokens to `out`.

    - q: float `[tokens, q_heads, k_dim]`, heads contiguous, other strides free; `q_heads` a multiple of the KV heads.
    - kv, table: K and V of the layer, and int32 `[rows, max_tokens]`, the slot of each token of each row.
    - queries: the position of the sequences in `q`. Rows of `out` outside all sequences stay unchanged.
    - out: `[tokens, q_heads, v_dim]` of q's type, contiguous.
    - deterministic: fixed splits. A token's result then has the same bits for any chunk and any batch, and the same
      as from `decode_attention`.
    - splits, tile: derived from the device and the sizes if omitted.

    A query at position `p` sees the tokens up to `p`, or the last `window_tokens` of them. Tokens that no query of
    the sequence sees are not read, with one exception: with fixed splits, the first block of a window may include
    earlier tokens, whose K and V must be finite.

    On CUDA: one or two launches on the current stream, no synchronization. Products use the queries' type (float32
    without TF32); softmax and sums use float32. Raises ValueError (arguments), ConfigError (no Triton).
    """
    group = check_queries(q, kv, table, params, out)
    queries.check()
    require_triton(q.device)
    if queries.rows.shape[0] == 0 or queries.most == 0:
        return
    tile = tile or _tile_for(q, kv, queries.most * group, max(q.shape[2], out.shape[2]), deterministic)
    splits = splits or _splits_for(q, kv, table.shape[1], params, out, tile, deterministic)
    partials = Partials(out, splits, unassigned=True)
    with on_device(q):
        _launch(q, kv, table, queries, params, out, partials, splits, tile, group)
        partials.join(params.sinks)


def _tile_for(q: torch.Tensor, kv: LayerKV, rows: int, head_dim: int, deterministic: bool) -> PrefillTile:
    """Returns the tile for sequences of at most `rows` rows.

    The number of programs is derived from the tokens in `q`, because most sequences of a captured step may be empty.
    """
    head_dim, programs = block_of(head_dim), _programs(q, kv, 128)
    if deterministic:
        return fixed_tile_of(q.dtype, rows, programs, head_dim, q.device)
    few_blocks = 2 * programs <= multiprocessors(q.device)
    sizes = rows, head_dim, kv.k.element_size(), shared_bytes(q.device)
    return prefill_tile_of(q.dtype, *sizes, few_blocks=few_blocks)


def _programs(q: torch.Tensor, kv: LayerKV, rows: int) -> int:
    """Returns the number of programs with blocks of `rows` rows, before any context is split."""
    kv_heads = kv.k.shape[1]
    return -(-q.shape[0] * (q.shape[1] // kv_heads) // rows) * kv_heads


def _splits_for(
    q: torch.Tensor,
    kv: LayerKV,
    seen: int,
    params: AttentionParams,
    out: torch.Tensor,
    tile: PrefillTile,
    deterministic: bool,
) -> Splits:
    """Returns the splits of rows that see up to `seen` tokens."""
    programs = _programs(q, kv, tile.rows)
    if params.window_tokens:  # one window, and one token more for each further query token of the block
        group = q.shape[1] // kv.k.shape[1]
        seen = min(seen, params.window_tokens + -(-tile.rows // group))
    if not deterministic:
        return prefill_splits_of(programs, seen, tile, q.device)
    splits = fixed_splits(seen, window=params.window_tokens is not None)
    small = partials_bytes(out, splits) <= _MOST_PARTIALS_BYTES
    if not small or programs >= multiprocessors(q.device):  # one program per block gives the same bits
        splits = fixed_splits(seen, window=params.window_tokens is not None, parallel=False)
    return splits


def _launch(
    q: torch.Tensor,
    kv: LayerKV,
    table: torch.Tensor,
    queries: PackedQueries,
    params: AttentionParams,
    out: torch.Tensor,
    partials: Partials,
    splits: Splits,
    tile: PrefillTile,
    group: int,
) -> None:
    sequences, kv_heads, k_dim, v_dim = queries.rows.shape[0], kv.k.shape[1], q.shape[2], out.shape[2]
    blocks = -(-queries.most * group // tile.rows)
    prefill_kernel[(blocks * splits.most, kv_heads, sequences)](
        q,
        kv.k,
        kv.v,
        kv.k_scales,
        kv.v_scales,
        table,
        queries.rows,
        queries.firsts,
        queries.starts,
        queries.counts,
        params.sinks,
        out,
        partials.values,
        partials.levels,
        partials.used,
        q.shape[0],
        *q.stride()[:2],
        table.shape[1],
        params.scaling,
        params.softcap,
        params.window_tokens or None,
        splits.most,
        splits.least_tokens,
        GROUP=group,
        K_DIM=k_dim,
        V_DIM=v_dim,
        **kv.strides(),
        FP8=kv.fp8,
        FIXED=splits.fixed,
        BLOCK_ROWS=tile.rows,
        BLOCK_TOKENS=tile.tokens,
        BLOCK_K=block_of(k_dim),
        BLOCK_V=_block_v(v_dim, converted=q.dtype != kv.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )


def _block_v(v_dim: int, *, converted: bool) -> int:
    """Returns the block width of V, at least 64 if V is converted; the padding is filled with zeros.

    For a narrower converted V, Triton 3.6 miscompiles the second product on Hopper: results or addresses are wrong.
    """
    return max(64, block_of(v_dim)) if converted else block_of(v_dim)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "window", "splits", "least_tokens"],
    do_not_specialize_on_alignment=["rows", "firsts", "starts", "counts"],
)
def prefill_kernel(  # type: ignore[no-untyped-def]
    # tensors
    q,
    k,
    v,
    k_scales,
    v_scales,
    table,
    rows,
    firsts,
    starts,
    counts,
    sinks,
    out,
    partial_values,
    partial_levels,
    used_splits,
    # sizes
    tokens,
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
    GROUP: tl.constexpr,  # noqa: N803
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
    # The last blocks see the most tokens and start first, so that short blocks fill the gaps at the end.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // splits
    split = tl.program_id(0) % splits
    head, sequence = tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + sequence).to(tl.int32)
    if block * BLOCK_ROWS >= count * GROUP:
        return
    start = tl.load(starts + sequence).to(tl.int32)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < count * GROUP
    query = tl.load(firsts + sequence).to(tl.int64) + row // GROUP
    q_head = head * GROUP + row % GROUP
    position = start + row // GROUP
    k_element = tl.arange(0, BLOCK_K)
    q_row = query * q_stride + q_head.to(tl.int64) * q_head_stride
    queries = tl.load(
        q + q_row[:, None] + k_element[None, :], mask=real[:, None] & (k_element < K_DIM)[None, :], other=0.0
    )

    # Tokens that at least one row sees: [low, last). Tokens that all rows see: [low, shared), in whole blocks.
    first_position = start + block * BLOCK_ROWS // GROUP
    last = tl.minimum(start + (block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, start + count - 1) + 1
    low = 0
    shared = (first_position + 1) // BLOCK_TOKENS * BLOCK_TOKENS
    if window is not None:
        low = tl.maximum(first_position + 1 - window, 0)
        shared = 0  # a window has few blocks: all of them are masked
    start_token, first_token, split_tokens, used = cut_context(
        low, last, splits, least_tokens, FIXED, BLOCK_TOKENS
    )
    if split > 0 and split >= used:
        return  # surplus program: the join kernel reads only used splits
    row_table = table + tl.load(rows + sequence).to(tl.int64) * table_stride
    k += head * HEAD_STRIDE
    v += head * HEAD_STRIDE
    if k_scales is not None:
        k_scales += head * SCALE_HEAD_STRIDE
        v_scales += head * SCALE_HEAD_STRIDE
        if queries.dtype != tl.float32:
            queries, power = half_queries(queries)
            scaling = (scaling * power)[:, None]
    if FIXED and splits == 1:  # all splits, one after the other
        largest, total, values_sum = empty_state(BLOCK_ROWS, BLOCK_V)
        for number in range(0, used):
            begin = tl.maximum(first_token + number * split_tokens, start_token)
            end = tl.minimum(first_token + (number + 1) * split_tokens, last)
            part_largest, part_total, part_values = _add_tokens(
                begin, end, shared, position, window, queries, k, v, k_scales, v_scales, row_table, last,
                scaling, softcap, K_DIM, V_DIM, SLOT_STRIDE, SCALE_SLOT_STRIDE, FP8, BLOCK_ROWS,
                BLOCK_TOKENS, BLOCK_K, BLOCK_V,
            )  # fmt: skip
            largest, total, values_sum = join_states(
                largest, total, values_sum, part_largest, part_total, part_values
            )
    else:
        begin = tl.maximum(first_token + split * split_tokens, start_token)
        end = tl.minimum(first_token + (split + 1) * split_tokens, last)
        largest, total, values_sum = _add_tokens(
            begin, end, shared, position, window, queries, k, v, k_scales, v_scales, row_table, last,
            scaling, softcap, K_DIM, V_DIM, SLOT_STRIDE, SCALE_SLOT_STRIDE, FP8, BLOCK_ROWS,
            BLOCK_TOKENS, BLOCK_K, BLOCK_V,
        )  # fmt: skip

    write_results(
        largest, total, values_sum, query * tl.num_programs(1) * GROUP + q_head, real, split, used, splits,
        partial_values, partial_levels, used_splits, tokens.to(tl.int64) * tl.num_programs(1) * GROUP,
        sinks_of(sinks, q_head, real), out, V_DIM, BLOCK_V,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_tokens(  # type: ignore[no-untyped-def]
    begin,  # tokens [begin, end); all rows see those before `shared`
    end,
    shared,
    position,  # int32 [rows], position of each row's query token
    window,
    queries,
    k,
    v,
    k_scales,
    v_scales,
    row_table,
    last,
    scaling,
    softcap,
    K_DIM: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    SLOT_STRIDE: tl.constexpr,  # noqa: N803
    SCALE_SLOT_STRIDE: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """Returns the softmax state of the rows over the tokens `[begin, end)` alone."""
    middle = tl.minimum(tl.maximum(shared, begin), end)
    largest, total, values_sum = empty_state(BLOCK_ROWS, BLOCK_V)
    for first in range(begin, middle, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS)
        largest, total, values_sum = add_block(
            largest, total, values_sum, queries, k, v, k_scales, v_scales, row_table, token, last, None,
            scaling, softcap, True, K_DIM, V_DIM, SLOT_STRIDE, SCALE_SLOT_STRIDE, FP8, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    for first in range(middle, end, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS)
        visible = token[None, :] <= position[:, None]
        if window is not None:
            visible &= token[None, :] > position[:, None] - window
        largest, total, values_sum = add_block(
            largest, total, values_sum, queries, k, v, k_scales, v_scales, row_table, token, last, visible,
            scaling, softcap, False, K_DIM, V_DIM, SLOT_STRIDE, SCALE_SLOT_STRIDE, FP8, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    return largest, total, values_sum
