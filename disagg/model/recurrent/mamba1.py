"""Packed steps of transformers' Mamba-1 modules (Falcon Mamba, Jamba, Mamba, Zamba).

transformers' selective scan ignores the state of a prompt's earlier chunks, so transformers needs whole prompts. The
scan in this file supports chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from disagg.model.recurrent.step import PackedStates
from kernels.recurrent.state_space import StateSpace


def mamba(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the module's output, `[T, hidden_size]`, for the hidden states `hidden` of the same shape."""
    x, gate = module.in_proj(hidden).chunk(2, dim=-1)
    x = states.conv(module.layer_idx, x, module.conv1d.weight, module.conv1d.bias, silu=True)
    dt, b, c = _split(module, module.x_proj(x))
    if hasattr(module, "dt_layernorm"):
        dt, b, c = module.dt_layernorm(dt), module.b_layernorm(b), module.c_layernorm(c)
    dt = F.linear(dt, module.dt_proj.weight)
    parameters = StateSpace(module.decay_rate[None], module.D[None], module.dt_proj.bias.float()[None])
    x, dt, b, c = (part[:, None] for part in (x, dt, b, c))
    found = states.state_space(module.layer_idx, x, dt, b, c, parameters)[:, 0]
    out: torch.Tensor = module.out_proj(found * F.silu(gate))
    return out


def zamba(module: Any, states: PackedStates, hidden: torch.Tensor) -> torch.Tensor:
    """Computes a packed step of Zamba: as `mamba`, but each head has separate projections."""
    heads = module.n_mamba_heads
    x, gate = torch.unflatten(module.in_proj(hidden), 1, (-1, 2)).unbind(2)
    x = states.conv(module.layer_idx, x.contiguous(), module.conv1d.weight, module.conv1d.bias, silu=True)
    x = torch.unflatten(x, 1, (heads, -1))
    dt, b, c = _split(module, torch.einsum("thp,hop->tho", x, module.x_proj_weight))
    dt = torch.einsum("thr,hpr->thp", dt, module.dt_proj_weight).contiguous()
    parameters = StateSpace(module.decay_rate, module.D, module.dt_proj_bias.float())
    found = states.state_space(module.layer_idx, x, dt, b, c, parameters).flatten(1)
    out: torch.Tensor = module.out_proj(found * F.silu(gate))
    return out


def _split(module: Any, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
    size = module.ssm_state_size
    return torch.split(projected, [module.time_step_rank, size, size], dim=-1)
