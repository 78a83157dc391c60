"""The recurrent module classes of transformers for which this package has a forward of packed steps (see `step`).

Models with other recurrent modules run transformers' own code, in several calls per step (`state.recurrent_parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from disagg.kv.mamba_pool import StatePlace
from disagg.model.layers.class_names import by_name, class_name
from disagg.model.recurrent import gated_delta, heads, mamba1, mamba2, short_conv
from disagg.model.recurrent.step import UNBOUNDED, PackedStates

Compute = Callable[[Any, PackedStates, torch.Tensor], torch.Tensor]
"""Function that returns a module's output for the hidden states `[T, hidden_size]` of a packed step."""


@dataclass(frozen=True)
class RecurrentForm:
    """The forward for packed steps of a recurrent module class, and the class's kinds of state."""

    compute: Compute
    kinds: tuple[str, ...] = ("conv", "recurrent")
    """Kinds of state that each module has; see `StatePlace.kind`."""
    heads: Callable[[Any], heads.ModuleHeads] | None = None
    """Function that returns the heads of a whole module; None if ranks cannot share modules of the class."""


RECURRENT = by_name(
    (
        RecurrentForm(mamba2.mamba2, heads=heads.mamba2),
        """
        bamba.BambaMixer granitemoehybrid.GraniteMoeHybridMambaLayer mamba2.Mamba2Mixer
        nemotron_h.NemotronHMamba2Mixer zamba2.Zamba2MambaMixer
        """,
    ),
    (RecurrentForm(mamba2.falcon_h1, heads=heads.mamba2), "falcon_h1.FalconH1Mixer"),
    (RecurrentForm(mamba1.mamba), "falcon_mamba.FalconMambaMixer jamba.JambaMambaMixer mamba.MambaMixer"),
    (RecurrentForm(mamba1.zamba), "zamba.ZambaMambaMixer"),
    (RecurrentForm(gated_delta.qwen3_next, heads=heads.qwen3_next), "qwen3_next.Qwen3NextGatedDeltaNet"),
    (
        RecurrentForm(gated_delta.qwen3_5, heads=heads.qwen3_5),
        "qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
    ),
    (RecurrentForm(gated_delta.olmo_hybrid, heads=heads.olmo_hybrid), "olmo_hybrid.OlmoHybridGatedDeltaNet"),
    (RecurrentForm(gated_delta.kimi_linear, heads=heads.kimi_linear), "kimi_linear.KimiLinearDeltaAttention"),
    (RecurrentForm(gated_delta.bailing, heads=heads.bailing), "bailing_hybrid.BailingHybridDeltaAttention"),
    (
        RecurrentForm(short_conv.short_conv, ("conv",)),
        "lfm2.Lfm2ShortConv lfm2_moe.Lfm2MoeShortConv lfm3.Lfm3ShortConv",
    ),
)
"""Forms of recurrent modules by class name."""


def pack_recurrent(model: Any, places: Sequence[StatePlace], states: PackedStates) -> bool:
    """Replaces the `forward` of all registered recurrent modules, if these hold all states `places` of the model.

    Returns whether the forwards were replaced. The new forwards use `states` instead of the model's cache. Call this
    after the weights are loaded, because the `decay_rate` (float32) of each module with decays is computed here.
    """
    found = [(module, form) for module in model.modules() if (form := RECURRENT.get(class_name(module)))]
    known = [StatePlace(module.layer_idx, 0, kind) for module, form in found for kind in form.kinds]
    if sorted(known) != sorted(places) or not all(has_silu(module) for module, _ in found):
        return False
    for module, form in found:
        if hasattr(module, "A_log"):
            module.decay_rate = -module.A_log.detach().float().exp()
        module.forward = partial(_forward, form.compute, module, states)
    return True


def bounds_prompts(model: Any) -> bool:
    """Returns whether a module bounds the time step of prompt tokens, but not of answer tokens (Zamba 2)."""
    limits = (getattr(module, "time_step_limit", None) for module in model.modules())
    return any(limit is not None and tuple(limit) != UNBOUNDED for limit in limits)


def _forward(
    compute: Compute, module: Any, states: PackedStates, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    return compute(module, states, hidden_states[0])[None]


def has_silu(module: Any) -> bool:
    """Returns whether SiLU follows the module's convolution. Short convolutions have no activation."""
    return getattr(module, "activation", "silu") in ("silu", "swish")
