"""The order of rows for grouped products of experts: blocks of rows, of which each belongs to one expert.

Each token chooses several experts; such a choice is a pair. Pairs of one expert become adjacent, and each expert's
last block is padded. Sizes that the host knows bound the number of blocks, so the launch can be recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.common import block_of, on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend

UNUSED = -1
_LOADED = (128, 1024)
"""Pairs that a program loads at once, for few pairs and for many."""


class ExpertRows(NamedTuple):
    """Blocks of pairs. Pair `p` is the choice `p % choices` of token `p // choices`."""

    pairs: torch.Tensor
    """Pair of each row, int32 `[blocks * block_rows]`; `UNUSED` in padded rows. Undefined in unused blocks."""
    owners: torch.Tensor
    """Expert of each block, int32 `[blocks]`; `UNUSED` in blocks after the last pair."""

    @property
    def block_rows(self) -> int:
        """Number of rows in a block."""
        return len(self.pairs) // max(1, len(self.owners))


def most_blocks(pairs: int, experts: int, block_rows: int) -> int:
    """Returns the largest number of blocks of `pairs` pairs, however many experts they choose."""
    chosen = min(pairs, experts)
    return chosen + (pairs - chosen) // block_rows


def expert_rows(chosen: torch.Tensor, experts: int, block_rows: int) -> ExpertRows:
    """Returns the order of the pairs of `chosen`.

    `chosen`: numbers of experts, int64 or int32 `[tokens, choices]`, contiguous. Pairs with a number of `experts` or
    more choose no expert, and are in no block.

    Blocks are ordered by expert, rows of an expert by pair. On CUDA: one launch on the current stream, no
    synchronization. Raises ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    _check(chosen, experts, block_rows)
    if backend(chosen.device) != "triton":
        return expert_rows_reference(chosen, experts, block_rows)
    found = _empty(chosen, experts, block_rows)
    if chosen.numel() == 0:
        return found
    with on_device(chosen):
        expert_rows_kernel[(experts,)](
            chosen,
            found.pairs,
            found.owners,
            chosen.numel(),
            len(found.owners),
            BINS=max(2, block_of(experts)),
            BLOCK_ROWS=block_rows,
            LOADED=_LOADED[chosen.numel() > _LOADED[0]],
            num_warps=4,
        )
    return found


def expert_rows_reference(chosen: torch.Tensor, experts: int, block_rows: int) -> ExpertRows:
    """Computes `expert_rows` in plain torch, on any device. Synchronizes."""
    _check(chosen, experts, block_rows)
    found = _empty(chosen, experts, block_rows)
    found.pairs.fill_(UNUSED)
    found.owners.fill_(UNUSED)
    block, flat = 0, chosen.reshape(-1)
    for expert in range(experts):
        own = (flat == expert).nonzero().reshape(-1).int()
        start = block * block_rows
        found.pairs[start : start + len(own)] = own
        used = -(-len(own) // block_rows)
        found.owners[block : block + used] = expert
        block += used
    return found


def _empty(chosen: torch.Tensor, experts: int, block_rows: int) -> ExpertRows:
    blocks = most_blocks(chosen.numel(), experts, block_rows)
    sizes = (blocks * block_rows, blocks)
    pairs, owners = (torch.empty(size, dtype=torch.int32, device=chosen.device) for size in sizes)
    return ExpertRows(pairs, owners)


def _check(chosen: torch.Tensor, experts: int, block_rows: int) -> None:
    if chosen.dtype not in (torch.int64, torch.int32) or chosen.dim() != 2 or not chosen.is_contiguous():
        raise ValueError(
            f"chosen must be int64 or int32 [tokens, choices], contiguous; got {describe(chosen)}"
        )
    if experts < 1 or block_rows < 1 or block_rows & (block_rows - 1):
        raise ValueError(f"experts = {experts} must be at least 1, block_rows = {block_rows} a power of two")


@triton.jit(do_not_specialize=["pairs", "blocks"])  # type: ignore[untyped-decorator]
def expert_rows_kernel(  # type: ignore[no-untyped-def]
    # tensors
    chosen,
    rows,
    owners,
    # sizes
    pairs,
    blocks,
    # meta
    BINS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    LOADED: tl.constexpr,  # noqa: N803
):
    """A program orders the pairs of one expert. Each counts the pairs of all experts, and needs no other program."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, LOADED):
        pair = first + tl.arange(0, LOADED)
        ids = tl.load(chosen + pair, mask=pair < pairs, other=BINS).to(tl.int32)
        counts += tl.histogram(ids, BINS, mask=ids < BINS)
    used = (counts + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    block = tl.sum(tl.where(bins < expert, used, 0), 0)
    own = tl.sum(tl.where(bins == expert, used, 0), 0)
    for number in range(0, own):
        tl.store(owners + block + number, expert)
    start = block * BLOCK_ROWS
    seen = tl.zeros([], tl.int32)
    for first in range(0, pairs, LOADED):
        pair = first + tl.arange(0, LOADED)
        mask = pair < pairs
        ids = tl.load(chosen + pair, mask=mask, other=0).to(tl.int32)
        mine = ((ids == expert) & mask).to(tl.int32)
        place = start + seen + tl.cumsum(mine, 0) - 1
        tl.store(rows + place, pair, mask=mine != 0)
        seen += tl.sum(mine, 0)
    padding = seen + tl.arange(0, BLOCK_ROWS)
    tl.store(rows + start + padding, tl.full([BLOCK_ROWS], -1, tl.int32), mask=padding < own * BLOCK_ROWS)
    if expert == tl.num_programs(0) - 1:
        for number in range(block + own, blocks):
            tl.store(owners + number, -1)
