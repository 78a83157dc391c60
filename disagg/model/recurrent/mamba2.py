"""Packed steps of transformers' Mamba-2 modules (Bamba, Falcon-H1, Granite 4, Mamba 2, Nemotron-H, Zamba 2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from disagg.model.recurrent.step import PackedStates
from kernels.recurrent.state_space import StateSpace


def mamba2(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the module's output, `[T, hidden_size]`, for the hidden states `hidden` of the same shape."""
    return _output(module, *_scanned(module, states, module.in_proj(hidden)))


def falcon_h1(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Computes a packed step of Falcon-H1: as `mamba2`, but with factors on the input and on the projections, and
    with an optional norm."""
    projected = module.in_proj(hidden * module.ssm_in_multiplier) * module.mup_vector[0]
    found, gate = _scanned(module, states, projected)
    if module.mamba_rms_norm:
        return _output(module, found, gate)
    out: torch.Tensor = module.out_proj(found * F.silu(gate))
    return out


def _scanned(module: Any, states: PackedStates, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the convolution, then the state space model; returns the model's output, `[T, intermediate_size]`, and
    the gate."""
    inner, groups, size = module.intermediate_size, module.n_groups, module.ssm_state_size
    gate, mixed, dt = torch.split(projected, [inner, module.conv_dim, module.num_heads], dim=-1)
    layer = module.layer_idx
    mixed = states.conv(layer, mixed, module.conv1d.weight, module.conv1d.bias, silu=True)
    x, b, c = torch.split(mixed, [inner, groups * size, groups * size], dim=-1)
    parameters = StateSpace(module.decay_rate, module.D, module.dt_bias, tuple(module.time_step_limit))
    x = torch.unflatten(x, 1, (module.num_heads, module.head_dim))
    b, c = (torch.unflatten(part, 1, (groups, size)) for part in (b, c))
    return states.state_space(layer, x, dt, b, c, parameters).flatten(1), gate


def _output(module: Any, found: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module.out_proj(module.norm(found, gate))
    return out
