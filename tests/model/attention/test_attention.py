"""The attention reference against the definition, one query at a time, and the map from query to KV heads."""

from __future__ import annotations

import math

import pytest
import torch

from disagg.core.types import Span, head_span
from disagg.model.attention import torch_attention as attention
from disagg.model.attention.torch_attention import HeadMap, attend_decode, attend_prefill
from kernels.attention.common import AttentionParams

HEADS, GROUP, DIM, KEYS = 2, 3, 8, 21
VARIANTS = [
    AttentionParams(0.3),
    AttentionParams(0.3, window_tokens=5),
    AttentionParams(0.3, softcap=2.0),
    AttentionParams(0.3, window_tokens=5, softcap=2.0, sinks=torch.linspace(-1, 2, HEADS * GROUP)),
    AttentionParams(0.3, alibi_slopes=torch.linspace(0.1, 1, HEADS * GROUP)),
    AttentionParams(
        0.3, alibi_slopes=torch.linspace(0.1, 1, HEADS * GROUP), alibi_dtype=torch.bfloat16, window_tokens=9
    ),
    AttentionParams(0.3, chunk_tokens=6),
]
NAMES = ["plain", "window", "softcap", "all", "alibi", "rounded alibi", "chunks"]


def alibi(params: AttentionParams, head: int, key: int, position: int) -> float:
    if params.alibi_slopes is None:
        return 0.0
    dtype = params.alibi_dtype or torch.float64
    of_key, of_query = (
        params.alibi_slopes[head].to(dtype) * torch.tensor(p).to(dtype) for p in (key, position)
    )
    return float(of_key) - float(of_query)


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, params: AttentionParams
) -> torch.Tensor:
    """One query `[heads, group, dim]` at `position`, scalar by scalar."""
    out = torch.zeros(HEADS, GROUP, DIM)
    first = max(0, position + 1 - params.window_tokens) if params.window_tokens else 0
    first = (
        max(first, position // params.chunk_tokens * params.chunk_tokens) if params.chunk_tokens else first
    )
    for head in range(HEADS):
        for member in range(GROUP):
            weights = []
            for key in range(first, position + 1):
                product = float(q[head, member].double() @ k[key, head].double())
                score = (product + alibi(params, head * GROUP + member, key, position)) * params.scaling
                if params.softcap is not None:
                    score = params.softcap * math.tanh(score / params.softcap)
                weights.append(math.exp(score))
            sink = 0.0 if params.sinks is None else math.exp(float(params.sinks[head * GROUP + member]))
            for weight, key in zip(weights, range(first, position + 1), strict=True):
                out[head, member] += weight / (sum(weights) + sink) * v[key, head]
    return out


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))


@pytest.mark.parametrize("params", VARIANTS, ids=NAMES)
@pytest.mark.parametrize("scores", [1, 400, 1 << 20])
def test_prefill_follows_the_definition_in_blocks_of_any_size(
    params: AttentionParams, scores: int, monkeypatch: pytest.MonkeyPatch, poison_empty: None
) -> None:
    monkeypatch.setattr(attention, "SCORES_PER_BLOCK", scores)
    start, count = 9, KEYS - 9
    q, k, v = random(HEADS, GROUP, count, DIM), random(KEYS, HEADS, DIM), random(KEYS, HEADS, DIM) + 1
    out = attend_prefill(q, k, v, start, params)
    for index in range(count):
        torch.testing.assert_close(out[:, :, index], naive(q[:, :, index], k, v, start + index, params))


@pytest.mark.parametrize("params", VARIANTS, ids=NAMES)
def test_decode_follows_the_definition_and_ignores_padding(params: AttentionParams) -> None:
    positions = torch.tensor([0, 20, 11])
    q = random(3, HEADS, GROUP, DIM)
    k, v = random(3, KEYS, HEADS, DIM), random(3, KEYS, HEADS, DIM) + 1
    out = attend_decode(q, k, v, positions, params)
    for index, position in enumerate(positions.tolist()):
        expected = naive(q[index], k[index], v[index], position, params)
        torch.testing.assert_close(out[index], expected)


def test_each_query_head_reads_its_kv_head_for_all_splits() -> None:
    for q_heads in (1, 2, 4, 6, 8, 12):
        for kv_heads in (n for n in range(1, q_heads + 1) if q_heads % n == 0):
            for size in (n for n in range(1, q_heads + 1) if q_heads % n == 0):
                seen = []
                for rank in range(size):
                    queries = Span(rank * q_heads // size, (rank + 1) * q_heads // size)
                    heads = head_span(rank, size, kv_heads)
                    head_map = HeadMap(queries, heads, q_heads, kv_heads, torch.device("cpu"))
                    kv = torch.arange(heads.start, heads.stop).view(-1, 1)
                    seen += head_map.expand(kv).repeat_interleave(head_map.group, dim=0).flatten().tolist()
                assert seen == [q * kv_heads // q_heads for q in range(q_heads)]
