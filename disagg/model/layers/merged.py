"""Projections of one input, computed as one product: queries, keys and values; gate and up of an MLP.

A short step mostly reads weights. One large product reads weights faster than three products, of which two are small,
and needs one launch. vLLM and SGLang merge the same layers when they load a checkpoint (`QKVParallelLinear`,
`MergedColumnParallelLinear`). Here a checkpoint fills the separate layers first; the merged weight then replaces
their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

_ATTRIBUTE = "merged_projections"
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class MergedProjections:
    """Linear layers with one input and one weight `[sum of outputs, inputs]`; owned by the module that has them."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """Joins the weights of `layers`, which become views of the joined weight: no memory is used twice."""
        self.weight = torch.cat([layer.weight.data for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
        self.product: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Replaces torch's product with weight and bias, if set."""
        self._sizes = [layer.weight.shape[0] for layer in layers]
        start = 0
        for layer, size in zip(layers, self._sizes, strict=True):
            layer.weight.data = self.weight[start : start + size]
            if self.bias is not None:
                layer.bias.data = self.bias[start : start + size]
            start += size

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the outputs of all layers for `x` `[.., inputs]`: views of one tensor."""
        y = nn.functional.linear(x, self.weight, self.bias) if self.product is None else self.product(x)
        return torch.split(y, self._sizes, dim=-1)


def merge_projections(model: Any) -> int:
    """Merges the projections of each module of `model` that calls `projected`; returns the number of merged ones.

    Call it after `fuse`, when the weights are filled. It needs memory for one more copy of the largest projections.
    """
    merged = 0
    for module in model.modules():
        for names in _MERGED:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            # Only forwards of this package call `projected`.
            if "forward" in vars(module) and _fit(layers):
                setattr(module, _ATTRIBUTE, MergedProjections(layers))
                _free(layers[0].weight)
                merged += 1
    return merged


def merged_of(module: Any) -> MergedProjections | None:
    """Returns the merged projections of a module; None if its projections are separate."""
    found: MergedProjections | None = vars(module).get(_ATTRIBUTE)
    return found


def projected(module: Any, names: Sequence[str], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the projections of `x` by the layers `names` of `module`; these may be views of one tensor."""
    merged = merged_of(module)
    return merged(x) if merged is not None else tuple(getattr(module, name)(x) for name in names)


def _fit(layers: Sequence[Any]) -> bool:
    """Returns whether `layers` can be merged: plain linear layers of equal type, device and input size, all or none
    with a bias.
    """
    if not all(type(layer) is nn.Linear and "forward" not in vars(layer) for layer in layers):
        return False
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return False
    kinds = {(one.weight.dtype, one.weight.device, one.weight.shape[1], one.bias is None) for one in layers}
    return len(kinds) == 1 and not layers[0].weight.is_meta


def _free(weight: torch.Tensor) -> None:
    """Returns the memory of the separate weights to the device: its blocks are too small for larger weights."""
    if weight.is_cuda:
        torch.cuda.empty_cache()
