"""Replaces the stacked weights of experts by quantized ones, and loads them.

Checkpoints have the tensors of a quantized linear layer for each matrix of each expert, or in MXFP4 one tensor for
all experts of a layer. In memory both become one quantized weight, in which the experts are stacked by rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.types import Span
from disagg.model.experts.form import DOWN, ExpertsFormError, form_of
from disagg.model.experts.quantized import DOWN_WEIGHTS, UP_WEIGHTS, QuantizedExperts
from disagg.model.layers.quantized import QuantizedExpertWeights
from disagg.model.load.merged_weights import cuts_of_part, experts_in_order
from disagg.model.load.quantized_tensors import LayerPart, empty_weight, read_weight
from disagg.model.load.weights import WeightSource, part_shape
from disagg.model.spec.quantization import MXFP4_GROUP, Quantization
from disagg.model.tensor_parallel import Cut
from kernels.layers.expert_quantized import ExpertWeights
from kernels.layers.quantized_weight import FP4, POWERS, QuantizedWeight, bits_of
from kernels.layers.quantized_words import pack_words

StoredExperts = Mapping[str, tuple[tuple[str, ...], ...]]
"""The stored layers of each stacked parameter, by the parameter's name: those of all experts, for each part of an
expert's matrix (gate and up). In MXFP4 the parameter's own stored name."""
_GROUP_BYTES = MXFP4_GROUP // 2
_NOT_A_NUMBER = 255
"""Exponent of MXFP4 scales that stands for NaN."""


@dataclass(frozen=True)
class ExpertsPart:
    """A rank's part of the weights of one product of all experts of a layer."""

    name: str
    """Name of the stacked parameter."""
    experts: int
    shape: tuple[int, int]
    """Outputs and inputs of an expert's whole matrix."""
    cut: Cut | None
    """The rank's part of an expert's matrix, as of a tensor `[experts, outputs, inputs]`."""
    stored: tuple[tuple[str, ...], ...]
    """See `StoredExperts`."""

    def layers(self, expert: int) -> list[LayerPart]:
        """Returns the stored layers of an expert, whose weights are stacked by rows."""
        rows, columns = self.shape[0] // len(self.stored), self.shape[1]
        return [
            LayerPart(names[expert], (rows, columns), cut)
            for number, names in enumerate(self.stored)
            for cut in cuts_of_part(self.cut, Span(number * rows, (number + 1) * rows))
        ]


@dataclass(frozen=True)
class QuantizedExpertLayers:
    """The quantized experts of a rank's model."""

    form: Quantization | None = None
    parts: tuple[tuple[ExpertsPart, str], ...] = ()
    """Each part with the name of its module, a `QuantizedExpertWeights`."""

    @property
    def weights(self) -> set[str]:
        """The names of the stacked parameters that are replaced."""
        return {part.name for part, _ in self.parts}

    def fill(self, model: Any, weights: WeightSource, device: torch.device) -> None:
        """Loads all weights. `weights`: with the names of the checkpoint. Raises ConfigError."""
        for part, name in self.parts:
            assert self.form is not None
            model.get_submodule(name).use(read_experts(weights, self.form, part, device))


def replace_experts(
    model: Any,
    form: Quantization | None,
    stored: StoredExperts,
    shapes: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
) -> QuantizedExpertLayers:
    """Replaces the stacked weights `stored` of a rank's model, on the meta device, by quantized ones.

    `shapes` and `cuts`: full shape of each parameter, and the rank's part of it. Raises UnsupportedModelError if the
    kernels do not support the experts, and ConfigError if the checkpoint lacks some of them or has more.
    """
    if form is None or not stored:
        return QuantizedExpertLayers()
    parts = []
    for name in sorted({parameter.rpartition(".")[0] for parameter in stored}):
        module = model.get_submodule(name)
        try:
            layout = form_of(module)
        except ExpertsFormError as why:
            raise UnsupportedModelError(
                f"the quantized experts {name} are not supported: {why}; use a bf16 or fp16 checkpoint"
            ) from why
        for leaf, own in ((layout.up, UP_WEIGHTS), (DOWN, DOWN_WEIGHTS)):
            parameter = f"{name}.{leaf}"
            if parameter not in stored:
                raise ConfigError(
                    f"the checkpoint has no scales for {parameter}, but for other weights of {name}"
                )
            names, shape = stored[parameter], shapes[parameter]
            if form.storage != "mxfp4":
                names = tuple(experts_in_order(parameter, one, shape[0], "scales for ") for one in names)
            part = _part(parameter, shape, cuts.get(parameter), names, layout.transposed)
            empty = empty_experts(form, part, torch.device("meta"))
            weights = QuantizedExpertWeights(empty, getattr(module, leaf).dtype)
            delattr(module, leaf)
            setattr(module, own, weights)
            parts.append((part, f"{name}.{own}"))
        module.forward = QuantizedExperts(module, layout)
    return QuantizedExpertLayers(form, tuple(parts))


def _part(
    name: str,
    shape: tuple[int, ...],
    cut: Cut | None,
    stored: tuple[tuple[str, ...], ...],
    transposed: bool,
) -> ExpertsPart:
    experts, rows, columns = shape
    if transposed:
        rows, columns = columns, rows
        cut = None if cut is None else Cut(3 - cut.dim, cut.spans)
    return ExpertsPart(name, experts, (rows, columns), cut, stored)


def empty_experts(form: Quantization, part: ExpertsPart, device: torch.device) -> ExpertWeights:
    """Returns uninitialized weights with the shapes and types of the part, on `device`.

    Raises UnsupportedModelError if the kernels do not support its shape.
    """
    if form.storage == "mxfp4":
        one = _empty_mxfp4(part)
    else:
        one = QuantizedWeight.stacked([empty_weight(form, layer) for layer in part.layers(0)])
        one = one.with_block_rows(_common_rows(one))
    words, scales, zeros = (
        None
        if tensor is None
        else torch.empty(part.experts * len(tensor), *tensor.shape[1:], dtype=tensor.dtype, device=device)
        for tensor in (one.words, one.scales, one.zeros)
    )
    assert words is not None
    assert scales is not None
    weight = QuantizedWeight(words, one.elements, one.columns, scales, one.block, zeros, shares_sums=False)
    return ExpertWeights(weight, part.experts)


def read_experts(
    weights: WeightSource, form: Quantization, part: ExpertsPart, device: torch.device
) -> ExpertWeights:
    """Reads the part to `device`. Raises ConfigError for missing tensors and unexpected shapes."""
    found = empty_experts(form, part, device)
    if form.storage == "mxfp4":
        _read_mxfp4(weights, part, found, device)
    else:
        own = found.weight
        for expert in range(part.experts):
            pieces = [read_weight(weights, form, layer, device) for layer in part.layers(expert)]
            one = QuantizedWeight.stacked(pieces).with_block_rows(own.block[0])
            for whole, piece in ((own.words, one.words), (own.scales, one.scales), (own.zeros, one.zeros)):
                if whole is not None and piece is not None:
                    whole[expert * len(piece) : (expert + 1) * len(piece)] = piece
    found.check()
    return found


def _common_rows(weight: QuantizedWeight) -> int:
    """Returns the largest block of rows that divides the weight of each expert."""
    rows = weight.shape[0]
    return gcd(min(weight.block[0], rows), rows)


def _empty_mxfp4(part: ExpertsPart) -> QuantizedWeight:
    """Returns the weight of one expert, on the meta device."""
    if part.shape[1] % MXFP4_GROUP:
        raise UnsupportedModelError(
            f"the quantized {part.name} has {part.shape[1]} inputs; MXFP4 needs a multiple of {MXFP4_GROUP}"
        )
    _, rows, columns = part_shape((part.experts, *part.shape), part.cut)
    scales = torch.empty(rows, columns // MXFP4_GROUP, dtype=POWERS, device="meta")
    return QuantizedWeight.empty((rows, columns), FP4, scales, (1, MXFP4_GROUP))


def _read_mxfp4(weights: WeightSource, part: ExpertsPart, found: ExpertWeights, device: torch.device) -> None:
    """Reads blocks, of two values in a byte with the first one in the low bits, and exponents of their scales."""
    ((name,),) = part.stored
    stored = (part.experts, part.shape[0], part.shape[1] // MXFP4_GROUP)
    cut = part.cut
    if cut is not None and cut.dim == 2:
        assert all(span.start % MXFP4_GROUP == span.stop % MXFP4_GROUP == 0 for span in cut.spans), cut
        cut = Cut(2, tuple(Span(span.start // MXFP4_GROUP, span.stop // MXFP4_GROUP) for span in cut.spans))
    blocks = weights.load(f"{name}_blocks", (*stored, _GROUP_BYTES), torch.uint8, device, cut)
    scales = weights.load(f"{name}_scales", stored, torch.uint8, device, cut)
    assert blocks is not None
    assert scales is not None
    if bool((scales == _NOT_A_NUMBER).any()):
        raise ConfigError(
            f"the checkpoint's {name}_scales has the exponent {_NOT_A_NUMBER}, which is no number; the checkpoint is "
            f"damaged"
        )
    weight, rows = found.weight, found.outputs
    weight.scales.view(torch.uint8).copy_(scales.flatten(0, 1))
    for expert in range(part.experts):
        own = blocks[expert].flatten(1)
        values = torch.stack((own & 15, own >> 4), -1).flatten(1)
        packed = pack_words(values, weight.period, bits_of(FP4))
        weight.words[expert * rows : (expert + 1) * rows] = packed
