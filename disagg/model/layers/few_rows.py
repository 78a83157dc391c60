"""Uses `kernels.layers.few_rows` in recorded steps of few rows: for output and down projections, and for gate and up
projections together with their activation.

Only recorded steps use the kernel: launched one by one, its launches take the host longer than those of cuBLAS. The
deterministic mode has products of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from kernels.layers.few_rows import LEAST_ROWS, FewRowsProduct, most_rows_of


class FewRowsSwitch:
    """Whether the products of a model use the kernel now. Each runner has one, used by its compute thread only."""

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def turned_on(self) -> Iterator[None]:
        """Inside the block, products of few rows use the kernel."""
        self.on = True
        try:
            yield
        finally:
            self.on = False

    def wrapped(self, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Returns `compute` with the switch turned on during each call."""

        def run(*args: Any) -> torch.Tensor:
            with self.turned_on():
                return compute(*args)

        return run


class FewRowsLayer:
    """A product that runs in the kernel if the switch is on and the input has few rows."""

    def __init__(
        self, product: FewRowsProduct, like: torch.Tensor, most_rows: int, switch: FewRowsSwitch
    ) -> None:
        """`like`: the weight, whose type and row size the input must have. `most_rows`: the limit of few rows."""
        self._product, self._dtype, self._switch = product, like.dtype, switch
        self._sizes = range(LEAST_ROWS * like.shape[1], most_rows * like.shape[1] + 1)
        """Numbers of elements of inputs with few rows."""

    def takes(self, x: torch.Tensor) -> bool:
        """Returns whether the kernel computes the product of `x` now."""
        few = self._switch.on and x.numel() in self._sizes
        return few and x.is_contiguous() and x.dtype == self._dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product of `x`, which the layer must take."""
        return self._product(x)


def few_rows_layer(
    weight: torch.Tensor, bias: torch.Tensor | None, switch: FewRowsSwitch, *, gated: bool = False
) -> FewRowsLayer | None:
    """Returns the layer of a weight for which the kernel is faster than cuBLAS, else None."""
    most_rows = most_rows_of(weight, gated=gated)
    if not most_rows:
        return None
    return FewRowsLayer(FewRowsProduct(weight, bias, gated=gated), weight, most_rows, switch)


def use_few_rows(model: Any, switch: FewRowsSwitch) -> int:
    """Lets the linear layers of `model` use the kernel; returns the number of layers that do.

    Call this after the weights are loaded. Layers with a forward of their own, and those for which cuBLAS is as fast,
    stay as they are. For gate and up projections, see `merged.gate_few_rows`.
    """
    number = 0
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            bias = None if module.bias is None else module.bias.data
            layer = few_rows_layer(module.weight.data, bias, switch)
            if layer is not None:
                module.forward = partial(_forward, module, layer)  # type: ignore[method-assign]
                number += 1
    return number


def _forward(module: nn.Linear, layer: FewRowsLayer, x: torch.Tensor) -> torch.Tensor:
    return layer(x) if layer.takes(x) else nn.functional.linear(x, module.weight, module.bias)
