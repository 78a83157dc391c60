"""Attention over the paged pool in plain torch, for CPU and GPU; the reference for the faster Triton kernels.

Scores are computed in the model's dtype, the softmax in float32, as transformers' eager attention does.
"""

from __future__ import annotations

import torch

from disagg.core.types import Span
from kernels.attention.common import AttentionParams

SCORES_PER_BLOCK = 1 << 26  # elements of one block of scores [heads, queries, keys]: 256 MiB in float32


class HeadMap:
    """The map from a rank's query heads to its KV heads.

    Global query head `q` reads KV head `q * kv_heads // q_heads`. K and V are used unchanged if all KV heads of the
    rank have equally many query heads. Otherwise they are expanded to one KV head per query head.
    """

    def __init__(self, queries: Span, heads: Span, q_heads: int, kv_heads: int, device: torch.device) -> None:
        local = [q * kv_heads // q_heads - heads.start for q in queries]
        group = len(queries) // len(heads)
        self.uniform = local == [index // group for index in range(len(queries))] if group else False
        self.group = group if self.uniform else 1
        self._local = torch.tensor(local, device=device)

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """Expands `[..., kv heads, head_dim]` to `[..., query heads // self.group, head_dim]`."""
        return x if self.uniform else x.index_select(-2, self._local)


def attend_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Returns the attention of one query token per sequence, `[n, heads, group, dim]`.

    `q` has the shape `[n, heads, group, dim]`, `k` and `v` have `[n, keys, heads, dim]`. `positions`, int64 `[n]`,
    are the queries' positions; later keys are padding and must be finite.
    """
    keys = torch.arange(k.shape[1], device=k.device)
    queries, keys = positions[:, None, None, None], keys[None, None, None, :]
    scores = torch.matmul(q, k.permute(0, 2, 3, 1))  # [n, heads, group, keys]
    chosen = None if params.chosen is None else _chosen(params.chosen, k.shape[1])[:, None, None]
    weights = _weights(scores, queries, keys, params, (*q.shape[1:3], 1), chosen)
    return torch.matmul(weights, v.transpose(1, 2))


def attend_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, params: AttentionParams
) -> torch.Tensor:
    """Returns the attention of one sequence's tokens from position `start` on, `[heads, group, n, dim]`.

    `q` has the shape `[heads, group, n, dim]`, `k` and `v` have `[keys, heads, dim]` with `keys == start + n`.

    Queries are processed in blocks, each with its visible keys only, to bound the memory.
    """
    heads, group, count, _ = q.shape
    block = max(1, SCORES_PER_BLOCK // (heads * group * k.shape[0]))
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    for first in range(0, count, block):
        stop = min(count, first + block)
        low = _first_visible(start + first, params)
        seen = slice(low, start + stop)
        queries = torch.arange(start + first, start + stop, device=q.device)[:, None]
        keys = torch.arange(low, start + stop, device=q.device)[None, :]
        scores = torch.matmul(q[:, :, first:stop], k[seen].permute(1, 2, 0)[:, None])
        chosen = None if params.chosen is None else _chosen(params.chosen[first:stop], start + stop)[:, low:]
        weights = _weights(scores, queries, keys, params, (*q.shape[:2], 1, 1), chosen)
        out[:, :, first:stop] = torch.matmul(weights, v[seen].transpose(0, 1)[:, None])
    return out


def _first_visible(query: int, params: AttentionParams) -> int:
    """Returns the lowest position visible to the token at position `query`."""
    window = query + 1 - params.window_tokens if params.window_tokens else 0
    chunk = query - query % params.chunk_tokens if params.chunk_tokens else 0
    return max(0, window, chunk)


def _chosen(positions: torch.Tensor, keys: int) -> torch.Tensor:
    """Converts `AttentionParams.chosen` `[n, most]` to bool `[n, keys]`."""
    mask = torch.zeros(len(positions), keys + 1, dtype=torch.bool, device=positions.device)
    # Entries outside of these keys (padding, or invisible positions) are written to an extra last column.
    known = torch.where((positions >= 0) & (positions < keys), positions.long(), keys)
    return mask.scatter_(1, known, True)[:, :keys]


def _visible(queries: torch.Tensor, keys: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    mask = keys <= queries
    if params.window_tokens:
        mask &= keys > queries - params.window_tokens
    if params.chunk_tokens:
        mask &= keys // params.chunk_tokens == queries // params.chunk_tokens
    return mask


def _weights(
    scores: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    params: AttentionParams,
    heads_shape: tuple[int, ...],
    chosen: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the softmax of `scores` over the visible keys.

    The other arguments broadcast to the shape of `scores`: the positions `queries` and `keys`, and parameters per
    query head, reshaped to `heads_shape`. `chosen`, bool, limits the visible keys.
    """
    dtype = scores.dtype
    if params.alibi_slopes is not None:
        scores = scores.float() + _alibi(
            params.alibi_slopes.view(heads_shape), queries, keys, params.alibi_dtype
        )
    scores = scores * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    visible = _visible(queries, keys, params)
    if chosen is not None:
        visible = visible & chosen
    scores = scores.masked_fill(~visible, float("-inf")).float()
    if params.sinks is None:
        return torch.softmax(scores, dim=-1).to(dtype)
    sinks = params.sinks.float().view(heads_shape).expand(*scores.shape[:-1], 1)
    # The sink is the first summand, because its place in the sum must not depend on padding after the keys.
    return torch.softmax(torch.cat([sinks, scores], dim=-1), dim=-1)[..., 1:].to(dtype)


def _alibi(
    slopes: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, rounded: torch.dtype | None
) -> torch.Tensor:
    if rounded is None:
        return slopes * (keys - queries)
    slopes = slopes.to(rounded)
    of_keys, of_queries = ((slopes * positions.to(rounded)).float() for positions in (keys, queries))
    return of_keys - of_queries
