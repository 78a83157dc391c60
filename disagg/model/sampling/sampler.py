"""Chooses the next token of each request from its logits.

Order and meaning of the filters are those of transformers' warpers: temperature, then top-k (ties with the
k-th are kept), then top-p (the token that crosses `top_p` is kept), then min-p. What comes before them is in
`disagg.model.sampling.penalties`. A draw is one uniform number through the
inverse of the cumulative distribution, so a whole batch is drawn at once from one number per request. A row's token
does not depend on the other rows in a single bit: all sums are of integers (`disagg.model.sampling.fixed_point`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from disagg.core.errors import RequestError
from disagg.core.types import SamplingParams
from disagg.model.sampling.fixed_point import in_units, softmax_weights

_COLDEST = 1e-30
"""Lowest temperature of a draw, already greedy in effect; a lower one would make logits infinite."""


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int | RequestError]:
    """Returns the tokens of `sample_tokens` on the host, an error for a row of bad logits. Synchronizes once."""
    return [
        token_or_error(token, row)
        for row, token in enumerate(sample_tokens(logits, params, positions).tolist())
    ]


def sample_tokens(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Returns one token per row of `logits` (float32 `[n, vocab]`, any device) as int64 `[n]` on the same device.

    `params` and `positions` are per row. `positions[i]` is the index of the chosen token within its request. With a
    seed, the index selects the random number, so no generator state is transferred. Without a seed, torch's default
    CPU generator draws. A row whose logits are NaN, or nowhere finite, yields -1 and does not affect other rows.
    """
    if not len(logits) == len(params) == len(positions):
        raise ValueError(
            f"{len(logits)} rows, {len(params)} params and {len(positions)} positions do not match"
        )
    tokens = torch.argmax(logits, dim=-1)  # the lowest of equal tokens, on any device
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        chosen = _draw(logits[index], [params[row] for row in drawn], [positions[row] for row in drawn])
        tokens[index] = chosen
    best = logits.amax(dim=-1)  # NaN wins every comparison of amax
    return torch.where(torch.isfinite(best), tokens, -1)


def token_or_error(token: int, row: int) -> int | RequestError:
    """Returns the token that `sample` chose for a row; an error for -1."""
    if token >= 0:
        return token
    return RequestError(
        f"the model gave no finite logits for row {row} of the batch; the request cannot go on"
    )


def _draw(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> torch.Tensor:
    """Tokens int64 `[n]` of rows that all have a temperature."""
    device = logits.device
    temperatures = torch.tensor([max(p.temperature, _COLDEST) for p in params], device=device)
    scores, order = torch.sort(logits / temperatures[:, None], dim=-1, stable=True)  # ascending
    weights = softmax_weights(scores)
    units = in_units(weights)
    units = _keep_top_k(units, scores, [p.top_k for p in params])
    units = _keep_top_p(units, [p.top_p for p in params])
    units = _keep_min_p(units, weights, [p.min_p for p in params])
    cumulative = units.cumsum(dim=-1)
    uniform = [_uniform(p.seed, position) for p, position in zip(params, positions, strict=True)]
    total = cumulative[:, -1:]
    below = total.double() * torch.tensor(uniform, dtype=torch.float64, device=device)[:, None]
    # From the top down to 1: a filtered token, of no units, is never reached.
    target = (total - below.long()).clamp_(min=1)
    found = torch.searchsorted(cumulative, target).clamp_(max=logits.shape[-1] - 1)
    return order.gather(-1, found)[:, 0]


def _keep_top_k(units: torch.Tensor, scores: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    vocab = scores.shape[-1]
    if not any(0 < k < vocab for k in top_k):
        return units
    first = torch.tensor([vocab - k if 0 < k < vocab else 0 for k in top_k], device=scores.device)
    return units.masked_fill(scores < scores.gather(-1, first[:, None]), 0)


def _keep_top_p(units: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    if not any(p < 1.0 for p in top_p):
        return units
    # In float32, as in transformers; -1 for rows without the filter.
    tail = torch.tensor([1.0 - p if p < 1.0 else -1.0 for p in top_p], device=units.device).double()
    cumulative = units.cumsum(dim=-1)
    dropped = cumulative <= (cumulative[:, -1].double() * tail).floor().long()[:, None]
    dropped[:, -1] = False
    return units.masked_fill(dropped, 0)


def _keep_min_p(units: torch.Tensor, weights: torch.Tensor, min_p: list[float]) -> torch.Tensor:
    """Drops weights below a share of the likeliest token's, whatever other filters dropped."""
    if not any(min_p):
        return units
    least = torch.tensor(min_p, device=weights.device)[:, None]
    return units.masked_fill(weights < least, 0)


def _uniform(seed: int | None, position: int) -> float:
    """A number in [0, 1): the request's own, by (seed, position) of a counter-based generator, or torch's."""
    if seed is None:
        return float(torch.rand((), dtype=torch.float64))
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())
