"""Weights of a softmax as integers, so that their sums do not depend on the order of summation.

The weight of a logit is `2 ** -x` with `x = (highest - logit) * scale`, in units of `2 ** -fraction_bits`. Each
operation is a product, sum or conversion that IEEE 754 defines, and kernels are compiled without fused products.
Therefore torch and Triton give equal bits on all devices. The error of a weight is at most one unit, plus 1.1e-7 of
the weight from the rounding of `x`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Coefficients of (2 ** -f - 1) / f for f from -0.5 to 0.5.
_C0 = tl.constexpr(-0.6931471824645996)
_C1 = tl.constexpr(0.24022650718688965)
_C2 = tl.constexpr(-0.05550327152013779)
_C3 = tl.constexpr(0.009618035517632961)
_C4 = tl.constexpr(-0.0013400432653725147)
_C5 = tl.constexpr(0.00015467364573848128)
_MOST = tl.constexpr(63.0)
"""Upper limit of `x`. At the limit, the weight is 0 units."""
_MANTISSA_BITS = tl.constexpr(23)
_MANTISSA = tl.constexpr(float(1 << 23))


def fraction_bits(vocab: int) -> int:
    """Returns the fraction bits of a weight, so that the sum of `vocab` weights (at most 1 each) fits into 62
    bits."""
    return min(44, 62 - vocab.bit_length())


def units_reference(
    logits: torch.Tensor, highest: torch.Tensor, scale: torch.Tensor, bits: int
) -> torch.Tensor:
    """Returns the weights in units of `2 ** -bits`, int64 of the shape of `logits`, on any device.

    `logits`: float32 `[n, vocab]`, finite or -inf; `highest` and `scale`: float32 `[n, 1]`.
    """
    x = ((highest - logits) * scale).clamp_(max=_MOST.value)
    k = (x + 0.5).to(torch.int32)
    f = x - k.float()
    p = f * _C5.value + _C4.value
    for coefficient in (_C3, _C2, _C1, _C0):
        p = p * f + coefficient.value
    mantissa = ((p * f + 1.0) * _MANTISSA.value).long()
    units: torch.Tensor = (mantissa << (bits - _MANTISSA_BITS.value)) >> k.long()
    return units


@triton.jit  # type: ignore[untyped-decorator]
def units_of(logits, highest, scale, BITS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Computes `units_reference` for a block of one row's logits, with the row's `highest` and `scale`."""
    x = tl.minimum((highest - logits) * scale, _MOST)
    k = (x + 0.5).to(tl.int32)
    f = x - k.to(tl.float32)
    p = f * _C5 + _C4
    p = p * f + _C3
    p = p * f + _C2
    p = p * f + _C1
    p = p * f + _C0
    mantissa = ((p * f + 1.0) * _MANTISSA).to(tl.int64)
    return (mantissa << (BITS - _MANTISSA_BITS)) >> k.to(tl.int64)
