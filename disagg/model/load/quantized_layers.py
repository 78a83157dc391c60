"""Replaces linear layers by quantized ones, and loads their weights."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disagg.core.errors import UnsupportedModelError
from disagg.model.layers.quantized import QuantizedLinear, QuantizedRowParallelLinear
from disagg.model.load.quantized_tensors import LayerPart, empty_weight, read_weight
from disagg.model.load.weights import WeightSource
from disagg.model.spec.quantization import Quantization
from disagg.model.tensor_parallel import Cut, Misfit, RowParallelLinear


@dataclass(frozen=True)
class QuantizedLayers:
    """The quantized layers of a rank's model."""

    form: Quantization | None = None
    parts: tuple[LayerPart, ...] = ()

    @property
    def weights(self) -> set[str]:
        """The names of the weights that the layers had before their replacement."""
        return {f"{part.name}.weight" for part in self.parts}

    def fill(self, model: Any, weights: WeightSource, device: torch.device) -> None:
        """Loads the weights of all layers. Raises ConfigError."""
        for part in self.parts:
            assert self.form is not None
            model.get_submodule(part.name).use(read_weight(weights, self.form, part, device))


def linear_layers(model: Any) -> set[str]:
    """Returns the names of the linear layers of a model that is not split yet."""
    return {name for name, module in model.named_modules() if type(module) is nn.Linear}


def quantized_misfit(form: Quantization | None, names: Set[str]) -> Misfit:
    """Returns the `Misfit` of a model whose linear layers `names` are quantized. Ranks can hold any slice of other
    layers."""

    def misfit(name: str, shape: tuple[int, int], cut: Cut) -> str:
        if form is None or name not in names:
            return ""
        try:
            empty_weight(form, LayerPart(name, shape, cut))
        except UnsupportedModelError as exc:
            return str(exc)
        return ""

    return misfit


def replace_layers(
    model: Any,
    form: Quantization | None,
    names: Set[str],
    shapes: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
) -> QuantizedLayers:
    """Replaces the linear layers `names` of a rank's model, on the meta device, by quantized layers.

    `shapes` and `cuts`: full shape of each parameter, and the rank's part of it. Raises UnsupportedModelError if the
    kernels do not support a layer, or if it shares its weight.
    """
    if form is None:
        return QuantizedLayers()
    parts = []
    for name in sorted(names):
        weight = f"{name}.weight"
        if weight not in shapes:
            raise UnsupportedModelError(
                f"{name} is quantized, but shares its weight with another layer (tie_word_embeddings); use a "
                f"checkpoint in which it is not quantized"
            )
        rows, columns = shapes[weight]
        part = LayerPart(name, (rows, columns), cuts.get(weight))
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, _quantized(getattr(owner, child), form, part))
        parts.append(part)
    return QuantizedLayers(form, tuple(parts))


def _quantized(layer: nn.Linear, form: Quantization, part: LayerPart) -> QuantizedLinear:
    weight, dtype = empty_weight(form, part), layer.weight.dtype
    assert weight.shape == tuple(layer.weight.shape), part.name
    if isinstance(layer, RowParallelLinear):
        return QuantizedRowParallelLinear(weight, layer.bias, dtype, layer.collective)
    return QuantizedLinear(weight, layer.bias, dtype)
