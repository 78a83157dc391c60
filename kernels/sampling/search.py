"""Searches in one row of logits without a sort; parts of the kernel in `kernels.sampling.draw`.

The mass of a value is the sum of the units of all logits up to the value, or with `COUNT` the number of these logits.
A search finds the smallest logit whose mass reaches a target. Each pass over the row computes the masses of several
values, and thereby narrows the bracket of the result. When few logits are left in the bracket, the last pass copies
these logits to a list, and the search ends in the list. The result is exact, because masses are integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.units import units_of

PIVOTS = tl.constexpr(8)
"""Number of values whose masses one pass computes."""
_STAGES = tl.constexpr(4)
"""Pipeline stages of a pass: number of blocks that are loaded at the same time."""
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_SIGN = tl.constexpr(-(1 << 31))
_NO_KEY = _SIGN
_NAN_KEY = tl.constexpr(0x7FFFFFFF)
INFINITE_KEY = tl.constexpr(0x7F800000)
LOWEST_KEY = tl.constexpr(-0x7F800000)
"""Key of -infinity; `INFINITE_KEY` is the key of infinity."""
_MOST_MASS = tl.constexpr(1 << 62)


@triton.jit
def key_of(value):  # type: ignore[no-untyped-def]
    """Returns int32 keys that have the order of float32 `value`; 0.0 and -0.0 have one key. Undefined for NaN."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def value_of(key):  # type: ignore[no-untyped-def]
    """Returns the float32 value of a key of any integer type."""
    key = key.to(tl.int32)
    return tl.where(key < 0, -key | _SIGN, key).to(tl.float32, bitcast=True)


@triton.jit
def next_smaller(value):  # type: ignore[no-untyped-def]
    """Returns the next smaller float32 value; -infinity for -infinity."""
    return value_of(tl.maximum(key_of(value) - 1, LOWEST_KEY))


@triton.jit
def load_logits(row, place, vocab):  # type: ignore[no-untyped-def]
    """Loads the logits at the indices `place`; -infinity beyond the vocabulary."""
    return tl.load(row + place, mask=place < vocab, other=-_INFINITY)


@triton.jit  # type: ignore[untyped-decorator]
def highest_of(row, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Returns the key of the row's highest logit, the key of each lane's highest logit, and the index of the row's
    highest logit (the lowest index, if there are several).

    NaN is above all other logits. Lane `i` of `BLOCK` lanes reads index `i` and every `BLOCK`-th index after `i`.
    """
    best = tl.full([BLOCK], _NO_KEY, tl.int32)
    at = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, vocab, BLOCK, num_stages=_STAGES):
        place = first + tl.arange(0, BLOCK)
        logits = load_logits(row, place, vocab)
        key = tl.where(logits == logits, key_of(logits), _NAN_KEY)
        better = key > best
        best = tl.where(better, key, best)
        at = tl.where(better, place, at)
    highest = tl.max(best, 0)
    return highest, best, tl.min(tl.where(best == highest, at, vocab), 0)


@triton.jit  # type: ignore[untyped-decorator]
def masses_of(  # type: ignore[no-untyped-def]
    row,
    vocab,
    values,  # float32 [PIVOTS]
    highest,
    scale,
    COUNT: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Returns the mass of each value, int64 `[PIVOTS]`."""
    masses = tl.zeros([PIVOTS, BLOCK], tl.int64)
    for first in tl.range(0, vocab, BLOCK, num_stages=_STAGES):
        place = first + tl.arange(0, BLOCK)
        logits = load_logits(row, place, vocab)
        units = (place < vocab).to(tl.int64) if COUNT else units_of(logits, highest, scale, BITS)
        masses += tl.where(logits[None, :] <= values[:, None], units[None, :], 0)
    return tl.sum(masses, 1)


@triton.jit
def narrowed(values, masses, target, low, low_mass, high, high_mass):  # type: ignore[no-untyped-def]
    """Narrows the bracket `(low, high]` that contains the result of a search, by the masses of `values`.

    Returns the new `low` and its mass, and the new `high` and its mass.
    """
    under = masses < target
    low = tl.maximum(low, tl.max(tl.where(under, values, -_INFINITY), 0))
    low_mass = tl.maximum(low_mass, tl.max(tl.where(under, masses, 0), 0))
    high = tl.minimum(high, tl.min(tl.where(under, _INFINITY, values), 0))
    high_mass = tl.minimum(high_mass, tl.min(tl.where(under, _MOST_MASS, masses), 0))
    return low, low_mass, high, high_mass


@triton.jit
def _between(low, high):  # type: ignore[no-untyped-def]
    """Returns values between `low` and `high`, float32 `[PIVOTS]`: evenly spaced values and the value of the middle
    key.

    The middle key guarantees that a pass at least halves the number of keys in the bracket.
    """
    low_key, high_key = key_of(low).to(tl.int64), key_of(high).to(tl.int64)
    number = tl.arange(0, PIVOTS)
    share = number.to(tl.float32) * (1.0 / PIVOTS)
    even = tl.maximum(low, -_LARGEST) * (1.0 - share) + high * share
    values = tl.where(number == 0, value_of((low_key + high_key) >> 1), even)
    return tl.minimum(tl.maximum(values, value_of(low_key + 1)), value_of(high_key - 1))


@triton.jit  # type: ignore[untyped-decorator]
def _collect(row, vocab, low, high, found, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Copies the logits in `(low, high]` to `found` and returns their number."""
    count = 0
    for first in tl.range(0, vocab, BLOCK, num_stages=_STAGES):
        logits = load_logits(row, first + tl.arange(0, BLOCK), vocab)
        inside = ((logits > low) & (logits <= high)).to(tl.int32)
        tl.store(found + count + tl.cumsum(inside, 0) - 1, logits, mask=inside > 0)
        count += tl.sum(inside, 0)
    tl.debug_barrier()  # makes the list visible to all threads
    return count


@triton.jit
def search_keys(keys, masses, target, below_all, low, high):  # type: ignore[no-untyped-def]
    """Returns the smallest key whose mass reaches `target`, and the mass of all smaller keys.

    `keys`: int32 `[n]`. `masses`: int64 `[n]`, 0 for a key to ignore. `below_all`: the mass of all logits up to
    `low`, which are not among `keys`. The result is in `(low, high]`; both ends are int64 keys.
    """
    low_mass = below_all
    while high - low > 1:
        middle = (low + high) >> 1
        mass = below_all + tl.sum(tl.where(keys <= middle, masses, 0), 0)
        low = tl.where(mass < target, middle, low)
        low_mass = tl.where(mass < target, mass, low_mass)
        high = tl.where(mass < target, high, middle)
    return high, low_mass


@triton.jit  # type: ignore[untyped-decorator]
def search(  # type: ignore[no-untyped-def]
    row,
    vocab,
    found,  # float32 [LIST]: scratch memory of the row
    target,
    low,
    low_mass,
    high,
    high_mass,
    highest,
    scale,
    COUNT: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    LIST: tl.constexpr,  # noqa: N803
):
    """Returns the smallest logit whose mass reaches `target`, and the mass of all smaller logits.

    The result is in `(low, high]`. `low_mass` and `high_mass` are the masses of both ends; `low_mass` must be less
    than `target`.
    """
    lightest = tl.full([], 1, tl.int64)
    if not COUNT:
        lightest = units_of(low, highest, scale, BITS)
    while (key_of(high).to(tl.int64) - key_of(low) > 1) & (high_mass - low_mass > LIST * lightest):
        values = _between(low, high)
        masses = masses_of(row, vocab, values, highest, scale, COUNT, BITS, BLOCK)
        low, low_mass, high, high_mass = narrowed(values, masses, target, low, low_mass, high, high_mass)
        if not COUNT:
            lightest = units_of(low, highest, scale, BITS)
    low_key, high_key = key_of(low).to(tl.int64), key_of(high).to(tl.int64)
    if high_key - low_key > 1:
        place = tl.arange(0, LIST)
        inside = place < _collect(row, vocab, low, high, found, BLOCK)
        logits = tl.load(found + place, mask=inside, other=-_INFINITY)
        units = inside.to(tl.int64) if COUNT else units_of(logits, highest, scale, BITS)
        high_key, low_mass = search_keys(key_of(logits), units, target, low_mass, low_key, high_key)
        tl.debug_barrier()  # all threads have read the list, which may be overwritten now
    return value_of(high_key), low_mass


@triton.jit  # type: ignore[untyped-decorator]
def index_of(row, vocab, value, rank, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Returns the index of the `rank`-th logit (counted from 1) among the logits that equal `value`."""
    seen = tl.zeros([], tl.int64)
    index = tl.full([], -1, tl.int32)
    first = tl.zeros([], tl.int32)
    while (first < vocab) & (index < 0):
        place = first + tl.arange(0, BLOCK)
        equal = (load_logits(row, place, vocab) == value).to(tl.int32)
        count = tl.sum(equal, 0)
        if seen + count >= rank:
            chosen = (equal > 0) & (seen + tl.cumsum(equal, 0) == rank)
            index = tl.min(tl.where(chosen, place, vocab), 0)
        seen += count
        first += BLOCK
    return index
