"""Queries, keys and values of the attention classes in `rotary_attention`, before their rotary embeddings.

Each function takes an attention module and its hidden states `[batch, tokens, hidden]` and returns `Heads`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from disagg.model.layers.merged import projected


class Heads(NamedTuple):
    """Queries, keys and values, each `[batch, heads, tokens, dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor | None = None
    """Factor to multiply the attention's output by, `[batch, tokens, heads, dim]` or `[batch, tokens, heads, 1]`."""


Project = Callable[[Any, torch.Tensor], Heads]


def split_heads(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns `[batch, tokens, heads * dim]` as a view `[batch, tokens, heads, dim]`."""
    return x.view(*x.shape[:-1], -1, module.head_dim)


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor | None = None) -> Heads:
    """Converts tensors `[batch, tokens, heads, dim]` to `Heads`."""
    return Heads(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate)


def _projected(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = projected(module, ("q_proj", "k_proj", "v_proj"), x)
    return q, k, v


def plain(module: Any, x: torch.Tensor) -> Heads:
    """Computes separate projections of queries, keys and values (Llama)."""
    return _heads(*(split_heads(module, part) for part in _projected(module, x)))


def normed_heads(q_norm: str = "q_norm", k_norm: str = "k_norm", switch: str = "") -> Project:
    """Returns a function that computes three projections and applies a norm to each head of queries and keys (Qwen3).

    If `switch` names a false attribute of the module, the function applies no norms.
    """

    def project(module: Any, x: torch.Tensor) -> Heads:
        if switch and not getattr(module, switch):
            return plain(module, x)
        q, k, v = (split_heads(module, part) for part in _projected(module, x))
        return _heads(getattr(module, q_norm)(q), getattr(module, k_norm)(k), v)

    return project


def normed_rows(module: Any, x: torch.Tensor) -> Heads:
    """Computes three projections, and applies one norm over all heads of queries, and one over all heads of keys
    (OLMo 2)."""
    q, k, v = _projected(module, x)
    return _heads(*(split_heads(module, part) for part in (module.q_norm(q), module.k_norm(k), v)))


def olmo(module: Any, x: torch.Tensor) -> Heads:
    """Computes three projections, and clamps the results to `clip_qkv`."""
    return _heads(*(split_heads(module, _clipped(module, part)) for part in _projected(module, x)))


def olmoe(module: Any, x: torch.Tensor) -> Heads:
    """Computes three projections with the norms of `normed_rows`, and clamps the results to `clip_qkv`."""
    q, k, v = _projected(module, x)
    parts = (module.q_norm(q), module.k_norm(k), v)
    return _heads(*(split_heads(module, _clipped(module, part)) for part in parts))


def _clipped(module: Any, x: torch.Tensor) -> torch.Tensor:
    most = module.config.clip_qkv
    return x if most is None else x.clamp_(min=-most, max=most)


def falcon_h1(module: Any, x: torch.Tensor) -> Heads:
    """Computes three projections, with a factor on the keys."""
    heads = plain(module, x)
    return heads._replace(k=heads.k * module.key_multiplier)


def mimo(module: Any, x: torch.Tensor) -> Heads:
    """Computes three projections; values have a different head size, and are multiplied by a factor."""
    q, k, v = _projected(module, x)
    v = v.view(*v.shape[:-1], -1, module.v_head_dim)
    heads = _heads(split_heads(module, q), split_heads(module, k), v)
    return heads._replace(v=heads.v * module.v_scale)


def phi3(module: Any, x: torch.Tensor) -> Heads:
    """Computes one projection, whose output holds all queries, then all keys, then all values."""
    qkv = module.qkv_proj(x)
    queries = module.config.num_attention_heads * module.head_dim
    keys = module.num_key_value_heads * module.head_dim
    parts = qkv[..., :queries], qkv[..., queries : queries + keys], qkv[..., queries + keys :]
    return _heads(*(split_heads(module, part) for part in parts))


def dbrx(module: Any, x: torch.Tensor) -> Heads:
    """Computes one projection, clamped to `clip_qkv`, whose output holds all queries, then all keys, then all
    values."""
    qkv, most = module.Wqkv(x), module.clip_qkv
    if most is not None:
        qkv = qkv.clamp(min=-most, max=most)
    keys = module.num_key_value_heads * module.head_dim
    parts = qkv.split([module.hidden_size, keys, keys], dim=2)
    return _heads(*(split_heads(module, part) for part in parts))


def gpt_neox(module: Any, x: torch.Tensor) -> Heads:
    """Computes one projection, whose output holds query, key and value of the first head, then of the second, and so
    on."""
    qkv = module.query_key_value(x)
    return _heads(*qkv.view(*qkv.shape[:-1], -1, 3 * module.head_size).chunk(3, dim=-1))


def persimmon(module: Any, x: torch.Tensor) -> Heads:
    """Computes one projection with the layout of `gpt_neox`, and optional norms of each query and key head."""
    q, k, v = module._split_heads(module.query_key_value(x))
    if module.qk_layernorm:
        q, k = module.q_layernorm(q), module.k_layernorm(k)
    return _heads(q, k, v)


def qwen3_next(module: Any, x: torch.Tensor) -> Heads:
    """Computes three projections and norms of each query and key head. The projection of queries also yields each
    head's gate."""
    both, k, v = _projected(module, x)
    q, gate = both.view(*both.shape[:-1], -1, 2 * module.head_dim).chunk(2, dim=-1)
    k, v = split_heads(module, k), split_heads(module, v)
    return _heads(module.q_norm(q), module.k_norm(k), v, torch.sigmoid(gate))


def gated(gate: Callable[[Any, torch.Tensor], torch.Tensor | None]) -> Project:
    """Returns a function that computes `normed_heads`, and the gate of the output by calling `gate`."""
    project = normed_heads()
    return lambda module, x: project(module, x)._replace(gate=gate(module, x))


def afmoe_gate(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns a gate for each element of the attention's output."""
    return torch.sigmoid(split_heads(module, module.gate_proj(x)))


def beam_gate(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns a gate for each element of the attention's output, with a bias for each head."""
    return torch.sigmoid(split_heads(module, module.gate_proj(x)) + module.gate_bias[None, None, :, None])


def lfm3_gate(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Returns a gate for each head; None for a layer without gates."""
    return None if module.g_proj is None else torch.sigmoid(module.g_proj(x)).unsqueeze(-1)


def laguna_gate(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns a gate for each head, or for each element of the attention's output."""
    gate = nn.functional.softplus(module.g_proj(x).float()).to(x.dtype)
    return gate.unsqueeze(-1) if module.gate_per_head else split_heads(module, gate)
