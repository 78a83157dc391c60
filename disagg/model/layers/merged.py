"""Merges projections of the same input into one matrix product: queries, keys and values; gate and up of an MLP.

A short step spends most of its time reading weights. One large product reads weights faster than several small
ones, and needs one launch. vLLM and SGLang merge the same layers when they load a checkpoint (`QKVParallelLinear`,
`MergedColumnParallelLinear`). Here, the checkpoint is loaded into the separate layers first; the merged weight then
replaces their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disagg.model.layers.few_rows import FewRowsLayer, FewRowsSwitch, few_rows_layer, one_row_layer
from disagg.model.layers.quantized import Product, QuantizedLinear
from kernels.layers.quantized_linear import quantized_linear
from kernels.layers.quantized_weight import QuantizedWeight

_ATTRIBUTE = "merged_projections"
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class MergedProjections:
    """Linear layers with the same input, merged into one weight `[sum of outputs, inputs]`.

    The object is an attribute of the module that contains the layers.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """Joins the weights of `layers`. Afterwards, the layers' weights are views of the joined weight."""
        self.layers = tuple(layers)
        self.weight = _joined(layers)
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
        self.product: Product | None = None
        """Function that computes the product with weight and bias; None: torch or the quantized product."""
        self.gated: FewRowsLayer | None = None
        """For gate and up: computes the gated product of few rows in one launch; None: nothing does."""
        self.few: FewRowsLayer | None = None
        """Computes the product of one row in a kernel; None: torch does."""
        self._sizes = [layer.out_features for layer in layers]
        start = 0
        for layer, size in zip(layers, self._sizes, strict=True):
            if isinstance(self.weight, QuantizedWeight):
                layer.use(self.weight.row_part(start, start + size))
            else:
                layer.weight.data = self.weight[start : start + size]
            if self.bias is not None:
                layer.bias.data = self.bias[start : start + size]
            start += size

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the outputs of all layers for `x` `[.., inputs]`: views of one tensor."""
        if self.product is not None:
            y = self.product(x)
        elif isinstance(self.weight, QuantizedWeight):
            y = quantized_linear(x, self.weight, self.bias)
        elif self.few is not None and self.few.takes(x):
            y = self.few(x)
        else:
            y = nn.functional.linear(x, self.weight, self.bias)
        return torch.split(y, self._sizes, dim=-1)


def _joined(layers: Sequence[Any]) -> torch.Tensor | QuantizedWeight:
    if isinstance(layers[0], QuantizedLinear):
        return QuantizedWeight.stacked([layer.weight_parts for layer in layers])
    return torch.cat([layer.weight.data for layer in layers])


def merge_projections(model: Any) -> int:
    """Merges the projections of each module of `model` that calls `projected`; returns the number of these modules.

    Call this after the weights are loaded and after `fuse`. The merge needs memory for a copy of the largest
    projections.
    """
    merged = 0
    for module in model.modules():
        for names in _MERGED:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            # Only the fused forwards of this package, which are instance attributes, call `projected`.
            if "forward" in vars(module) and _fit(layers):
                setattr(module, _ATTRIBUTE, MergedProjections(layers))
                _free(next(layers[0].parameters()))
                merged += 1
    return merged


def use_few_rows_merged(model: Any, switch: FewRowsSwitch) -> int:
    """Lets the merged projections of `model` use the kernels; returns the number of merged projections that do.

    Gate and up projections use them for few rows, together with their activation; queries, keys and values for one
    row.
    """
    number = 0
    for module in model.modules():
        merged = merged_of(module)
        if merged is None or isinstance(merged.weight, QuantizedWeight):
            continue
        merged.few = one_row_layer(merged.weight, merged.bias, switch)
        if hasattr(module, "gate_proj"):
            merged.gated = few_rows_layer(merged.weight, merged.bias, switch, gated=True)
        number += merged.few is not None or merged.gated is not None
    return number


def merged_of(module: Any) -> MergedProjections | None:
    """Returns the merged projections of a module; None if its projections are separate."""
    found: MergedProjections | None = vars(module).get(_ATTRIBUTE)
    return found


def projected(module: Any, names: Sequence[str], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of the layers `names` of `module` for `x`. The outputs may be views of one tensor."""
    merged = merged_of(module)
    return merged(x) if merged is not None else tuple(getattr(module, name)(x) for name in names)


def _fit(layers: Sequence[Any]) -> bool:
    """Returns whether `layers` can be merged: plain or quantized linear layers of equal type, device and input size.
    Either all or none of them have a bias.
    """
    if not all(
        type(layer) in (nn.Linear, QuantizedLinear) and "forward" not in vars(layer) for layer in layers
    ):
        return False
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return False
    return len({_kind(layer) for layer in layers}) == 1 and not next(layers[0].parameters()).is_meta


def _kind(layer: Any) -> tuple[object, ...]:
    """Returns the properties that must be equal in layers that are merged."""
    if isinstance(layer, QuantizedLinear):
        one = layer.weight_parts
        own: tuple[object, ...] = (one.elements, one.zeros is None, one.block[1], one.words.device)
    else:
        own = (layer.weight.dtype, layer.weight.device)
    return type(layer), *own, layer.in_features, layer.bias is None


def _free(weight: torch.Tensor) -> None:
    """Returns torch's cached GPU memory to the device, because the freed blocks are too small for merged weights."""
    if weight.is_cuda:
        torch.cuda.empty_cache()
