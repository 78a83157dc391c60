"""Tensor parallelism of experts: every rank holds a part of each expert, as of the MLP of a dense model.

The inner elements of every expert are divided over the ranks, so ranks have equal work for any routing. The router
stays whole: all ranks choose the same experts. Weighted results of experts are summed over the ranks.
An MLP that all tokens use (a shared expert) is split too, even if the model's own plan does not name the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from disagg.core.ports import Collective
from disagg.core.types import Span
from disagg.model.experts.form import DOWN, ExpertsForm, ExpertsFormError, experts_of, form_of
from disagg.model.layers.class_names import class_name
from disagg.model.layers.gated_mlps import GATED_MLPS
from disagg.model.spec.quantization import Quantization
from disagg.model.tensor_parallel import (
    Cut,
    SummedModule,
    cut_inputs,
    cut_outputs,
    cut_parameter,
    even_span,
    name_pattern,
)

BLOCKS = (16, 8)
"""Numbers of inner elements that are not divided, the preferred one first. Our kernels load rows of 16 elements
faster; torch's grouped products need rows of 16 bytes."""
_GROUPS = (128, 64, 32, 16)
"""Numbers of inner elements of quantized experts that share scales, and are not divided if possible."""


@dataclass(frozen=True)
class ExpertsSplit:
    """The rank's part of the experts."""

    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The slice of each split parameter that the rank holds, by parameter name, as in `Sharding`."""
    names: frozenset[str] = frozenset()
    """Names of the modules of experts, and of shared experts that are split."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """The reason, by name, for experts that every rank holds whole."""
    finish: Callable[[], None] = lambda: None
    """Clears the biases that another rank adds. Call this after the weights are loaded."""


class ExpertsSum(SummedModule):
    """The sum of the experts' results over the ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` with the sum over the ranks in its memory."""
        self.collective.all_reduce(x)
        return x


def split_experts(model: Any, collective: Collective, quantized: Quantization | None = None) -> ExpertsSplit:
    """Shrinks the experts of `model`, on the meta device, to the rank's part.

    `quantized`: the format of the experts, if they are quantized.
    """
    if collective.size == 1:
        return ExpertsSplit()
    cuts: dict[str, Cut] = {}
    names: set[str] = set()
    whole: dict[str, str] = {}
    cleared: list[Any] = []
    for name, module in list(experts_of(model)):
        names.add(name)
        try:
            form = form_of(module)
            own = inner_spans(form.inner, collective.size, quantized)[collective.rank]
        except ExpertsFormError as why:
            whole[name_pattern(name)] = str(why)
            continue
        _shrink(module, name, form, own, cuts)
        module.rank_sum = ExpertsSum()
        module.rank_sum.collective = collective
        module.register_forward_hook(_sum)
        if form.has_bias and collective.rank:
            cleared.append(module)
        for shared, mlp in _shared_mlps(model, name):
            names.add(shared)
            _shrink_mlp(mlp, shared, collective, cuts)
    return ExpertsSplit(cuts, frozenset(names), whole, partial(_clear, cleared))


def inner_spans(inner: int, ranks: int, quantized: Quantization | None = None) -> list[Span]:
    """Returns each rank's inner elements, of `inner`. Raises ExpertsFormError if the ranks cannot share them.

    Of quantized experts, parts begin with a scale where all parts can then be equal.
    """
    blocks_tried: tuple[int, ...] = BLOCKS
    if quantized is not None and (least := quantized.least_cut(inner)) > 1:
        equal = (size for size in _GROUPS if inner % (size * ranks) == 0)
        blocks_tried = (*(size for size in equal if least <= size <= quantized.block[1]), least)
    for block in blocks_tried:
        blocks = inner // block
        if inner % block == 0 and blocks >= ranks:
            ends = [rank * blocks // ranks * block for rank in range(ranks + 1)]
            return [Span(*pair) for pair in pairwise(ends)]
    raise ExpertsFormError(
        f"{ranks} ranks cannot share {inner} inner elements in blocks of {blocks_tried[-1]}"
    )


def _shrink(module: Any, name: str, form: ExpertsForm, own: Span, cuts: dict[str, Cut]) -> None:
    parts = {form.up: Cut(form.up_dim, form.up_spans(own)), DOWN: Cut(form.down_dim, (own,))}
    if form.has_bias:
        parts[f"{form.up}_bias"] = Cut(1, form.up_spans(own))
    for leaf, cut in parts.items():
        cut_parameter(module, name, leaf, cut, cuts)
    if hasattr(module, "intermediate_dim"):
        module.intermediate_dim = len(own)


def _sum(module: Any, _: Any, out: torch.Tensor) -> torch.Tensor:
    summed: torch.Tensor = module.rank_sum(out)
    return summed


def _shared_mlps(model: Any, experts: str) -> Iterator[tuple[str, Any]]:
    """Yields the MLPs beside a module of experts, and beside the block that contains the module, by name."""
    block = experts.rpartition(".")[0]
    for place in (block, block.rpartition(".")[0]):
        for child, module in model.get_submodule(place).named_children():
            form = GATED_MLPS.get(class_name(module))
            if form is not None and all(type(getattr(module, layer)) is nn.Linear for layer in form.layers):
                yield f"{place}.{child}", module


def _shrink_mlp(mlp: Any, name: str, collective: Collective, cuts: dict[str, Cut]) -> None:
    *columns, row = GATED_MLPS[class_name(mlp)].layers
    width = getattr(mlp, row).in_features
    own = even_span(collective.rank, collective.size, width)
    for child in columns:
        layer = getattr(mlp, child)
        blocks = layer.out_features // width  # 2 if the layer computes gate and up
        spans = tuple(Span(block * width + own.start, block * width + own.stop) for block in range(blocks))
        cut_outputs(layer, f"{name}.{child}", Cut(0, spans), cuts)
    cut_inputs(mlp, f"{name}.{row}", own, collective, cuts)


def _clear(modules: list[Any]) -> None:
    for module in modules:
        getattr(module, f"{DOWN}_bias").data.zero_()
