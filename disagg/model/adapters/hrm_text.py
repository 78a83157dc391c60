"""Adapter of HRM: two stacks of layers run several times per step, with separate K and V for each run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from disagg.model.adapters.base import Adapter, StepInputs
from disagg.model.attention.paged import AttentionContext
from kernels.attention.common import AttentionParams


def _adapt(model: Any, step: StepInputs) -> None:
    for stack in (model.model.L_module, model.model.H_module):
        for layer in stack.layers:
            layer.self_attn.forward = partial(_forward, layer.self_attn.forward, step)


def _forward(own: Any, step: StepInputs, *args: Any, cycle_offset: int = 0, **kwargs: Any) -> Any:
    return own(*args, **kwargs | {"paged_context": _Cycle(cycle_offset, step.context)})


@dataclass(frozen=True)
class _Cycle:
    """The step's attention context in one run of a stack, which uses the KV pool's layers from `first` on."""

    first: int
    own: AttentionContext

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        return self.own.attend(self.first + layer, q, k, v, params)


ADAPTER = Adapter(_adapt)
