"""The activation between the two products of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from disagg.model.experts.form import ExpertsForm, gated
from kernels.layers.silu_mul import silu_mul

_SILU = (nn.SiLU, SiLUActivation)
_DEFAULT_GATE = "_default_apply_gate"
"""Name of transformers' function that computes `act_fn(gate) * up`."""


class Activation:
    """The activation of a module of experts, in one launch where a kernel computes it."""

    def __init__(self, module: Any, form: ExpertsForm) -> None:
        self._module, self._form = module, form
        own_gate = getattr(type(module), "_apply_gate", None)
        is_plain = getattr(own_gate, "__name__", "") == _DEFAULT_GATE
        self._is_silu = form.has_gate and is_plain and isinstance(module.act_fn, _SILU)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the inner elements, given the first product's outputs `x` `[rows, outputs]`."""
        if self._is_silu:
            return silu_mul(*x.chunk(2, dim=-1))
        return gated(self._form, self._module, x)
