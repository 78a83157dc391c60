"""Uses `kernels.layers.few_rows` in recorded steps of few rows: for output and down projections, and for gate and up
projections together with their activation. Products of one row use `kernels.layers.one_row`, those of queries, keys
and values too.

Only recorded steps use the kernels: launched one by one, their launches take the host longer than those of cuBLAS.
The deterministic mode has products of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from kernels.layers.few_rows import LEAST_ROWS, FewRowsProduct, most_rows_of
from kernels.layers.one_row import one_row, takes_one_row


class FewRowsSwitch:
    """Whether the products of a model use the kernels now. Each runner has one, used by its compute thread only."""

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def turned_on(self) -> Iterator[None]:
        """Inside the block, products of few rows use the kernels."""
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


class RowsProduct(NamedTuple):
    """A kernel's product, and the numbers of rows for which it is used."""

    rows: range
    compute: Callable[[torch.Tensor], torch.Tensor]


class FewRowsLayer:
    """A product that runs in a kernel if the switch is on and the input has few rows."""

    def __init__(self, products: Sequence[RowsProduct], like: torch.Tensor, switch: FewRowsSwitch) -> None:
        """`like`: the weight, whose type and row size the input must have."""
        self._products, self._switch = tuple(products), switch
        self._dtype, self._row_elements = like.dtype, like.shape[1]

    def takes(self, x: torch.Tensor) -> bool:
        """Returns whether a kernel computes the product of `x` now."""
        return self._switch.on and x.is_contiguous() and x.dtype == self._dtype and self._of(x) is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product of `x`, which the layer must take."""
        product = self._of(x)
        assert product is not None
        return product.compute(x)

    def _of(self, x: torch.Tensor) -> RowsProduct | None:
        rows = x.numel() // self._row_elements
        return next((product for product in self._products if rows in product.rows), None)


def few_rows_layer(
    weight: torch.Tensor, bias: torch.Tensor | None, switch: FewRowsSwitch, *, gated: bool = False
) -> FewRowsLayer | None:
    """Returns the layer of a weight for which a kernel is faster than cuBLAS, else None."""
    products = _one_row(weight, bias, gated)
    if most_rows := most_rows_of(weight, gated=gated):
        rows = range(LEAST_ROWS, most_rows + 1)
        products.append(RowsProduct(rows, FewRowsProduct(weight, bias, gated=gated)))
    return FewRowsLayer(products, weight, switch) if products else None


def one_row_layer(
    weight: torch.Tensor, bias: torch.Tensor | None, switch: FewRowsSwitch
) -> FewRowsLayer | None:
    """Returns the layer of a weight for which a kernel is faster than cuBLAS with one row, else None."""
    products = _one_row(weight, bias, gated=False)
    return FewRowsLayer(products, weight, switch) if products else None


def _one_row(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> list[RowsProduct]:
    if not takes_one_row(weight):
        return []
    return [RowsProduct(range(1, 2), partial(one_row, weight=weight, bias=bias, gated=gated))]


def use_few_rows(model: Any, switch: FewRowsSwitch) -> int:
    """Lets the linear layers of `model` use the kernels; returns the number of layers that do.

    Call this after the weights are loaded. Layers with a forward of their own, and those for which cuBLAS is as fast,
    stay as they are. For merged projections, see `merged.use_few_rows_merged`.
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
