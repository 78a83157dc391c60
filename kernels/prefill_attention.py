"""Causal attention of many query tokens per sequence over the paged pool, which holds their own K and V already.

A program takes one KV head and a block of *rows*: query tokens x the query heads of that KV head, side by side in
`q`, so that K and V are read once for all of them. It goes over the tokens that its rows can see, first those that
all of them see, then those where some must be masked; scores stay in registers (FlashAttention 2). Blocks that are
too few to fill the device, as those of a short question behind a long cached prefix, have their tokens split over
several programs (see `kernels.attention_splits`).
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
    shared_bytes,
)
from kernels.attention_block import TOTAL_COLUMNS, add_block, empty_state, join_states, sinks_of
from kernels.attention_splits import (
    Partials,
    Splits,
    cut_context,
    fixed_splits,
    partials_bytes,
    splits_of,
    write_results,
)
from kernels.layer_kv import LayerKV

_LEAST_SPLIT_TOKENS = 256
"""Fewer are not worth a second kernel."""
_MOST_PARTIALS_BYTES = 256 << 20
"""Of partial results of fixed splits: they are no part of the largest step, by which a pool is sized."""
_SPARE_SHARED_BYTES = 2048
"""For what a program exchanges beside its tiles."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """What one program holds."""

    rows: int = 128
    tokens: int = 64
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True, slots=True)
class PackedQueries:
    """Which tokens of a step belong to which sequence; all int32 or int64 `[sequences]`, on the device."""

    rows: torch.Tensor
    """Row of the table."""
    firsts: torch.Tensor
    """Index of the first query token in `q`."""
    starts: torch.Tensor
    """Position of that token in its sequence: so many tokens are in the pool before it."""
    counts: torch.Tensor
    """Query tokens."""
    most: int
    """The largest of `counts`, or more: known to the host, because the grid follows from it."""

    def check(self) -> None:
        """Raises ValueError for tensors of other types or shapes."""
        n = self.rows.shape[0]
        check_numbers(n, rows=self.rows, firsts=self.firsts, starts=self.starts, counts=self.counts)


_TILES = (
    PrefillTile(rows=128, tokens=128, warps=8, stages=3),
    PrefillTile(),
    PrefillTile(stages=2),
    PrefillTile(rows=64, tokens=32, warps=4, stages=2),
)
"""For many rows in 16 bits, the quickest first (measured on an H200): the first one is used that has room."""


def prefill_tile_of(
    dtype: torch.dtype, rows: int, head_dim: int, element_bytes: int, shared_bytes: int
) -> PrefillTile:
    """By the queries' type, the most rows of a sequence, a head's and a pool element's size, and a program's shared
    memory."""
    if dtype == torch.float32:  # no tensor cores: small tiles, whose sums fit in registers
        return PrefillTile(rows=32 if head_dim <= 128 else 16, tokens=16, stages=2)
    if rows <= 32:
        return PrefillTile(rows=16 if rows <= 16 else 32, warps=4)
    if rows <= 64 or head_dim > 128:
        return PrefillTile(rows=64, tokens=64 if head_dim <= 128 else 32, warps=4, stages=2)
    tiles = _TILES if element_bytes == 2 else _TILES[1:]  # codes pass through registers
    room = shared_bytes - _SPARE_SHARED_BYTES
    return next((tile for tile in tiles if _shared_bytes(tile, head_dim) <= room), tiles[-1])


def _shared_bytes(tile: PrefillTile, head_dim: int) -> int:
    """Of the queries, of K and V of each block that is copied ahead, and of the ones that sum weights, in 16 bits: as
    much as Triton takes on Hopper; on Ampere it takes less."""
    ones = int(TOTAL_COLUMNS.value) * tile.tokens
    return 2 * (head_dim * (tile.rows + 2 * (tile.stages - 1) * tile.tokens) + ones)


def fixed_tile_of(
    dtype: torch.dtype, rows: int, programs: int, head_dim: int, device: torch.device
) -> PrefillTile:
    """A tile that changes no bits: blocks of as many tokens as the single tokens' kernel takes.

    `rows` of one sequence at most; `programs` of 128 rows before any context is cut.
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


def prefill_splits_of(programs: int, max_tokens: int, device: torch.device) -> Splits:
    """For so many `programs` before any context is cut: no more of them than run at once."""
    return splits_of(programs, multiprocessors(device), max_tokens, _LEAST_SPLIT_TOKENS)


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
    - queries: where the sequences lie in `q`; tokens of none are left alone.
    - out: `[tokens, q_heads, v_dim]` of q's type, contiguous.
    - deterministic: fixed splits. A token's result then has the same bits in whatever chunk it is computed, whatever
      else is in the launch, and the same as from `decode_attention`.
    - splits, tile: chosen by the device and the sizes when left out.

    A query at position `p` sees the tokens up to `p`, or the last `window_tokens` of them; no other is used, and none
    outside of what the sequence's queries see together is read, but for those of a window's first block with fixed
    splits, which must be finite. On CUDA: one or two launches on the current stream, no synchronization. Products in
    the queries' type (float32: exact, no TF32), softmax and sums in float32. Raises ValueError (arguments),
    ConfigError (no Triton).
    """
    group = check_queries(q, kv, table, params, out)
    queries.check()
    require_triton(q.device)
    sequences, kv_heads, k_dim, v_dim = queries.rows.shape[0], kv.k.shape[1], q.shape[2], out.shape[2]
    if sequences == 0 or queries.most == 0:
        return
    device, head_dim = q.device, block_of(max(k_dim, v_dim))
    # By the tokens there are: of a recorded step's sequences most may be empty.
    if tile is None and deterministic:
        programs = -(-q.shape[0] * group // 128) * kv_heads
        tile = fixed_tile_of(q.dtype, queries.most * group, programs, head_dim, device)
    elif tile is None:
        rows = queries.most * group
        tile = prefill_tile_of(q.dtype, rows, head_dim, kv.k.element_size(), shared_bytes(device))
    blocks = -(-queries.most * group // tile.rows)
    if splits is None:
        programs = -(-q.shape[0] * group // tile.rows) * kv_heads
        seen = table.shape[1]
        if params.window_tokens:  # a block's first row sees so many, each further token moves its end by one
            seen = min(seen, params.window_tokens + -(-tile.rows // group))
        if deterministic:
            splits = fixed_splits(seen, window=params.window_tokens is not None)
            small = partials_bytes(out, splits) <= _MOST_PARTIALS_BYTES
            if not small or programs >= multiprocessors(
                device
            ):  # a program goes over all splits: the same bits
                splits = fixed_splits(seen, window=params.window_tokens is not None, parallel=False)
        else:
            splits = prefill_splits_of(programs, seen, device)
    partials = Partials(out, splits, strangers=True)
    with on_device(q):
        _prefill_kernel[(blocks * splits.most, kv_heads, sequences)](
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
        partials.join(params.sinks)


def _block_v(v_dim: int, *, converted: bool) -> int:
    """Triton 3.6 miscompiles the second product on Hopper where V is converted and narrower than 64 elements: results
    are wrong, or an address is. Wider, the rest is zeros."""
    return max(64, block_of(v_dim)) if converted else block_of(v_dim)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "window", "splits", "least_tokens"],
    do_not_specialize_on_alignment=["rows", "firsts", "starts", "counts"],
)
def _prefill_kernel(  # type: ignore[no-untyped-def]
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
    # what the layer asks for
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
    # The last blocks see the most tokens: they start first, the short ones fill the gaps at the end.
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

    # What some row sees: [low, last). What all of them see: [low, shared), whole blocks from low on.
    first_position = start + block * BLOCK_ROWS // GROUP
    last = tl.minimum(start + (block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, start + count - 1) + 1
    low = 0
    shared = (first_position + 1) // BLOCK_TOKENS * BLOCK_TOKENS
    if window is not None:
        low = tl.maximum(first_position + 1 - window, 0)
        shared = 0  # a window's blocks are few: all of them are masked
    start_token, first_token, split_tokens, used = cut_context(
        low, last, splits, least_tokens, FIXED, BLOCK_TOKENS
    )
    if split > 0 and split >= used:
        return  # the second kernel is told how many there are
    row_table = table + tl.load(rows + sequence).to(tl.int64) * table_stride
    k += head * HEAD_STRIDE
    v += head * HEAD_STRIDE
    if k_scales is not None:
        k_scales += head * SCALE_HEAD_STRIDE
        v_scales += head * SCALE_HEAD_STRIDE
        if queries.dtype != tl.float32:
            queries, power = half_queries(queries)
            scaling = (scaling * power)[:, None]
    if FIXED and splits == 1:  # all of them, one after the other
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
    begin,  # tokens [begin, end), of which rows see [begin, shared) whole
    end,
    shared,
    position,  # int32 [rows], of each query
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
    """The state of the rows after tokens `[begin, end)` alone."""
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
