"""Log-softmax and likeliest tokens whose bits depend on one row only, not on the batch.

torch sums floats in an order that depends on the number of rows and on a row's address. Integer sums do not depend on
order. Each weight `exp(score - highest)` therefore becomes an integer number of units of `2^-44` before any sum.
Elementwise operations have the same bits everywhere.

A row's sum stays below 2^62 for vocabularies of less than 2^18 tokens; larger vocabularies use larger units. A weight
below half a unit (3e-14 of the likeliest token's weight) counts as 0. The error of a sum is at most half a unit per
token: 4e-9 in a vocabulary of 2^17 tokens, less than the resolution of float32 (6e-8).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_FRACTION_BITS = 44
_SUM_BITS = 62
_LOW = (1 << 32) - 1


class Top(NamedTuple):
    """The largest values of each row, largest first."""

    values: torch.Tensor
    indices: torch.Tensor


def in_units(weights: torch.Tensor) -> torch.Tensor:
    """Returns `weights`, `[n, vocab]` from 0 to 1, as int64 units; sums over a row are exact, in any order."""
    return (weights * float(1 << _fraction_bits(weights.shape[-1]))).round_().long()


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns the log-softmax, float32 `[n, vocab]`; rows without a finite highest logit contain NaN."""
    wide = logits.double()
    shifted = wide - wide.amax(dim=-1, keepdim=True)
    total = in_units(shifted.exp()).sum(dim=-1, keepdim=True).double()
    return (shifted - (total / float(1 << _fraction_bits(logits.shape[-1]))).log()).float()


def top(values: torch.Tensor, count: int) -> Top:
    """Returns the `count` largest values in the last dimension of float32 `[.., n]`, n < 2^32, and their indices.

    NaN comes first, and equal values are in the order of their indices; `torch.topk` does not define this order.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # as integers in the order of the floats
    ordered.masked_fill_(values.isnan(), 0x7FFFFFFF)
    place = _LOW - torch.arange(values.shape[-1], device=values.device)
    keys = ((ordered << 32) | place).topk(count, dim=-1).values
    indices = _LOW - (keys & _LOW)
    return Top(values.gather(-1, indices), indices)


def _fraction_bits(vocab: int) -> int:
    return min(_FRACTION_BITS, _SUM_BITS - vocab.bit_length())
