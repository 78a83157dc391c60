"""Tensor parallelism of experts: every rank holds a part of each expert, as of the MLP of a dense model.

The inner elements of every expert are divided over the ranks, so ranks have equal work for any routing. The router
stays whole: all ranks choose the same experts. Weighted results of experts are summed over the ranks.
`disagg.model.split` splits MLPs that all tokens use (shared experts). Only an MLP whose result is added to that of
the experts before the sum over the ranks (Llama 4) is split here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from disagg.core.ports import Collective
from disagg.core.types import Span
from disagg.model.experts.form import DOWN, ExpertsForm, ExpertsFormError, experts_of, form_of
from disagg.model.experts.other_forms import OTHER_FORMS
from disagg.model.layers.class_names import class_name
from disagg.model.spec.quantization import Quantization
from disagg.model.tensor_parallel import (
    Cut,
    Misfit,
    SummedModule,
    cut_outputs,
    cut_parameter,
    even_span,
    name_pattern,
    set_sizes,
)

BLOCKS = (16, 8)
"""Sizes of the blocks of inner elements, of which a rank has whole ones; the preferred size first. Our kernels load
rows of 16 elements faster; torch's grouped products need rows of 16 bytes."""
_GROUPS = (128, 64, 32, 16)
"""Sizes of blocks that are tried first for quantized experts, because their elements share scales."""


@dataclass(frozen=True)
class ExpertsSplit:
    """The rank's part of the experts."""

    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The slice of each split parameter that the rank holds, by parameter name, as in `Sharding`."""
    names: frozenset[str] = frozenset()
    """Names of the modules of experts, and of the MLPs that are split with them."""
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


def split_experts(
    model: Any,
    collective: Collective,
    quantized: Quantization | None = None,
    misfit: Misfit = lambda *_: "",
) -> ExpertsSplit:
    """Shrinks the experts of `model`, on the meta device, to the rank's part.

    `quantized`: the format of the experts, if they are quantized. An MLP in `OtherForm.beside` is unchanged if some
    rank cannot hold its part, by `misfit`; `shard_model` reports it.
    """
    if collective.size == 1:
        return ExpertsSplit()
    splitter = _Splitter(model, collective, quantized, misfit)
    others = [(name, module) for name, module in model.named_modules() if class_name(module) in OTHER_FORMS]
    for split, modules in ((splitter.split, list(experts_of(model))), (splitter.split_other, others)):
        for name, module in modules:
            try:
                split(name, module)
            except ExpertsFormError as why:
                splitter.whole[name_pattern(name)] = str(why)
    cleared = splitter.cleared if collective.rank else []
    return ExpertsSplit(splitter.cuts, frozenset(splitter.names), splitter.whole, partial(_clear, cleared))


class _Splitter:
    def __init__(
        self, model: Any, collective: Collective, quantized: Quantization | None, misfit: Misfit
    ) -> None:
        self._model, self._collective, self._quantized = model, collective, quantized
        self._misfit = misfit
        self.cuts: dict[str, Cut] = {}
        self.names: set[str] = set()
        self.whole: dict[str, str] = {}
        self.cleared: list[tuple[Any, str]] = []
        """Modules and names of biases that only the first rank adds."""

    def split(self, name: str, module: Any) -> None:
        """Shrinks a module that transformers' decorator describes. Raises ExpertsFormError."""
        self.names.add(name)
        form = form_of(module)
        _shrink(module, name, form, self._own(form.inner), self.cuts)
        self._sum_of(module).register_forward_hook(_sum)
        if form.has_bias:
            self.cleared.append((module, f"{DOWN}_bias"))

    def split_other(self, name: str, module: Any) -> None:
        """Shrinks a module of `OTHER_FORMS`. Raises ExpertsFormError."""
        self.names.add(name)
        form = OTHER_FORMS[class_name(module)]
        own = self._own(form.inner(module))
        for path, cut in form.cuts(module, own).items():
            owner, _, leaf = path.rpartition(".")
            cut_parameter(module.get_submodule(owner), f"{name}.{owner}".rstrip("."), leaf, cut, self.cuts)
        set_sizes(module, dict.fromkeys(form.sizes, len(own)))
        form.adapt(module, self._collective.rank)
        if form.bias:
            self.cleared.append((module, form.bias))
        place = name.rpartition(".")[0]
        block, shared = self._model.get_submodule(place), f"{place}.{form.beside}"
        if not form.beside or not self._fits(getattr(block, form.beside), shared):
            self._sum_of(module).register_forward_hook(_sum)
            return
        self.names.add(shared)
        _shrink_mlp(getattr(block, form.beside), shared, self._collective, self.cuts)
        self._sum_of(block).register_forward_hook(_sum_first)

    def _fits(self, mlp: Any, name: str) -> bool:
        """Returns, on all ranks alike, whether each rank can hold its part of an MLP."""
        for rank in range(self._collective.size):
            for child, cut in _mlp_cuts(mlp, rank, self._collective.size).items():
                layer = getattr(mlp, child)
                if self._misfit(f"{name}.{child}", (layer.out_features, layer.in_features), cut):
                    return False
        return True

    def _own(self, inner: int) -> Span:
        return inner_spans(inner, self._collective.size, self._quantized)[self._collective.rank]

    def _sum_of(self, module: Any) -> Any:
        """Gives a module the sum over the ranks as `rank_sum`, and returns the module."""
        module.rank_sum = ExpertsSum()
        module.rank_sum.collective = self._collective
        return module


def inner_spans(inner: int, ranks: int, quantized: Quantization | None = None) -> list[Span]:
    """Returns each rank's inner elements, of `inner`. Raises ExpertsFormError if the ranks cannot share them.

    The ranks' parts of quantized experts begin at a scale, if all parts can then have one size.
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


def _sum_first(module: Any, _: Any, out: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return module.rank_sum(out[0]), out[1]


def _mlp_cuts(mlp: Any, rank: int, size: int) -> dict[str, Cut]:
    """Returns a rank's slice of each linear layer of a gated MLP."""
    own = even_span(rank, size, mlp.down_proj.in_features)
    return {"gate_proj": Cut(0, (own,)), "up_proj": Cut(0, (own,)), "down_proj": Cut(1, (own,))}


def _shrink_mlp(mlp: Any, name: str, collective: Collective, cuts: dict[str, Cut]) -> None:
    """Shrinks a gated MLP whose result its block sums over the ranks."""
    own = _mlp_cuts(mlp, collective.rank, collective.size)
    for child in ("gate_proj", "up_proj"):
        cut_outputs(getattr(mlp, child), f"{name}.{child}", own[child], cuts)
    cut_parameter(mlp.down_proj, f"{name}.down_proj", "weight", own["down_proj"], cuts)
    mlp.down_proj.in_features = len(own["down_proj"])


def _clear(biases: list[tuple[Any, str]]) -> None:
    for module, leaf in biases:
        getattr(module, leaf).data.zero_()
