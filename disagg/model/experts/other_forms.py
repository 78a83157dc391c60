"""Modules of experts that transformers does not mark with `use_experts_implementation`: a registry of their classes.

An entry maps a range of the experts' inner elements to the elements of the module's parameters that belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disagg.core.types import Span
from disagg.model.layers.class_names import by_name
from disagg.model.tensor_parallel import Cut, section_spans


@dataclass(frozen=True)
class OtherForm:
    """A class of modules with experts."""

    inner: Callable[[Any], int]
    """Function of a module that returns the number of inner elements of an expert."""
    cuts: Callable[[Any, Span], Mapping[str, Cut]]
    """Function of a module and of inner elements. Returns the slices of its parameters, by name."""
    sizes: tuple[str, ...] = ()
    """Attributes with the number of inner elements."""
    bias: str = ""
    """Parameter that is added to the sum of the experts' results; empty if none is."""
    adapt: Callable[[Any, int], None] = lambda module, rank: None
    """Function that changes a module on a rank."""
    beside: str = ""
    """MLP whose result the block of the experts adds. The block's result is then summed over the ranks, not that of
    the experts; empty: the experts' result is summed."""


class NoResult(nn.Module):
    """A module that returns zeros, because another rank computes the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns zeros of the shape of `x`."""
        return torch.zeros_like(x)


def _llama4_cuts(module: Any, own: Span) -> dict[str, Cut]:
    inner = module.down_proj.shape[1]
    return {"gate_up_proj": Cut(2, section_spans(own, inner, 2 * inner)), "down_proj": Cut(1, (own,))}


def _longcat_cuts(module: Any, own: Span) -> dict[str, Cut]:
    inner = module.down_proj.shape[2]
    return {"gate_up_proj": Cut(1, section_spans(own, inner, 2 * inner)), "down_proj": Cut(2, (own,))}


def _longcat_identity(module: Any, rank: int) -> None:
    """Lets the first rank alone compute the experts that return their input."""
    if rank:
        module.identity_expert = NoResult()


def _dbrx_cuts(module: Any, own: Span) -> dict[str, Cut]:
    """The experts' weights are stacked by rows, those of the second product transposed."""
    spans = section_spans(own, module.ffn_hidden_size, len(module.mlp.w1))
    return {f"mlp.{name}": Cut(0, spans) for name in ("w1", "v1", "w2")}


def _jetmoe_cuts(module: Any, own: Span) -> dict[str, Cut]:
    inner = module.output_linear.weight.shape[2]
    gate_up = Cut(1, section_spans(own, inner, 2 * inner))
    return {"input_linear.weight": gate_up, "output_linear.weight": Cut(2, (own,))}


OTHER_FORMS = by_name(
    (
        OtherForm(lambda module: module.down_proj.shape[1], _llama4_cuts, beside="shared_expert"),
        "llama4.Llama4TextExperts",
    ),
    (
        OtherForm(lambda module: module.down_proj.shape[2], _longcat_cuts, adapt=_longcat_identity),
        "longcat_flash.LongcatFlashExperts",
    ),
    (
        OtherForm(
            lambda module: module.ffn_hidden_size,
            _dbrx_cuts,
            sizes=("ffn_hidden_size", "mlp.ffn_hidden_size"),
        ),
        "dbrx.DbrxExperts",
    ),
    (
        OtherForm(lambda module: module.output_linear.weight.shape[2], _jetmoe_cuts, bias="bias"),
        "jetmoe.JetMoeMoE",
    ),
)
"""Forms of modules by class name."""
