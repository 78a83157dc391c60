"""Experts whose weights stay quantized in memory.

On a GPU, steps of few tokens read quantized values in one launch for each product; longer steps convert some experts
at a time to floats. The host makes no decision within a step, so steps can be recorded. On a CPU, the weights of the
chosen experts are converted one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from disagg.model.experts.activation import Activation
from disagg.model.experts.form import DOWN, ExpertsForm, gated
from disagg.model.layers.quantized import QuantizedExpertWeights
from kernels.dispatch import backend
from kernels.layers.expert_matmul import expert_tiles
from kernels.layers.expert_quantized import expert_quantized, quantized_tile
from kernels.layers.expert_rows import expert_rows
from kernels.layers.expert_sum import expert_sum, expert_sum_reference
from kernels.layers.matmul_tiles import MatmulTile
from kernels.layers.quantized_linear import QuantizedTile
from kernels.layers.quantized_weight import dequantized_reference

UP_WEIGHTS, DOWN_WEIGHTS = "quantized_up", "quantized_down"
"""Names of the `QuantizedExpertWeights` in a module of experts."""


class QuantizedExperts:
    """The forward of a module of experts with quantized weights."""

    def __init__(self, module: Any, form: ExpertsForm) -> None:
        """`module` has `QuantizedExpertWeights` in place of its stacked weights."""
        self.module, self._form = module, form
        self._activation = Activation(module, form)
        self.kernel = True
        """Whether a kernel reads quantized weights, in steps of few tokens."""
        self.grouped = True
        """Whether kernels multiply converted weights, of several experts in one launch. Otherwise torch converts and
        multiplies the weights of one expert after another."""
        self._one_tile: MatmulTile | None = None

    @property
    def up(self) -> QuantizedExpertWeights:
        """The weights of the first product."""
        found: QuantizedExpertWeights = getattr(self.module, UP_WEIGHTS)
        return found

    @property
    def down(self) -> QuantizedExpertWeights:
        """The weights of the second product."""
        found: QuantizedExpertWeights = getattr(self.module, DOWN_WEIGHTS)
        return found

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.up.parts.experts

    def use_one_tile(self) -> None:
        """Makes a row's bits independent of the other rows in all later steps: they convert the weights, and use the
        same tile."""
        self.kernel, self._one_tile = False, expert_tiles(self.up.dtype)[-1]

    def __call__(
        self,
        hidden_states: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        tile: MatmulTile | QuantizedTile | None = None,
    ) -> torch.Tensor:
        """Returns the weighted sum of the chosen experts' results: `[tokens, hidden]`.

        `hidden_states`: `[tokens, hidden]`. `chosen`: numbers of experts, `[tokens, choices]`; a number beyond the
        last expert chooses none. `weights`: one for each choice. `tile`: derived from the sizes if omitted.
        """
        x, chosen, dtype = hidden_states.to(self.up.dtype).contiguous(), chosen.contiguous(), self.up.dtype
        if weights.dtype not in (dtype, torch.float32):
            weights = weights.float()
        weights = weights.contiguous()
        if tile is None and backend(x.device) != "triton":
            return self.of_chosen(x, chosen, weights).to(hidden_states.dtype)
        if tile is None and self.kernel:
            tile = quantized_tile(self.up.parts, chosen.numel(), dtype)
        if isinstance(tile, QuantizedTile):
            results = self._quantized(x, chosen, tile)
        elif self.grouped or tile is not None:
            results = self._converted(x, chosen, tile or self._one_tile)
        else:
            return self._of_all(x, chosen, weights).to(hidden_states.dtype)
        return expert_sum(results, weights, chosen, self.experts).to(hidden_states.dtype)

    def of_chosen(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the same as a call, computed in plain torch. Synchronizes."""
        choices, flat = chosen.shape[1], chosen.reshape(-1)
        results = x.new_zeros(flat.numel(), self.down.parts.outputs)
        for expert in torch.unique(flat).tolist():
            if expert < self.experts:
                pairs = (flat == expert).nonzero().reshape(-1)
                results[pairs] = self._of_one(x[pairs // choices], expert)
        return expert_sum_reference(results, weights, chosen, self.experts)

    def _quantized(self, x: torch.Tensor, chosen: torch.Tensor, tile: QuantizedTile) -> torch.Tensor:
        """Returns the result of each pair."""
        rows = expert_rows(chosen, self.experts, tile.rows)
        up_bias, down_bias = self._biases()
        x = expert_quantized(x, self.up.parts, rows, chosen.shape[1], up_bias, tile=tile)
        x = self._activation(x).to(self.up.dtype).contiguous()
        return expert_quantized(x, self.down.parts, rows, 1, down_bias, tile=tile)

    def _converted(self, x: torch.Tensor, chosen: torch.Tensor, tile: MatmulTile | None) -> torch.Tensor:
        """Returns the result of each pair."""
        up_bias, down_bias = self._biases()
        x = self.up.converted(x, chosen, chosen.shape[1], up_bias, tile)
        x = self._activation(x).to(self.up.dtype)
        return self.down.converted(x, chosen, 1, down_bias, tile)

    def _of_all(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the result in plain torch, without synchronization: every expert computes every token."""
        total = x.new_zeros(len(x), self.down.parts.outputs, dtype=torch.float32)
        for expert in range(self.experts):
            result = self._of_one(x, expert).float()
            for choice in range(chosen.shape[1]):
                own = chosen[:, choice : choice + 1] == expert
                total += torch.where(own, result * weights[:, choice : choice + 1].float(), 0.0)
        return total.to(x.dtype)

    def _of_one(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Returns the results of one expert for the rows `x`."""
        up, down = (
            dequantized_reference(one.parts.part(expert, expert + 1).weight, x.dtype)
            for one in (self.up, self.down)
        )
        up_bias, down_bias = (None if bias is None else bias[expert] for bias in self._biases())
        inner = gated(self._form, self.module, nn.functional.linear(x, up, up_bias))
        return nn.functional.linear(inner.to(x.dtype), down, down_bias)

    def _biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self._form.has_bias:
            return None, None
        return getattr(self.module, f"{self._form.up}_bias"), getattr(self.module, f"{DOWN}_bias")


def quantized_experts(module: Any) -> QuantizedExperts | None:
    """Returns the forward of a module of experts with quantized weights; None for other modules."""
    found = vars(module).get("forward")
    return found if isinstance(found, QuantizedExperts) else None


def quantized_forwards(model: Any) -> Iterator[QuantizedExperts]:
    """Yields the forwards of all modules of quantized experts."""
    for module in model.modules():
        if (forward := quantized_experts(module)) is not None:
            yield forward


def computes_by_expert(model: Any) -> bool:
    """Returns whether torch computes some quantized experts one after another, in thousands of launches."""
    return any(not forward.grouped for forward in quantized_forwards(model))


def use_one_tile(model: Any) -> None:
    """Calls `QuantizedExperts.use_one_tile` of all experts."""
    for forward in quantized_forwards(model):
        forward.use_one_tile()
