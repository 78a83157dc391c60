"""The gated RMSNorm classes of transformers whose results the kernel `gated_rms_norm` reproduces bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from disagg.model.layers.class_names import by_name, class_name
from kernels.layers.gated_rms_norm import GateOrder, gated_rms_norm
from kernels.layers.rms_norm import DTYPES, MAX_BLOCK

_FIRST: GateOrder = "gate_first"
_LAST: GateOrder = "gate_last"

GATED_NORMS: dict[str, GateOrder] = by_name(
    (
        _FIRST,
        """
        bamba.BambaRMSNormGated granitemoehybrid.GraniteMoeHybridRMSNormGated mamba2.MambaRMSNormGated
        nemotron_h.NemotronHRMSNormGated zamba2.Zamba2RMSNormGated
        """,
    ),
    (
        _LAST,
        """
        olmo_hybrid.OlmoHybridRMSNormGated qwen3_5.Qwen3_5RMSNormGated qwen3_5_moe.Qwen3_5MoeRMSNormGated
        qwen3_next.Qwen3NextRMSNormGated
        """,
    ),
)
"""Order of gate and norm by class name; see `GateOrder`."""


class FusedGatedNorm:
    """Runs the kernel in place of a registered gated norm's forward. Calls without a gate, or with tensors of
    different types, use the class's own forward."""

    def __init__(self, module: Any, order: GateOrder) -> None:
        self._own, self._module, self._order = module.forward, module, order
        self._eps = float(module.variance_epsilon)
        self._group = int(getattr(module, "group_size", len(module.weight)))

    def __call__(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
        weight = self._module.weight
        if gate is None or not hidden_states.dtype == gate.dtype == weight.dtype:
            return self._own(hidden_states, gate)
        x, gates = (_rows(tensor) for tensor in (hidden_states, gate))
        return gated_rms_norm(x, gates, weight, self._eps, self._group, self._order).view(hidden_states.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` as `[rows, dim]`, contiguous in the last dimension."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def fuse_gated_norm(module: Any) -> bool:
    """Replaces the forward of a registered gated norm by the kernel. Returns whether the forward was replaced."""
    order = GATED_NORMS.get(class_name(module))
    if order is None or module.weight.dtype not in DTYPES:
        return False
    if getattr(module, "group_size", len(module.weight)) > MAX_BLOCK:
        return False
    if getattr(module, "activation", "silu") != "silu":
        return False
    module.forward = FusedGatedNorm(module, order)
    return True
