"""RMS norm over all heads of queries or of keys, of which each rank has some."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from disagg.core.types import Span
from disagg.model.layers.class_names import class_name
from disagg.model.layers.norms import NORMS
from disagg.model.split.attention_parts import IndivisibleError
from disagg.model.tensor_parallel import SummedModule


class SplitRowRMSNorm(SummedModule):
    """An RMS norm over the elements of all ranks: `[.., elements of the rank]`.

    The sums of squares, float32, are added over the ranks.
    """

    def __init__(self, own: Any, part: Span, skipped: int) -> None:
        """`own`: the module's norm, with a whole weight on the meta device. `part`: the rank's elements. The first
        `skipped` of them belong to a lower rank too, which adds their squares.

        Raises IndivisibleError for a norm that is not in `NORMS`, or that adds 1 to its weights.
        """
        super().__init__()
        form = NORMS.get(class_name(own))
        if form is None or form.weight == "one_plus":
            raise IndivisibleError(f"the form of its {type(own).__name__} over all heads is unknown")
        self.weight = nn.Parameter(own.weight.detach().new_empty(len(part)), requires_grad=False)
        self.elements, self.skipped = len(own.weight), skipped
        self.epsilon = float(getattr(own, form.epsilon))
        self.weights_float = form.weight == "in_float32"
        """Whether the product with the weights is in float32."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the rank's elements of the norm."""
        x = hidden.float()
        squares = x.new_zeros(*x.shape[:-1], 1)
        if self.skipped < x.shape[-1]:
            squares = x[..., self.skipped :].pow(2).sum(-1, keepdim=True)
        self.collective.all_reduce(squares)
        x = x * torch.rsqrt(squares / self.elements + self.epsilon)
        normed: torch.Tensor = (self.weight * (x if self.weights_float else x.to(hidden.dtype))).to(
            hidden.dtype
        )
        return normed
