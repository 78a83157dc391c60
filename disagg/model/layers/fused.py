"""Puts Triton kernels in place of small operations of a model: norms and sums, rotary embeddings, gated MLPs.

Registries name the module classes of transformers that the kernels compute exactly: `norms.NORMS`,
`gated_norms.GATED_NORMS`, `residuals.PRE_NORM_LAYERS`, `gated_mlps.GATED_MLPS`, `rotary_forms.ROTARY_ATTENTION` and
`rotary_attention.OWN_FORWARDS`. A module of any other class is not changed. The replacement changes instances of
modules, and does not patch classes of transformers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from disagg.model.layers.gated_mlps import fuse_gated_mlp
from disagg.model.layers.gated_norms import fuse_gated_norm
from disagg.model.layers.norms import fuse_norm
from disagg.model.layers.residuals import fuse_residuals
from disagg.model.layers.rotary_attention import fuse_rotary


@dataclass
class Fused:
    """Number of a model's modules that use each fused kernel."""

    norms: int = 0
    gated_norms: int = 0
    rotary: int = 0
    """Number of attention modules whose rotary embeddings run in the kernel."""
    mlps: int = 0
    residuals: int = 0
    """Number of decoder layers whose residual sums run in the kernel of the following norm."""

    def summary(self) -> dict[str, int]:
        """Returns the counts by kind of module."""
        return asdict(self)


def fuse(model: Any) -> Fused:
    """Replaces the `forward` of each registered module of `model`. Call this after loading weights, before any
    step."""
    fused = Fused()
    for module in model.modules():
        if _is_unchanged(module):
            fused.norms += fuse_norm(module)
            fused.gated_norms += fuse_gated_norm(module)
            fused.mlps += fuse_gated_mlp(module)
            fused.rotary += fuse_rotary(module)
    for module in model.modules():
        fused.residuals += fuse_residuals(module)
    return fused


def _is_unchanged(module: nn.Module) -> bool:
    """Returns whether `module` has no hooks, and the `forward` of its class."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
