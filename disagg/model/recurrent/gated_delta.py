"""Packed steps of transformers' gated delta rule modules (Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear, Bailing)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from disagg.model.recurrent.step import PackedStates


def qwen3_next(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the module's output, `[T, hidden_size]`, for the hidden states `hidden` of the same shape.

    Two projections compute all inputs of the delta rule.
    """
    parts = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
    )
    q, k, v, z, b, a = (part[0] for part in parts)
    mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
    found = _delta(module, states, mixed, _decay(module, a), b.sigmoid())
    return _gated(module.norm, module.out_proj, found, z)


def qwen3_5(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Computes a packed step of Qwen3.5: as `qwen3_next`, but separate projections compute the inputs of the delta
    rule."""
    decay = _decay(module, module.in_proj_a(hidden))
    beta = module.in_proj_b(hidden).sigmoid()
    found = _delta(module, states, module.in_proj_qkv(hidden), decay, beta)
    return _gated(module.norm, module.out_proj, found, module.in_proj_z(hidden))


def olmo_hybrid(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Computes a packed step of OLMo Hybrid: as `qwen3_next`, but with separate projections, and a `beta` that may
    reach 2."""
    beta = module.b_proj(hidden).sigmoid() * (2.0 if module.allow_neg_eigval else 1.0)
    found = _delta(module, states, _qkv(module, hidden), _decay(module, module.a_proj(hidden)), beta)
    return _gated(module.o_norm, module.o_proj, found, module.g_proj(hidden))


def kimi_linear(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Computes a packed step of Kimi Linear: as `qwen3_next`, but with separate projections, and a decay for each
    element of a key."""
    return _kimi(module, states, hidden, module.g_b_proj(module.g_a_proj(hidden)))


def bailing(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Computes a packed step of Bailing: as `kimi_linear`, but a single projection computes the gate."""
    return _kimi(module, states, hidden, module.g_proj(hidden))


def _kimi(module: Any, states: PackedStates, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    decay, beta = module.forget_gate(hidden[None])[0], module.b_proj(hidden).sigmoid()
    mixed = states.conv(
        module.layer_idx, _qkv(module, hidden), module.conv1d.weight, module.conv1d.bias, silu=True
    )
    q, k, v = (torch.unflatten(part, 1, (-1, module.head_dim)) for part in mixed.chunk(3, dim=-1))
    found = states.gated_delta(module.layer_idx, q, k, v, decay, beta)
    gate = torch.unflatten(gate, 1, (-1, module.head_dim))
    out: torch.Tensor = module.o_proj(module.o_norm(found[None], gate[None])[0].flatten(1))
    return out


def _qkv(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], dim=-1)


def _decay(module: Any, a: torch.Tensor) -> torch.Tensor:
    rate: torch.Tensor = module.decay_rate
    return rate * F.softplus(a.float() + module.dt_bias)


def _delta(
    module: Any, states: PackedStates, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Computes the convolution, then the delta rule; returns the rule's output, `[T, heads, value_dim]`."""
    mixed = states.conv(module.layer_idx, mixed, module.conv1d.weight, module.conv1d.bias, silu=True)
    q, k, v = torch.split(mixed, [module.key_dim, module.key_dim, module.value_dim], dim=-1)
    q, k = (torch.unflatten(part, 1, (-1, module.head_k_dim)) for part in (q, k))
    v = torch.unflatten(v, 1, (-1, module.head_v_dim))
    return states.gated_delta(module.layer_idx, q, k, v, decay, beta)


def _gated(norm: Any, projection: Any, found: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    rows = norm(found.reshape(-1, found.shape[2]), gate.reshape(-1, found.shape[2]))
    out: torch.Tensor = projection(rows.view(len(found), -1))
    return out
