"""Finds the linear layers and the experts of a model that a checkpoint has quantized."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from disagg.core.errors import UnsupportedModelError
from disagg.model.experts.form import DOWN, ExpertsFormError, experts_of, form_of
from disagg.model.load.composite import text_name
from disagg.model.load.merged_weights import stacked_experts
from disagg.model.load.quantized_experts import StoredExperts
from disagg.model.load.quantized_layers import linear_layers
from disagg.model.load.quantized_tensors import PACKINGS
from disagg.model.spec.quantization import Quantization

_MXFP4 = re.compile(r"_(blocks|scales)$")


@dataclass(frozen=True)
class QuantizedNames:
    """The quantized parts of a model."""

    linear: set[str] = field(default_factory=set)
    """Names of linear layers."""
    experts: StoredExperts = field(default_factory=dict)


def stored_layers(names: Iterable[str], form: Quantization) -> set[str]:
    """Returns the quantized layers of a checkpoint, by the names of its tensors; in MXFP4 stacked parameters."""
    if form.storage == "mxfp4":
        return {_MXFP4.sub("", name) for name in names if _MXFP4.search(name)}
    packing = PACKINGS[form.storage]
    leaves = (*packing.markers, *packing.scale_names)
    return {layer for layer, _, leaf in (name.rpartition(".") for name in names) if leaf in leaves}


def names_in_model(stored: set[str], form: Quantization, model: Any, architecture: str) -> QuantizedNames:
    """Returns the parts of `model`, on the meta device and not split yet, that are the quantized layers `stored` of a
    checkpoint.

    Layers that transformers ignores too (those of predicted further tokens) are omitted. Raises UnsupportedModelError
    if a layer of another kind is quantized.
    """
    linear = linear_layers(model)
    by_name = {name: name for name in stored}
    if in_text := {name for name in stored if text_name(name) != name}:  # a multimodal checkpoint
        by_name = {text_name(name): name for name in in_text} | {name: name for name in stored & linear}
    rest = {name: own for name, own in by_name.items() if name not in linear}
    parameters = {f"{name}.{leaf}" for name, module in experts_of(model) for leaf in module._parameters}
    experts: dict[str, tuple[tuple[str, ...], ...]]
    if form.storage == "mxfp4":
        experts = {name: ((own,),) for name, own in rest.items() if name in parameters}
        used = set(experts)
    else:
        weights = {f"{name}.weight": own for name, own in rest.items()}
        found = {name: parts for name, parts in stacked_experts(weights, model).items() if name in parameters}
        experts = {
            name: tuple(tuple(weights[one] for one in part) for part in parts)
            for name, parts in found.items()
        }
        used = {one.removesuffix(".weight") for parts in found.values() for part in parts for one in part}
    ignored = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    others = {name for name in rest.keys() - used if not any(one.search(rest[name]) for one in ignored)}
    if others:
        kind = "linear layer" if form.storage != "mxfp4" else "weight of experts"
        raise UnsupportedModelError(
            f"{architecture} is not supported: its {min(others)} is quantized, but is no {kind} of the model; use a "
            f"checkpoint in which it is not quantized"
        )
    return QuantizedNames(by_name.keys() & linear, experts)


def random_names(form: Quantization, model: Any) -> QuantizedNames:
    """Returns the parts of a model with random weights that are quantized: linear layers except for the head, and
    experts; in MXFP4 experts alone."""
    is_mxfp4 = form.storage == "mxfp4"
    linear = set() if is_mxfp4 else {name for name in linear_layers(model) if "." in name}
    experts = dict[str, tuple[tuple[str, ...], ...]]()
    for name, module in experts_of(model):
        try:
            layout = form_of(module)
        except ExpertsFormError:
            continue
        count = len(getattr(module, DOWN))
        halves = ("gate_proj", "up_proj") if layout.has_gate and not layout.interleaved else (layout.up,)
        for leaf, parts in ((layout.up, halves), (DOWN, (DOWN,))):
            each = tuple(tuple(f"{name}.{number}.{part}" for number in range(count)) for part in parts)
            experts[f"{name}.{leaf}"] = ((f"{name}.{leaf}",),) if is_mxfp4 else each
    # Experts with a layout that is not known here may be linear layers.
    return QuantizedNames({name for name in linear if "experts" not in name.split(".")}, experts)
