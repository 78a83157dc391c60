"""Draws from a short list of a row's likeliest tokens, which contains the result of most draws.

The first pass over a row finds the highest logit of the row and of each lane; each lane reads a different part of the
row. If a `share` of the lanes has a logit of at least `x`, about `-lanes * ln(1 - share)` logits of the row are at
least `x`, for any distribution. The second pass copies these logits to the list. If the drawn token is in the list,
the draw needs no further pass. Otherwise `kernels.sampling.draw` searches the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.search import LOWEST_KEY, key_of, load_logits, search_keys, value_of
from kernels.sampling.units import units_of

_SHARE = tl.constexpr(2)
"""Half of the lanes (1 of `_SHARE`) have a logit in the list. The list then has about 0.69 logits per lane."""
_STAGES = tl.constexpr(3)


@triton.jit
def lowest_candidate(best):  # type: ignore[no-untyped-def]
    """Returns the largest key, int64, that at least `1 / _SHARE` of the lanes reach; never the key of -infinity.

    `best`: int32 `[lanes]`, the highest key of each lane.
    """
    low = tl.full([], LOWEST_KEY + 1, tl.int64)
    high = tl.max(best, 0).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum((best >= middle).to(tl.int32), 0) * _SHARE >= best.shape[0]
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def list_candidates(  # type: ignore[no-untyped-def]
    row,
    vocab,
    least,  # float32: lowest logit of the list
    highest,
    scale,
    values,  # float32 [LIST]: scratch memory of the row
    indices,  # int32 [LIST]
    BITS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    BLOCK: tl.constexpr,  # noqa: N803
    LIST: tl.constexpr,  # noqa: N803
):
    """Copies the logits that are at least `least` to the list, in the order of indices.

    Returns the number of these logits, which may exceed the list's capacity `LIST`, and the mass of the whole row.
    """
    count = 0
    masses = tl.zeros([BLOCK], tl.int64)
    for first in tl.range(0, vocab, BLOCK, num_stages=_STAGES):
        place = first + tl.arange(0, BLOCK)
        logits = load_logits(row, place, vocab)
        masses += units_of(logits, highest, scale, BITS)
        inside = (logits >= least).to(tl.int32)
        slot = count + tl.cumsum(inside, 0) - 1
        listed = (inside > 0) & (slot < LIST)
        tl.store(values + slot, logits, mask=listed)
        tl.store(indices + slot, place, mask=listed)
        count += tl.sum(inside, 0)
    tl.debug_barrier()  # makes the list visible to all threads
    return count, tl.sum(masses, 0)


@triton.jit  # type: ignore[untyped-decorator]
def draw_listed(  # type: ignore[no-untyped-def]
    row,
    vocab,
    best,  # int32 [lanes]: highest key of each lane
    highest,
    scale,
    tail,  # float64
    gap,
    k,
    uniform,  # float64
    values,  # float32 [LIST]: scratch memory of the row
    indices,  # int32 [LIST]
    BITS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    LIST: tl.constexpr,  # noqa: N803
):
    """Returns the drawn token; -1 if the drawn token, or the last token that a filter keeps, may be outside the
    list."""
    lowest = lowest_candidate(best)
    count, total = list_candidates(
        row, vocab, value_of(lowest), highest, scale, values, indices, BITS, BLOCK, LIST
    )
    token = tl.full([], -1, tl.int32)
    if count <= LIST:
        place = tl.arange(0, LIST)
        listed = place < count
        logits = tl.load(values + place, mask=listed, other=0.0)
        keys = tl.where(listed, key_of(logits), LOWEST_KEY)
        units = tl.where(listed, units_of(logits, highest, scale, BITS), 0)
        outside = total - tl.sum(units, 0)
        low, high = lowest - 1, key_of(highest).to(tl.int64)
        limited = (k > 0) & (k < vocab)
        least, _ = search_keys(keys, listed.to(tl.int64), count - k + 1, low * 0, low, high)
        by_k = outside + tl.sum(tl.where(keys < least, units, 0), 0)
        by_k = tl.where(limited & (k <= count), by_k, 0)
        edge = key_of(highest - gap)
        inside = edge > low
        by_gap = tl.where(inside, outside + tl.sum(tl.where(keys < edge, units, 0), 0), 0)
        rest = total - by_k
        last = by_k + tl.minimum((rest.to(tl.float64) * tail).to(tl.int64), rest - 1)
        edge_key, mass = search_keys(keys, units, last + 1, outside, low, high)
        unit = tl.maximum(units_of(value_of(edge_key), highest, scale, BITS), 1)
        by_p = tl.where(tail > 0, mass + (last - mass) // unit * unit, 0)
        dropped = tl.maximum(tl.maximum(by_k, by_gap), by_p)
        kept = total - dropped
        target = dropped + tl.maximum(kept - (kept.to(tl.float64) * uniform).to(tl.int64), 1)
        found, mass = search_keys(keys, units, target, outside, low, high)
        unit = tl.maximum(units_of(value_of(found), highest, scale, BITS), 1)
        rank = (target - mass + unit - 1) // unit
        same = listed & (keys == found)
        number = tl.cumsum(same.to(tl.int32), 0)
        index = tl.load(indices + place, mask=listed, other=0)
        # The edge of a filter (its last kept token) is known if the filter is off or the edge is in the list. The
        # edge does not matter if a later filter drops more tokens.
        knows_k = (k <= count) | (outside == 0) | (limited == 0)
        knows_p = last >= outside
        knows_gap = inside | (outside == 0) | (gap == float("inf"))
        known = tl.where(tail > 0, knows_k & knows_p, knows_k & (knows_gap | (dropped >= outside)))
        known &= target > outside
        token = tl.where(known, tl.max(tl.where(same & (number == rank), index, -1), 0), -1)
    return token
