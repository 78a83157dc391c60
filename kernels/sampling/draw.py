"""The next token of each row of a batch: its likeliest one, or a draw from what top-k, top-p and min-p leave.

Order and meaning of the filters are those of transformers' warpers: temperature, then top-k (ties with the k-th are
kept), then top-p (the token that crosses `top_p` is kept), then min-p. A filter drops the least likely tokens, equal
ones by index, so filters drop one mass at the lower end of a row's order. A draw is one uniform number through the
inverse of the cumulative distribution, whose order begins with the likeliest token. All masses are integers
(`kernels.sampling.units`): a row's token depends on no other row, and is the same on all devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from kernels.attention.layer_kv import describe
from kernels.sampling.philox import uniform_reference
from kernels.sampling.units import fraction_bits, units_reference

COLDEST = 1e-30
"""Lowest temperature of a draw, already greedy in effect; a lower one would make scores infinite."""
_HOTTEST = 1e30


@dataclass(frozen=True)
class DrawParams:
    """Parameters of each row, contiguous `[n]` on the device of the logits."""

    scales: torch.Tensor
    """float32: results of `scale_of`; 0 chooses the likeliest token."""
    tails: torch.Tensor
    """float32: 1 - top_p; 0 is off."""
    gaps: torch.Tensor
    """float32: a token whose logit is lower than the highest one by more is dropped (min-p); infinity is off."""
    top_k: torch.Tensor
    """int64; 0 is off."""
    seeds: torch.Tensor
    """int64."""
    positions: torch.Tensor
    """int64: indices of the drawn tokens in their answers. With the seed, they select the random number."""

    def check(self, logits: torch.Tensor) -> None:
        """Raises ValueError for tensors that do not fit float32 `[n, vocab]` logits."""
        if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
            raise ValueError(f"logits must be contiguous float32 [n, vocab]; got {describe(logits)}")
        for field in fields(self):
            values = getattr(self, field.name)
            dtype = torch.float32 if field.name in ("scales", "tails", "gaps") else torch.int64
            fits = values.shape == logits.shape[:1] and values.device == logits.device
            if not fits or values.dtype != dtype or not values.is_contiguous():
                raise ValueError(
                    f"{field.name} must be contiguous {dtype} [{len(logits)}] on {logits.device}; "
                    f"got {describe(values)} on {values.device}"
                )


def scale_of(temperature: float) -> float:
    """Returns the factor that turns a difference of logits into a power of 2; 0 for temperature 0."""
    if temperature <= 0:
        return 0.0
    return math.log2(math.e) / min(max(temperature, COLDEST), _HOTTEST)


def gap_of(min_p: float, temperature: float) -> float:
    """Returns the distance to the highest logit at which a token has `min_p` of the likeliest token's probability."""
    return math.inf if min_p <= 0 else -math.log(min_p) * min(max(temperature, COLDEST), _HOTTEST)


def likeliest_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Returns int64 `[n]`: the likeliest token of each row, the lowest of equal ones; -1 for bad logits.

    `logits`: float32 `[n, vocab]`. Reads them once, without synchronization.
    """
    tokens = torch.argmax(logits, dim=-1, keepdim=True)  # NaN is above all others
    finite = logits.gather(-1, tokens).abs() < math.inf  # two launches, where `isfinite` has four
    return torch.where(finite, tokens, -1)[:, 0]


def draw(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Returns int64 `[n]`: a token for each row of `logits` (contiguous float32 `[n, vocab]`); -1 for bad logits.

    Bad are logits with NaN or infinity, and rows that are -infinity everywhere. Raises ValueError (arguments).
    """
    return draw_reference(logits, params)


def draw_reference(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """`draw` in plain torch, on any device, by a sort of each row. Slow; numpy's generator synchronizes a GPU."""
    params.check(logits)
    vocab = logits.shape[-1]
    best = logits.amax(dim=-1, keepdim=True)  # NaN is above all others
    finite = torch.isfinite(best)
    scores = torch.where(finite, logits, 0.0) + 0.0  # -0.0 becomes 0.0
    highest = torch.where(finite, best, 0.0)
    ordered, order = torch.sort(
        scores, dim=-1, stable=True
    )  # ascending; of equal ones the lowest index first
    units = units_reference(ordered, highest, params.scales[:, None], fraction_bits(vocab))
    cumulative = units.cumsum(dim=-1)
    limited = (params.top_k > 0) & (params.top_k < vocab)
    first = torch.where(limited, vocab - params.top_k, 0)
    least = ordered.gather(-1, first[:, None])
    by_k = units.masked_fill(ordered >= least, 0).sum(dim=-1)
    by_gap = units.masked_fill(ordered >= highest - params.gaps[:, None], 0).sum(dim=-1)
    total = cumulative[:, -1]
    last = by_k + torch.minimum(_share(total - by_k, params.tails.double()), total - by_k - 1)
    by_p = cumulative.masked_fill(cumulative > last[:, None], 0).amax(dim=-1)
    dropped = torch.maximum(torch.maximum(by_k, by_p), by_gap)
    kept = total - dropped
    target = dropped + (kept - _share(kept, uniform_reference(params.seeds, params.positions))).clamp_(min=1)
    found = torch.searchsorted(cumulative, target[:, None]).clamp_(max=vocab - 1)
    drawn = torch.where(params.scales > 0, order.gather(-1, found)[:, 0], scores.argmax(dim=-1))
    return torch.where(finite[:, 0], drawn, -1)


def _share(mass: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """int64: the product of int64 and float64, rounded down."""
    return (mass.double() * share).long()
