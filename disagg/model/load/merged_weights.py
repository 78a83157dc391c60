"""Weights of checkpoints with a separate weight for each expert, of which the model has one stacked parameter.

transformers' own table of conversions names the stored weights of each parameter. A rank reads its own slice of each
expert only. Conversions other than new names and stacked experts are left to transformers' loader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    apply_renamings,
    dot_natural_key,
)

from disagg.core.errors import ConfigError
from disagg.core.types import Span
from disagg.model.load.composite import text_name
from disagg.model.load.weights import SafetensorsWeights, WeightSource, part_shape
from disagg.model.tensor_parallel import Cut

_NUMBER = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")
"""The last number in a stored name, which is that of the expert."""


@dataclass(frozen=True)
class _Stacked:
    """The stored weights of a stacked parameter: those of all experts, for each part of an expert's matrix."""

    parts: tuple[tuple[str, ...], ...]


@dataclass
class _Names:
    """The stored weights of each parameter, by the parameter's name."""

    plain: dict[str, str] = field(default_factory=dict)
    stacked: dict[str, _Stacked] = field(default_factory=dict)

    def all(self) -> set[str]:
        return {*self.plain, *self.stacked}


class MergedWeights:
    """Weights of safetensors files, with the experts of each layer stacked."""

    def __init__(self, stored: SafetensorsWeights, names: _Names) -> None:
        self._stored, self._names = stored, names

    def load(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, cut: Cut | None
    ) -> torch.Tensor | None:
        """See `WeightSource.load`."""
        stacked = self._names.stacked.get(name)
        if stacked is None:
            return self._stored.load(self._names.plain.get(name, name), shape, dtype, device, cut)
        experts, rows = shape[0], shape[1] // len(stacked.parts)
        parts = [experts_in_order(name, part, experts) for part in stacked.parts]
        whole = torch.empty(part_shape(shape, cut), dtype=dtype, device=device)
        for expert in range(experts):
            at = 0
            for number, part in enumerate(parts):
                for one in cuts_of_part(cut, Span(number * rows, (number + 1) * rows)):
                    found = self._stored.load(part[expert], (rows, *shape[2:]), dtype, device, one)
                    assert found is not None
                    whole[expert, at : at + len(found)] = found
                    at += len(found)
        return whole

    def shape_of(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `WeightSource.shape_of`; for weights that are stored as they are."""
        return self._stored.shape_of(self._names.plain.get(name, name), expected)


def merged_weights(stored: SafetensorsWeights, needed: set[str], model: Any) -> WeightSource | None:
    """Returns the weights `needed` by `model`, from stored weights with a tensor for each expert.

    Returns None if the stored weights have other names, or need another conversion.
    """
    transforms = get_model_conversion_mapping(model)
    for rename in (str, text_name):
        names = _names(stored.names(), transforms, rename)
        if names is not None and needed <= names.all():
            return MergedWeights(stored, names)
    return None


def experts_in_order(parameter: str, names: Sequence[str], experts: int, what: str = "") -> tuple[str, ...]:
    """Returns the stored `names` of a part of a stacked parameter, one for each expert, by the expert's number.

    Raises ConfigError unless the numbers are those from 0 to `experts` - 1. `what`: the content of the named tensors.
    """
    by_number, surplus = dict[int, str](), list[str]()
    for name in names:
        found = _NUMBER.search(f"{name}.")
        number = int(found[1]) if found else -1
        if number in range(experts) and number not in by_number:
            by_number[number] = name
        else:
            surplus.append(name)
    missing = next((number for number in range(experts) if number not in by_number), None)
    if missing is None and not surplus:
        return tuple(by_number[number] for number in range(experts))
    wrong = [f"{surplus[0]} is none of them"] if surplus else []
    if missing is not None:
        absent = _NUMBER.sub(f".{missing}.", f"{names[0]}.").removesuffix(".") if names else "a part of each"
        wrong.insert(0, f"{absent} is missing")
    raise ConfigError(
        f"the checkpoint's {parameter} has {what}{len(names)} experts, but its config.json requires {experts}, "
        f"numbered from 0: {', and '.join(wrong)}"
    )


def stacked_experts(names: Iterable[str], model: Any) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Returns the weights of each stacked parameter of `model`: those of all experts, for each part of an expert's
    matrix. Some may be missing.

    `names`: weights of a checkpoint. The result lacks the weights that are not part of a stacked parameter.
    """
    transforms = get_model_conversion_mapping(model)
    _, grouped = _grouped(names, transforms, str) or ({}, {})
    return {
        target: tuple(tuple(parts.get(pattern, ())) for pattern in converter.source_patterns)
        for target, (converter, parts) in grouped.items()
        if _stacks_experts(converter)
    }


_Grouped = Mapping[str, tuple[WeightConverter, dict[str, list[str]]]]
"""The stored weights of each converted parameter, by the converter's patterns."""


def _grouped(
    stored: Iterable[str], transforms: list[Any], rename: Callable[[str], str]
) -> tuple[dict[str, str], _Grouped] | None:
    """Returns the stored weight of each parameter that is stored as it is, and those of converted parameters; None if
    two stored weights have one name."""
    renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    plain, grouped = dict[str, str](), dict[str, tuple[Any, dict[str, list[str]]]]()
    for own_name in sorted(stored, key=dot_natural_key):
        name = apply_renamings(rename(own_name), renamings)
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                grouped.setdefault(target, (converter, {}))[1].setdefault(pattern, []).append(own_name)
                break
        else:
            if name in plain:
                return None
            plain[name] = own_name
    return plain, grouped


def _names(stored: Iterable[str], transforms: list[Any], rename: Callable[[str], str]) -> _Names | None:
    """Returns the stored weights of each parameter; None if two stored weights have one name."""
    both = _grouped(stored, transforms, rename)
    if both is None:
        return None
    found = _Names(both[0])
    for target, (converter, parts) in both[1].items():
        lists = [tuple(parts[pattern]) for pattern in converter.source_patterns if pattern in parts]
        complete = len(lists) == len(converter.source_patterns) and len({*map(len, lists)}) == 1
        if complete and _stacks_experts(converter):
            found.stacked[target] = _Stacked(tuple(lists))
    return found


def _stacks_experts(converter: WeightConverter) -> bool:
    """Returns whether a conversion stacks matrices, after joining the rows of an expert's matrices."""
    kinds = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
    several = len(converter.source_patterns) > 1
    return kinds == [(MergeModulelist, 0), *([(Concatenate, 1)] if several else [])]


def cuts_of_part(cut: Cut | None, rows: Span) -> list[Cut | None]:
    """Returns the slices to read of a stored matrix that is the rows `rows` of an expert in a stacked parameter.

    `cut`: the rank's slice of the stacked parameter.
    """
    if cut is None:
        return [None]
    assert cut.dim in (1, 2), "experts are not divided over ranks"
    if cut.dim == 2:
        return [Cut(1, cut.spans)]
    found: list[Cut | None] = []
    for span in cut.spans:
        start, stop = max(span.start, rows.start), min(span.stop, rows.stop)
        if start < stop:
            found.append(Cut(0, (Span(start - rows.start, stop - rows.start),)))
    return found
