"""Splitting of contexts over several programs, and the kernel that joins the partial results (FlashDecoding).

The number of splits of a row depends on the number of tokens that the row sees, which is known only on the device.
The grid covers the maximum number of splits, so that the launch can be captured in a CUDA graph; surplus programs end
at once. A row with one split is complete when its program ends. For other rows a second kernel joins the splits.

The size of splits either follows from the number of programs in the launch, to keep the device busy, or is *fixed*.
Fixed splits begin at multiples of `FIXED_SPLIT_TOKENS`, and are joined in order. A row's result then has the same
bits for any batch (batch-invariant attention: Thinking Machines, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention.block import attended, join_states
from kernels.attention.common import LOG2_E, block_of
from kernels.overlap import overlap, wait_for_previous

FIXED_SPLIT_TOKENS = 1024
"""Length of fixed splits, in tokens. The bits of results depend on it, so all groups of a cluster must use the same
length."""
_MAX_SPLITS = 128
_COMBINED_ELEMENTS = 4096
"""Elements of partial results that a program of the join kernel loads at once."""
_FEW_SPLITS = 4
"""Number of splits up to which one warp joins the splits of a row: most of a larger block would be masked."""
_LOADED_AHEAD = 4
"""Number of fixed splits whose partial results the join kernel loads ahead of their use."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Rule by which contexts are split, independent of their actual lengths."""

    most: int
    """Largest number of splits of one context, which separate programs process in parallel. 1: one program processes
    the whole context (fixed splits one after the other)."""
    least_tokens: int
    """Minimum tokens of a split, except the last split of a context. Fixed splits have exactly this size."""
    fixed: bool = False
    """Whether splits begin at multiples of `least_tokens`, so that no row's result depends on `most`."""


def splits_of(programs: int, most_programs: int, max_tokens: int, least_tokens: int) -> Splits:
    """Returns the splits for `programs` (before any context is split) and contexts of up to `max_tokens`."""
    most = min(most_programs // max(1, programs), _MAX_SPLITS, -(-max_tokens // least_tokens))
    return Splits(max(1, most), least_tokens)


def fixed_splits(
    max_tokens: int, *, window: bool, parallel: bool = True, tokens: int = FIXED_SPLIT_TOKENS
) -> Splits:
    """Returns fixed splits of `tokens` for rows that see up to `max_tokens`.

    A context with a `window` may begin within a split, and therefore needs one split more. Unless `parallel`, one
    program processes all splits of a context.
    """
    return Splits(-(-max_tokens // tokens) + window if parallel else 1, tokens, fixed=True)


def partials_bytes(out: torch.Tensor, splits: Splits) -> int:
    """Returns the memory of `Partials`, in bytes."""
    tokens, q_heads, v_dim = out.shape
    return 4 * tokens * q_heads * splits.most * (v_dim + 2) if splits.most > 1 else 0


@lru_cache
def _nothing(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns placeholders for the partial results of a launch without splits.

    With placeholders instead of None, one compiled kernel serves launches with and without splits.
    """
    return torch.empty(4, device=device), torch.empty(4, dtype=torch.int32, device=device)


class Partials:
    """Partial results of the splits of each row. The attention kernels write them, and `join` joins them."""

    def __init__(self, out: torch.Tensor, splits: Splits, *, unassigned: bool) -> None:
        """Allocates the partial results, if any context can be split.

        `out`: `[tokens, q_heads, v_dim]`, the final results. `unassigned`: whether some tokens of `out` may belong to
        no sequence; these tokens stay unchanged.
        """
        self._out, self._splits = out, splits
        nothing, none_used = _nothing(out.device)
        self.values, self.levels, self.used = nothing, nothing, none_used
        if splits.most > 1:
            tokens, q_heads, v_dim = out.shape
            shape = (tokens, q_heads, splits.most)
            self.values = torch.empty(*shape, v_dim, dtype=torch.float32, device=out.device)
            self.levels = torch.empty(2, *shape, dtype=torch.float32, device=out.device)
            make = torch.zeros if unassigned else torch.empty
            self.used = make(tokens, q_heads, dtype=torch.int32, device=out.device)

    def join(self, sinks: torch.Tensor | None) -> None:
        """Writes the final results of rows with several splits, on the current stream of the current device."""
        if self._splits.most == 1:
            return
        tokens, q_heads, v_dim = self._out.shape
        block_v = block_of(v_dim)
        block_splits, warps = max(1, _COMBINED_ELEMENTS // block_v), 4
        if self._splits.fixed:
            block_splits = _LOADED_AHEAD
        elif self._splits.most <= _FEW_SPLITS:
            block_splits, warps = _FEW_SPLITS, 1
        join_kernel[(q_heads, tokens)](
            self.values,
            self.levels,
            self.used,
            sinks,
            self._out,
            self._splits.most,
            V_DIM=v_dim,
            FIXED=self._splits.fixed,
            BLOCK_SPLITS=block_splits,
            BLOCK_V=block_v,
            num_warps=warps,
            enable_fp_fusion=True,
            **overlap(self._out.device),
        )


@triton.jit  # type: ignore[untyped-decorator]
def split_tokens_of(tokens, splits, least_tokens, BLOCK_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Returns the size of a split, a multiple of `BLOCK_TOKENS`, so that `tokens` need at most `splits` splits."""
    split_tokens = tl.maximum(tl.cdiv(tokens, splits), least_tokens)
    return tl.cdiv(split_tokens, BLOCK_TOKENS) * BLOCK_TOKENS


@triton.jit  # type: ignore[untyped-decorator]
def cut_context(  # type: ignore[no-untyped-def]
    low,  # first token that some row sees
    last,  # end of the tokens that some row sees
    splits,
    least_tokens,
    FIXED: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
):
    """Returns the start of the first block, the start of the first split, the tokens of a split, and the number of
    splits.
    """
    if FIXED:
        start = low // BLOCK_TOKENS * BLOCK_TOKENS
        first = low // least_tokens * least_tokens
        split_tokens = least_tokens
    else:
        start, first = low, low
        split_tokens = split_tokens_of(last - low, splits, least_tokens, BLOCK_TOKENS)
    return start, first, split_tokens, tl.cdiv(last - first, split_tokens)


@triton.jit  # type: ignore[untyped-decorator]
def write_results(  # type: ignore[no-untyped-def]
    # softmax state of one split or of the whole context
    largest,
    total,
    values_sum,
    # destinations
    row,  # int64 [rows], query token x query heads + query head
    real,  # bool [rows], False for padding
    split,
    used,  # number of splits of these rows
    splits,
    partial_values,
    partial_levels,
    used_splits,
    rows,  # number of rows of `partial_levels`
    sink,  # float32 [rows] in units of log 2, or None
    out,
    V_DIM: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """Writes the final results of rows with one split; for more splits, the partial results of this split."""
    element = tl.arange(0, BLOCK_V)
    mask = real[:, None] & (element < V_DIM)[None, :]
    if (splits > 1) & (split == 0):
        tl.store(used_splits + row, tl.zeros_like(row).to(tl.int32) + used, mask=real)
    summed = tl.max(total, 1)  # all columns are equal
    if (splits > 1) & (used > 1):
        place = row * splits + split
        tl.store(partial_levels + place, largest, mask=real)
        tl.store(partial_levels + rows * splits + place, summed, mask=real)
        tl.store(partial_values + place[:, None] * V_DIM + element[None, :], values_sum, mask=mask)
    else:
        result = attended(largest, summed, values_sum, sink).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * V_DIM + element[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def join_kernel(  # type: ignore[no-untyped-def]
    # tensors
    partial_values,
    partial_levels,
    used_splits,
    sinks,
    out,
    # sizes
    splits,
    # meta
    V_DIM: tl.constexpr,  # noqa: N803
    FIXED: tl.constexpr,  # noqa: N803
    BLOCK_SPLITS: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    wait_for_previous(OVERLAP)
    q_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + q_head
    used = tl.load(used_splits + row)
    if used <= 1:
        return  # the row's program has written the result
    rows = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    element = tl.arange(0, BLOCK_V)
    inside = (element < V_DIM)[None, :]
    one = tl.arange(0, 1)
    levels, totals = partial_levels + row * splits, partial_levels + (rows + row) * splits
    values = partial_values + row * splits * V_DIM + element[None, :]
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1, 1], tl.float32)
    values_sum = tl.zeros([1, BLOCK_V], tl.float32)
    for start in range(0, used, BLOCK_SPLITS):
        if FIXED:
            for ahead in tl.static_range(BLOCK_SPLITS):
                split = start + ahead + one
                there = split < used  # later splits were not written
                largest, total, values_sum = join_states(
                    largest,
                    total,
                    values_sum,
                    tl.load(levels + split, mask=there, other=float("-inf")),
                    tl.load(totals + split, mask=there, other=0.0)[:, None],
                    tl.load(values + split[:, None] * V_DIM, mask=there[:, None] & inside, other=0.0),
                )
        else:
            split = start + tl.arange(0, BLOCK_SPLITS)
            there = split < used
            level = tl.load(levels + split, mask=there, other=float("-inf"))
            weight = tl.load(totals + split, mask=there, other=0.0)
            found = tl.load(values + split[:, None] * V_DIM, mask=there[:, None] & inside, other=0.0)
            top = tl.max(level, 0)
            base = tl.where(top == float("-inf"), 0.0, top)  # -inf: these splits have no visible token
            factor = tl.exp2(level - base)
            largest, total, values_sum = join_states(
                largest,
                total,
                values_sum,
                tl.zeros([1], tl.float32) + top,
                tl.zeros([1, 1], tl.float32) + tl.sum(weight * factor, 0),
                tl.sum(found * factor[:, None], 0)[None, :],
            )
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + q_head + one).to(tl.float32) * LOG2_E
    result = attended(largest, tl.max(total, 1), values_sum, sink).to(out.dtype.element_ty)
    tl.store(out + row * V_DIM + element[None, :], result, mask=inside)
