"""Contexts cut into splits that several programs go over at once, and what joins them (FlashDecoding).

How many splits some rows have follows from how many tokens they see, which only the device knows: as many as give
each some tokens to do. The grid has room for the most there can be, so the launch can be recorded in a CUDA graph;
programs beyond end at once. Rows of one split are done when their program is; a second kernel joins the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention import LOG2_E, block_of

_MAX_SPLITS = 128
_COMBINED_ELEMENTS = 4096
"""Of partial results that a program of the second kernel holds at a time."""


@dataclass(frozen=True, slots=True)
class Splits:
    """How contexts are cut, whatever their lengths will be."""

    most: int
    """Of one sequence."""
    least_tokens: int
    """Of one split, but for a sequence's last one."""


def splits_of(programs: int, most_programs: int, max_tokens: int, least_tokens: int) -> Splits:
    """For so many `programs` before any context is cut, and contexts of up to `max_tokens`."""
    most = min(most_programs // max(1, programs), _MAX_SPLITS, -(-max_tokens // least_tokens))
    return Splits(max(1, most), least_tokens)


@lru_cache
def _nothing(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What kernels are given where no context can be cut: so they compile once, whether contexts are cut or not."""
    return torch.empty(4, device=device), torch.empty(4, dtype=torch.int32, device=device)


class Partials:
    """What the splits of each row leave for the second kernel."""

    def __init__(self, out: torch.Tensor, splits: Splits, *, strangers: bool) -> None:
        """`out`: `[tokens, q_heads, v_dim]`, where the results go. `strangers`: some tokens may be no sequence's, and
        are left alone. Nothing is allocated if no context can be cut."""
        self._out, self._splits = out, splits
        nothing, none_used = _nothing(out.device)
        self.results, self.lse, self.used = nothing, nothing, none_used
        if splits.most > 1:
            tokens, q_heads, v_dim = out.shape
            shape = (tokens, q_heads, splits.most)
            self.results = torch.empty(*shape, v_dim, dtype=torch.float32, device=out.device)
            self.lse = torch.empty(shape, dtype=torch.float32, device=out.device)
            make = torch.zeros if strangers else torch.empty
            self.used = make(tokens, q_heads, dtype=torch.int32, device=out.device)

    def join(self, sinks: torch.Tensor | None) -> None:
        """Writes the rows that have several splits; on the current device's current stream."""
        if self._splits.most == 1:
            return
        tokens, q_heads, v_dim = self._out.shape
        block_v = block_of(v_dim)
        _join_kernel[(q_heads, tokens)](
            self.results,
            self.lse,
            self.used,
            sinks,
            self._out,
            self._splits.most,
            V_DIM=v_dim,
            BLOCK_SPLITS=max(1, _COMBINED_ELEMENTS // block_v),
            BLOCK_V=block_v,
            enable_fp_fusion=True,
        )


@triton.jit  # type: ignore[untyped-decorator]
def split_tokens_of(tokens, splits, least_tokens, BLOCK_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Tokens of each split of so many, in whole blocks."""
    split_tokens = tl.maximum(tl.cdiv(tokens, splits), least_tokens)
    return tl.cdiv(split_tokens, BLOCK_TOKENS) * BLOCK_TOKENS


@triton.jit  # type: ignore[untyped-decorator]
def write_results(  # type: ignore[no-untyped-def]
    # of one split, as `add_block` leaves them
    largest,
    total,
    values_sum,
    # where they go
    row,  # int64 [rows], query token x query heads + query head
    real,  # bool [rows]
    split,
    used,  # splits that these rows have
    splits,
    partial,
    lse,
    used_splits,
    sink,  # float32 [rows] in units of log 2, or None
    out,
    V_DIM: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """The results themselves, where nothing has to be joined."""
    element = tl.arange(0, BLOCK_V)
    mask = real[:, None] & (element < V_DIM)[None, :]
    if (splits > 1) & (split == 0):
        tl.store(used_splits + row, tl.zeros_like(row).to(tl.int32) + used, mask=real)
    # A sequence of length 0, or rows that see nothing of this split: `largest` is -inf then.
    divisor = tl.where(total == 0.0, 1.0, total)
    if used > 1:
        place = row * splits + split
        tl.store(lse + place, largest + tl.log2(divisor), mask=real)
        tl.store(
            partial + place[:, None] * V_DIM + element[None, :], values_sum / divisor[:, None], mask=mask
        )
    else:
        if sink is not None:
            new_largest = tl.maximum(largest, sink)
            shrink = tl.exp2(largest - new_largest)
            divisor = total * shrink + tl.exp2(sink - new_largest)
            values_sum = values_sum * shrink[:, None]
        result = (values_sum / divisor[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * V_DIM + element[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _join_kernel(  # type: ignore[no-untyped-def]
    # tensors
    partial,
    lse,
    used_splits,
    sinks,
    out,
    # sizes
    splits,
    # meta
    V_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SPLITS: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    q_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + q_head
    used = tl.load(used_splits + row)
    if used <= 1:
        return  # its program has written the result
    element = tl.arange(0, BLOCK_V)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + q_head + tl.arange(0, 1)).to(tl.float32) * LOG2_E
        total = total + 1.0  # exp2(sink - largest)
    values_sum = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, used, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        inside = split < used  # the others were not written
        place = row * splits + split
        level = tl.load(lse + place, mask=inside, other=float("-inf"))
        found = tl.load(
            partial + place[:, None] * V_DIM + element[None, :],
            mask=inside[:, None] & (element < V_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(level, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # no split so far has a token to see
        weights = tl.exp2(level - base)
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 0)
        values_sum = values_sum * shrink + tl.sum(found * weights[:, None], 0)
        largest = new_largest
    tl.store(out + row * V_DIM + element, (values_sum / total).to(out.dtype.element_ty), mask=element < V_DIM)
