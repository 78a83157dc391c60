"""Selects the next token of each row of a batch: the likeliest token, or a draw after top-k, top-p and min-p.

The filters have the order and meaning of transformers' warpers: temperature, then top-k (ties with the k-th token are
kept), then top-p (the token that crosses `top_p` is kept), then min-p. Tokens are ordered by probability, and equally
likely tokens by index. Each filter drops the lower end of this order. A draw applies the inverse of the cumulative
distribution, from the likeliest token on, to one uniform number. All masses are integers (`kernels.sampling.units`).
Therefore a row's token depends on no other row, and is the same on all devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend
from kernels.sampling.candidates import draw_listed
from kernels.sampling.philox import uniform_of, uniform_reference
from kernels.sampling.search import (
    INFINITE_KEY,
    LOWEST_KEY,
    PIVOTS,
    highest_of,
    index_of,
    masses_of,
    narrowed,
    next_smaller,
    search,
    value_of,
)
from kernels.sampling.units import fraction_bits, units_of, units_reference

COLDEST = 1e-30
"""Lower bound of temperatures. A draw at this bound is already greedy; a lower value would make scores infinite."""
_HOTTEST = 1e30
LANES, BLOCK, WARPS = 4096, 1024, 16
"""LANES: logits that the first pass reads at once. BLOCK: logits that other passes read at once. WARPS: warps of a
program, which processes one row."""
LIST = 4096
"""Capacity of a row's list of candidate logits. A search over the row ends in this list."""
_INFINITY = tl.constexpr(float("inf"))
_NOTHING = tl.constexpr(64.0)
"""Distance below the highest logit, in powers of two, from which on a weight is 0 units."""


@dataclass(frozen=True)
class DrawParams:
    """Sampling parameters of each row. Tensors are contiguous `[n]`, on the device of the logits."""

    scales: torch.Tensor
    """float32: `scale_of` of the temperature; 0 chooses the likeliest token."""
    tails: torch.Tensor
    """float32: 1 - top_p; 0 disables top-p."""
    gaps: torch.Tensor
    """float32: largest distance from the highest logit that min-p keeps; see `gap_of`. Infinity disables min-p."""
    top_k: torch.Tensor
    """int64: number of likeliest tokens to keep; 0 disables top-k."""
    seeds: torch.Tensor
    """int64: seed of each row's random number."""
    positions: torch.Tensor
    """int64: index of the drawn token in its answer. Seed and index select the random number."""

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
    """Returns the factor that converts a difference of logits to a difference of base-2 exponents; 0 for temperature
    0."""
    if temperature <= 0:
        return 0.0
    return math.log2(math.e) / min(max(temperature, COLDEST), _HOTTEST)


def gap_of(min_p: float, temperature: float) -> float:
    """Returns the distance below the highest logit at which a token's probability is `min_p` times the likeliest
    token's.
    """
    return math.inf if min_p <= 0 else -math.log(min_p) * min(max(temperature, COLDEST), _HOTTEST)


def likeliest_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Returns the likeliest token of each row, int64 `[n]`; of equally likely tokens, the token with the lowest id.

    `logits`: float32 `[n, vocab]`, contiguous. The token of a row is -1 if the row has NaN or infinity, or only
    -infinity. On CUDA: one launch, which reads the logits once, without synchronization.
    """
    if backend(logits.device) != "triton":
        best = torch.argmax(logits, dim=-1, keepdim=True)  # NaN is above all others
        return torch.where(torch.isfinite(logits.gather(-1, best)), best, -1)[:, 0]
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        with on_device(logits):
            likeliest_kernel[(len(logits),)](logits, tokens, logits.shape[-1], LANES=LANES, num_warps=WARPS)
    return tokens


def draw(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Returns a token for each row of `logits`, int64 `[n]`.

    `logits`: float32 `[n, vocab]`, contiguous. The token of a row is -1 if the row has NaN or infinity, or only
    -infinity. On CUDA: one launch on the current stream, no synchronization, and 32 KiB of temporary memory for each
    row. Raises ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    if backend(logits.device) != "triton":
        return draw_reference(logits, params)
    params.check(logits)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        found = torch.empty(rows, 2, LIST, dtype=torch.float32, device=logits.device)
        with on_device(logits):
            draw_kernel[(rows,)](
                logits,
                params.scales,
                params.tails,
                params.gaps,
                params.top_k,
                params.seeds,
                params.positions,
                tokens,
                found,
                vocab,
                BITS=fraction_bits(vocab),
                LANES=LANES,
                BLOCK=BLOCK,
                LIST=LIST,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )
    return tokens


def draw_reference(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Computes `draw` in plain torch, on any device, by a sort of each row.

    Slow. Waits for a GPU, because numpy draws the random numbers on the host.
    """
    params.check(logits)
    vocab = logits.shape[-1]
    best = logits.amax(dim=-1, keepdim=True)  # NaN is above all others
    finite = torch.isfinite(best)
    scores = torch.where(finite, logits, 0.0) + 0.0  # -0.0 becomes 0.0
    highest = torch.where(finite, best, 0.0)
    ordered, order = torch.sort(
        scores, dim=-1, stable=True
    )  # ascending; equal scores in the order of indices
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
    """Returns the product of int64 and float64, rounded down to int64."""
    return (mass.double() * share).long()


@triton.jit  # type: ignore[untyped-decorator]
def likeliest_kernel(logits, tokens, vocab, LANES: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    index = tl.program_id(0).to(tl.int64)
    top, _, token = highest_of(logits + index * vocab, vocab, LANES)
    finite = (top < INFINITE_KEY) & (top > LOWEST_KEY)
    tl.store(tokens + index, tl.where(finite, token, -1).to(tl.int64))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["scales", "tails", "gaps", "top_k", "seeds", "positions"],
)
def draw_kernel(  # type: ignore[no-untyped-def]
    # tensors
    logits,
    scales,
    tails,
    gaps,
    top_k,
    seeds,
    positions,
    tokens,
    found,  # float32 [rows, 2, LIST]: scratch memory of each row
    # sizes
    vocab,
    # meta
    BITS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    LANES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    LIST: tl.constexpr,  # noqa: N803
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * vocab
    values = found + index * 2 * LIST
    indices = (values + LIST).to(tl.pointer_type(tl.int32), bitcast=True)
    top, best, token = highest_of(row, vocab, LANES)
    finite = (top < INFINITE_KEY) & (top > LOWEST_KEY)
    token = tl.where(finite, token, -1)
    scale = tl.load(scales + index)
    if finite & (scale > 0):
        highest = value_of(top)
        tail = tl.load(tails + index).to(tl.float64)
        gap = tl.load(gaps + index)
        k = tl.load(top_k + index)
        uniform = uniform_of(tl.load(seeds + index), tl.load(positions + index))
        token = draw_listed(
            row, vocab, best, highest, scale, tail, gap, k, uniform, values, indices, BITS, LANES, LIST
        )
        if token < 0:
            token = _draw_searched(
                row, vocab, highest, scale, tail, gap, k, uniform, values, BITS, BLOCK, LIST
            )
    tl.store(tokens + index, token.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _draw_searched(  # type: ignore[no-untyped-def]
    row,
    vocab,
    highest,
    scale,
    tail,
    gap,
    k,
    uniform,
    found,
    BITS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    LIST: tl.constexpr,  # noqa: N803
):
    """Returns the drawn token by searches in the whole row; used if the list of candidates does not suffice."""
    least = _kth(row, vocab, k, found, highest, scale, BLOCK, LIST)
    values, masses = _first_pass(row, vocab, least, highest - gap, highest, scale, BITS, BLOCK)
    number = tl.arange(0, PIVOTS)
    total = tl.max(masses, 0)
    by_k = tl.sum(tl.where(number == PIVOTS - 2, masses, 0), 0)
    dropped = tl.maximum(by_k, tl.sum(tl.where(number == PIVOTS - 3, masses, 0), 0))
    rest = total - by_k
    last = by_k + tl.minimum((rest.to(tl.float64) * tail).to(tl.int64), rest - 1)
    target = last + 1
    value, mass, unit = highest, last, target
    # The first search finds the least likely token that top-p keeps; the second search finds the drawn token.
    for drawing in range(tl.where(tail > 0, 0, 1), 2):
        if drawing == 1:
            kept = total - dropped
            target = dropped + tl.maximum(kept - (kept.to(tl.float64) * uniform).to(tl.int64), 1)
        low, low_mass, high, high_mass = narrowed(
            values, masses, target, highest - _NOTHING / scale, rest * 0, highest, total
        )
        value, mass = search(
            row,
            vocab,
            found,
            target,
            low,
            low_mass,
            high,
            high_mass,
            highest,
            scale,
            False,
            BITS,
            BLOCK,
            LIST,
        )
        unit = units_of(value, highest, scale, BITS)
        dropped = tl.maximum(dropped, mass + (last - mass) // unit * unit)
    return index_of(row, vocab, value, (target - mass + unit - 1) // unit, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _kth(row, vocab, k, found, highest, scale, BLOCK: tl.constexpr, LIST: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Returns the `k`-th highest logit; -infinity if `k` is 0 or drops no token."""
    least = tl.full([], -_INFINITY, tl.float32)
    if (k > 0) & (k < vocab):
        number = tl.arange(0, PIVOTS)
        values = tl.where(number == 0, -_INFINITY, _spread(highest, scale))
        masses = masses_of(row, vocab, values, highest, scale, True, 0, BLOCK)
        target = vocab - k + 1
        none = tl.sum(tl.where(number == 0, masses, 0), 0)
        if none < target:
            whole = tl.full([], 0, tl.int64) + vocab
            low, low_mass, high, high_mass = narrowed(values, masses, target, least, none, highest, whole)
            least, _ = search(
                row,
                vocab,
                found,
                target,
                low,
                low_mass,
                high,
                high_mass,
                highest,
                scale,
                True,
                0,
                BLOCK,
                LIST,
            )
    return least


@triton.jit
def _spread(highest, scale):  # type: ignore[no-untyped-def]
    """Returns the logits with weights of 2^0, 2^-1, 2^-3, 2^-6, .. 2^-28 times the highest weight, float32
    `[PIVOTS]`."""
    number = tl.arange(0, PIVOTS)
    return highest - (number * (number + 1) >> 1).to(tl.float32) / scale


@triton.jit  # type: ignore[untyped-decorator]
def _first_pass(row, vocab, least, edge, highest, scale, BITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Returns values and their masses, `[PIVOTS]` each, from one pass over the row.

    The last three masses are the mass below `edge`, the mass below `least`, and the total.
    """
    number = tl.arange(0, PIVOTS)
    values = _spread(highest, scale)
    values = tl.where(number == PIVOTS - 3, next_smaller(edge), values)
    values = tl.where(number == PIVOTS - 2, next_smaller(least), values)
    values = tl.where(number == PIVOTS - 1, _INFINITY, values)
    return values, masses_of(row, vocab, values, highest, scale, False, BITS, BLOCK)
