"""A uniform random number for each (seed, position), by the counter-based generator Philox 4x64-10.

The numbers equal `numpy.random.Generator(numpy.random.Philox(key=(seed, position))).random()`. The generator has no
state, so any rank can repeat a draw.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

_MULTIPLIER_0 = tl.constexpr(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = tl.constexpr(0xCA5A826395121157)
_WEYL_0 = tl.constexpr(0x9E3779B97F4A7C15)
_WEYL_1 = tl.constexpr(0xBB67AE8584CAA73B)
_ROUNDS = tl.constexpr(10)
_UNIT = tl.constexpr(2.0**-53)


def uniform_reference(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns uniform numbers in [0, 1), float64 `[n]`, for int64 `seeds` and `positions` `[n]`; computed by
    numpy."""
    drawn = [
        float(np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64))).random())
        for key in zip(_unsigned(seeds), _unsigned(positions), strict=True)
    ]
    return torch.tensor(drawn, dtype=torch.float64, device=seeds.device)


def _unsigned(values: torch.Tensor) -> list[int]:
    return [value % 2**64 for value in values.tolist()]


@triton.jit
def uniform_of(seed, position):  # type: ignore[no-untyped-def]
    """Returns the uniform number in [0, 1), float64, for one int64 `seed` and `position`.

    The counter of the generator is 1, as for the first block of numpy's generator.
    """
    key_0 = seed.to(tl.uint64)
    key_1 = position.to(tl.uint64)
    c0 = key_0 * 0 + 1
    c1 = key_0 * 0
    c2 = c1
    c3 = c1
    for _ in tl.static_range(_ROUNDS):
        low_0 = c0 * _MULTIPLIER_0
        low_1 = c2 * _MULTIPLIER_1
        high_0 = tl.umulhi(c0, tl.full([], _MULTIPLIER_0, tl.uint64))
        high_1 = tl.umulhi(c2, tl.full([], _MULTIPLIER_1, tl.uint64))
        c0 = high_1 ^ c1 ^ key_0
        c2 = high_0 ^ c3 ^ key_1
        c1 = low_1
        c3 = low_0
        key_0 += _WEYL_0
        key_1 += _WEYL_1
    return (c0 >> 11).to(tl.float64) * _UNIT
