"""Linear layers, and weights of experts, that stay quantized in memory. Activations are not quantized."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from disagg.core.ports import Collective
from disagg.model.tensor_parallel import SummedModule
from kernels.layers.expert_quantized import ConvertedExperts, ExpertWeights
from kernels.layers.matmul import matmul
from kernels.layers.quantized_linear import quantized_linear
from kernels.layers.quantized_weight import QuantizedWeight

Product = Callable[[torch.Tensor], torch.Tensor]
Convert = Callable[[QuantizedWeight, torch.dtype], torch.Tensor]
"""Function that returns a quantized weight as floats."""


class QuantizedModule(nn.Module):
    """A module whose parameters, but for a bias, are the tensors of a quantized weight."""

    words: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter | None

    def _hold(self, weight: QuantizedWeight) -> None:
        """Makes the tensors of `weight` the module's parameters."""
        self.words, self.scales = _fixed(weight.words), _fixed(weight.scales)
        self.zeros = None if weight.zeros is None else _fixed(weight.zeros)


class QuantizedLinear(QuantizedModule):
    """A linear layer with a quantized weight, in place of an `nn.Linear`."""

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        """`dtype`: the type of activations and bias."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias, self.dtype = bias, dtype
        self.use(weight)
        self.product: Product | None = None
        """Function that computes the product with weight and bias; None: the quantized product."""

    def use(self, weight: QuantizedWeight) -> None:
        """Replaces the weight."""
        self.weight_parts = weight
        self._hold(weight)

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias that the product adds."""
        return self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output."""
        if self.product is not None:
            return self.product(x)
        return quantized_linear(x, self.weight_parts, self.own_bias)


class QuantizedRowParallelLinear(SummedModule, QuantizedLinear):
    """A quantized linear layer over the rank's input columns; see `RowParallelLinear`."""

    def __init__(
        self, weight: QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype, collective: Collective
    ) -> None:
        super().__init__(weight, bias, dtype)
        self.collective = collective

    @property
    def own_bias(self) -> torch.Tensor | None:
        """None: the bias is added once, after the sum over the ranks."""
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the full layer's output, equal on every rank."""
        y = super().forward(x)
        self.collective.all_reduce(y)
        return y if self.bias is None else y + self.bias


class QuantizedExpertWeights(QuantizedModule):
    """The quantized weights of one product of all experts, in place of a stacked parameter."""

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        """`dtype`: type of the activations."""
        super().__init__()
        self.dtype = dtype
        self.use(weights)

    def use(self, weights: ExpertWeights) -> None:
        """Replaces the weights."""
        self.parts, self.converted = weights, ConvertedExperts(weights, self.dtype)
        self._hold(weights.weight)


class ConvertedProduct:
    """A product with a quantized weight. Each call converts the whole weight to the type of the activations."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, convert: Convert) -> None:
        self.convert = convert
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product with weight and bias."""
        return self._multiply(x, self.convert(self._weight, x.dtype), self._bias)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.linear(x, weight, bias)


class RowWiseProduct(ConvertedProduct):
    """A product with a quantized weight in which a row's bits do not depend on the other rows."""

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found = matmul(x.reshape(1, -1, x.shape[-1]), weight[None].transpose(1, 2), bias)
        return found.view(*x.shape[:-1], weight.shape[0])


def computes_in(layer: object) -> torch.dtype | None:
    """Returns the type of a linear layer's activations; None for any other module."""
    if isinstance(layer, QuantizedLinear):
        return layer.dtype
    return layer.weight.dtype if isinstance(layer, nn.Linear) else None


def weight_elements(module: nn.Module) -> int:
    """Returns the number of elements of all parameters; of quantized weights without their scales."""
    count = 0
    for one in module.modules():
        if isinstance(one, QuantizedLinear):
            count += one.in_features * one.out_features + (0 if one.bias is None else one.bias.numel())
        elif isinstance(one, QuantizedExpertWeights):
            count += math.prod(one.parts.weight.shape)
        else:
            count += sum(parameter.numel() for parameter in one.parameters(recurse=False))
    return count


def _fixed(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
