"""Cases for the attention kernels, over pools where all that must not be read is NaN, and a float64 oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from kernels.attention.common import AttentionParams
from kernels.attention.layer_kv import QUANTIZED, LayerKV, quantized_layer
from kernels.dispatch import INTERPRETED

DEVICES = [*(["cpu"] if INTERPRETED else []), pytest.param("cuda:0", marks=pytest.mark.gpu)]
PAGE_TOKENS = 4


@dataclass(frozen=True)
class Case:
    """Some sequences: `lengths[i]` tokens in the pool, the last `counts[i]` of them being queries."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...] = ()
    kv_heads: int = 2
    group: int = 4
    k_dim: int = 16
    v_dim: int = 16
    pool_dim: int = 16
    q_dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0

    @property
    def queries(self) -> tuple[int, ...]:
        """Query tokens of each sequence: one, unless the case says otherwise."""
        return self.counts or (1,) * len(self.lengths)


@dataclass(frozen=True)
class Inputs:
    """A case's tensors on a device, and what they mean in float64 on the CPU."""

    q: torch.Tensor
    """`[query tokens, q_heads, k_dim]`, with strides that a transposed projection has."""
    kv: LayerKV
    table: torch.Tensor
    rows: torch.Tensor
    params: AttentionParams
    expected: torch.Tensor
    """float64 `[query tokens, q_heads, v_dim]`"""
    worst: float
    """Largest difference from `expected` that the types explain."""


def prepare(case: Case, device: str) -> Inputs:
    """Shuffled pages, rows in no order; NaN in each slot and in each element of a slot that is nobody's."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pages = [-(-length // PAGE_TOKENS) for length in case.lengths]
    order = torch.randperm(sum(pages) + 3, generator=generator)
    slots_in_all = len(order) * PAGE_TOKENS
    width = max(max(case.lengths), 1) + 5
    table = torch.full((len(case.lengths) + 2, width), 2**30, dtype=torch.int32)  # far outside the pool
    rows = torch.randperm(len(table), generator=generator)[: len(case.lengths)]
    q_heads, tokens = case.kv_heads * case.group, sum(case.queries)
    q = random(q_heads, tokens, case.k_dim).to(case.q_dtype).to(device).transpose(0, 1)
    sinks = random(q_heads).to(case.q_dtype) if case.sinks else None
    params = AttentionParams(case.k_dim**-0.5, case.window, case.softcap, sinks)

    buffer = torch.full((2, slots_in_all, case.kv_heads, case.pool_dim), float("nan"))
    outputs, used, done, value_limit = [], 0, 0, 0.0
    for row, length, count, its_pages in zip(rows.tolist(), case.lengths, case.queries, pages, strict=True):
        its = order[used : used + its_pages]
        used += its_pages
        slots = (its[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[:length]
        table[row, :length] = slots.int()
        low = max(0, length - count + 1 - case.window) if case.window else 0
        seen = slots[low:]  # before the window of the first query nothing may be read either
        k = random(length, case.kv_heads, case.k_dim)[low:]
        v = (random(length, case.kv_heads, case.v_dim) + 1)[low:]
        buffer[0, seen, :, : case.k_dim], buffer[1, seen, :, : case.v_dim] = k, v
        meant = decoded(buffer, case.kv_dtype)
        k, v = meant[0, seen, :, : case.k_dim], meant[1, seen, :, : case.v_dim]
        value_limit = max(value_limit, float(v.abs().max()) if v.numel() else 0.0)
        queries = q[done : done + count].double().cpu()
        outputs.append(attention(queries, k, v, length - low - count, params))
        done += count
    kv = stored(buffer, case.kv_dtype, device)
    moved = AttentionParams(
        params.scaling, params.window_tokens, params.softcap, None if sinks is None else sinks.to(device)
    )
    return Inputs(
        q, kv, table.to(device), rows.to(device), moved, torch.cat(outputs), tolerance(case, value_limit)
    )


def tolerance(case: Case, value_limit: float) -> float:
    """What rounding explains, as a bound on the absolute error.

    In 16 bits weights, values (where they are of another float type) and the result are rounded once each, products
    and sums are in float32: 3 half units in the last place of the largest value. Codes are exact; of their weights
    those below 2^-14 of the largest are off by 2^-25 of that, less than a half unit in sum. In float32 it is the
    sums: of the scores (`k_dim` terms; they are in the exponent, times the largest of |q . k| * scaling, below 8 in
    these cases, or the soft cap's products) and of the weights.
    """
    epsilon = torch.finfo(torch.float32).eps
    terms = case.k_dim**0.5 * 8 + max(case.lengths) ** 0.5 + (4 * case.softcap if case.softcap else 0)
    exact = terms * epsilon * 4
    rounded = 0.0 if case.q_dtype == torch.float32 else 3 * torch.finfo(case.q_dtype).eps / 2
    return value_limit * (exact + rounded)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, params: AttentionParams
) -> torch.Tensor:
    """The definition, in float64: `q` `[count, q_heads, k_dim]` at positions `start ..` of `k` and `v`."""
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for index, head in ((i, h) for i in range(len(q)) for h in range(q.shape[1]) if len(k)):
        position = start + index
        low = max(0, position + 1 - params.window_tokens) if params.window_tokens else 0
        seen = slice(low, position + 1)
        scores = k[seen, head // group] @ q[index, head] * params.scaling
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        weights = torch.exp(scores)
        sink = 0.0 if params.sinks is None else math.exp(float(params.sinks[head]))
        out[index, head] = weights @ v[seen, head // group] / (weights.sum() + sink)
    return out


def decoded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64: what `x` is once it is stored as `dtype`."""
    if dtype not in QUANTIZED:
        return x.to(dtype).double()
    quantized, scales = encode(x, dtype)
    return quantized.double() * scales.double()[..., None]


def encode(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized values of `dtype` and bfloat16 scales; the largest of each head is about the largest of the type."""
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = (x.nan_to_num().abs().amax(-1).clamp(min=1e-30) / limit).bfloat16()
    ratio = (x / scales[..., None]).clamp(-limit, limit)
    quantized = ratio.nan_to_num().round().to(torch.int8) if dtype == torch.int8 else ratio.to(dtype)
    return quantized, scales


def stored(buffer: torch.Tensor, dtype: torch.dtype, device: str) -> LayerKV:
    """K and V as a pool holds them, scales NaN where the head is."""
    if dtype not in QUANTIZED:
        return LayerKV(*buffer.to(dtype).to(device), dtype)
    quantized, scales = encode(buffer, dtype)
    scales[buffer.isnan().all(-1)] = float("nan")
    both = torch.stack([*scales], -1).view(torch.uint8)
    rows = torch.cat([*quantized.view(torch.uint8), both], -1)
    return quantized_layer(rows.to(device), buffer.shape[-1], dtype)
