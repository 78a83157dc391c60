"""Tensor parallelism: a rank's slice of every linear layer, by the model's own plan (`base_model_tp_plan`).

Column-parallel layers keep some output rows (query heads, KV heads, a part of the MLP), row-parallel ones the
matching input columns, and then sum over the ranks. Idea: Megatron-LM (Shoeybi et al., 2019). Embedding and
output head are kept whole. A plan that cannot be honoured exactly is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from disagg.core.errors import UnsupportedModelError
from disagg.core.ports import Collective
from disagg.core.types import Span
from disagg.model.spec import ModelSpec, kv_span

_QKV = ("q_proj", "k_proj", "v_proj")
_PER_HEAD = "replicated_with_grad_allreduce"  # a module applied to each head alone: kept whole


@dataclass(frozen=True)
class Cut:
    """The part of a full parameter that a rank holds: `span` along `dim`."""

    dim: int
    span: Span

    def apply(self, full: torch.Tensor) -> torch.Tensor:
        """View of the part."""
        return full.narrow(self.dim, self.span.start, len(self.span))


class RowParallelLinear(nn.Linear):
    """A linear layer over the rank's input columns: `[.., columns]` to `[.., out]`, summed over the ranks.

    Every rank holds the bias; it is added once, after the sum.
    """

    collective: Collective

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The full layer's output, the same on every rank."""
        y = nn.functional.linear(x, self.weight)
        self.collective.all_reduce(y)
        return y if self.bias is None else y + self.bias


def query_span(spec: ModelSpec, rank: int, size: int) -> Span:
    """Query heads of a rank. Raises UnsupportedModelError when `size` does not divide them."""
    heads = spec.q_heads
    if size < 1 or heads % size:
        sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UnsupportedModelError(
            f"{spec.architecture} has {heads} query heads, which {size} ranks cannot share; use {sizes}"
        )
    return Span(rank * heads // size, (rank + 1) * heads // size)


def shard_model(model: Any, spec: ModelSpec, collective: Collective) -> dict[str, Cut]:
    """Shrinks `model`, on the meta device, to the rank's slices; returns the cut of each shrunk parameter.

    Raises UnsupportedModelError, one line, for a plan or a shape that cannot be split exactly.
    """
    if collective.size == 1:
        return {}
    return _Sharder(model, spec, collective).run()


class _Sharder:
    def __init__(self, model: Any, spec: ModelSpec, collective: Collective) -> None:
        self._model = model
        self._spec = spec
        self._collective = collective
        self._queries = query_span(spec, collective.rank, collective.size)
        self._cuts: dict[str, Cut] = {}

    def run(self) -> dict[str, Cut]:
        for parent, plan in self._planned().items():
            if set(_QKV) <= plan.keys():
                self._cut_attention(parent, plan)
            else:
                self._cut_mlp(parent, plan)
        return self._cuts

    def _planned(self) -> dict[str, dict[str, str]]:
        """Style of each planned module that exists, by the parent's name and the child's."""
        styles = getattr(self._model.config, "base_model_tp_plan", None)
        if not styles:
            raise self._refuse("it comes without a tensor-parallel plan")
        prefix = self._model.base_model_prefix
        names = [name for name, _ in self._model.named_modules()]
        names += [name for name, _ in self._model.named_parameters()]
        planned: dict[str, dict[str, str]] = {}
        for pattern, style in styles.items():
            for name in names:
                if fnmatchcase(name, f"{prefix}.{pattern}"):
                    parent, _, child = name.rpartition(".")
                    planned.setdefault(parent, {})[child] = style
        layers = {parent.removesuffix(".self_attn") for parent in planned if parent.endswith("self_attn")}
        if len(layers) != self._spec.layout.layers:
            raise self._refuse(
                f"its plan covers {len(layers)} of {self._spec.layout.layers} attention layers"
            )
        return planned

    def _cut_attention(self, parent: str, plan: dict[str, str]) -> None:
        spec, dim = self._spec, self._spec.layout.head_dim
        heads = kv_span(self._collective.rank, self._collective.size, spec.layout.kv_heads)
        rows = self._rest(parent, plan, allowed=set(_QKV))
        self._cut_columns(parent, "q_proj", spec.q_heads * dim, _scale(self._queries, dim))
        self._cut_columns(parent, "k_proj", spec.layout.kv_heads * dim, _scale(heads, dim))
        self._cut_columns(parent, "v_proj", spec.layout.kv_heads * dim, _scale(heads, dim))
        self._cut_row(parent, rows, spec.q_heads * dim, _scale(self._queries, dim))

    def _cut_mlp(self, parent: str, plan: dict[str, str]) -> None:
        columns = {child for child, style in plan.items() if style == "colwise"}
        row = self._rest(parent, plan, allowed=columns)
        width = self._linear(parent, row).in_features
        rank, size = self._collective.rank, self._collective.size
        span = Span(rank * width // size, (rank + 1) * width // size)
        for child in sorted(columns):
            self._cut_columns(parent, child, width, span)
        self._cut_row(parent, row, width, span)

    def _rest(self, parent: str, plan: dict[str, str], allowed: set[str]) -> str:
        """The one row-parallel child, when everything else in `parent` is understood."""
        rows = [child for child, style in plan.items() if style == "rowwise"]
        for child, style in plan.items():
            known = (child in allowed and style == "colwise") or style in ("rowwise", _PER_HEAD)
            if not known:
                raise self._refuse(f"its plan has '{style}' for {parent}.{child}")
        if len(rows) != 1:
            raise self._refuse(f"{parent} has {len(rows)} row-parallel layers, not one")
        for name, parameter in self._model.get_submodule(parent).named_parameters():
            child = name.split(".")[0]
            whole = child not in plan or plan[child] == _PER_HEAD
            if whole and tuple(parameter.shape) != (self._spec.layout.head_dim,):
                raise self._refuse(f"{parent}.{name} {tuple(parameter.shape)} is neither split nor per head")
        return rows[0]

    def _cut_columns(self, parent: str, child: str, width: int, span: Span) -> None:
        linear = self._linear(parent, child)
        if linear.out_features != width:
            raise self._refuse(
                f"{parent}.{child} has {linear.out_features} outputs where {width} can be split"
            )
        self._cut(parent, child, linear, "weight", Cut(0, span))
        if linear.bias is not None:
            self._cut(parent, child, linear, "bias", Cut(0, span))
        linear.out_features = len(span)

    def _cut_row(self, parent: str, child: str, width: int, span: Span) -> None:
        linear = self._linear(parent, child)
        if linear.in_features != width:
            raise self._refuse(f"{parent}.{child} has {linear.in_features} inputs where {width} can be split")
        swapped = RowParallelLinear(
            len(span),
            linear.out_features,
            bias=linear.bias is not None,
            device="meta",
            dtype=linear.weight.dtype,
        )
        swapped.collective = self._collective
        setattr(self._model.get_submodule(parent), child, swapped)
        self._cuts[f"{parent}.{child}.weight"] = Cut(1, span)

    def _cut(self, parent: str, child: str, linear: nn.Linear, leaf: str, cut: Cut) -> None:
        part = cut.apply(getattr(linear, leaf).detach())
        setattr(linear, leaf, nn.Parameter(torch.empty_like(part), requires_grad=False))
        self._cuts[f"{parent}.{child}.{leaf}"] = cut

    def _linear(self, parent: str, child: str) -> nn.Linear:
        module = self._model.get_submodule(parent).get_submodule(child)
        if type(module) is not nn.Linear:
            raise self._refuse(f"{parent}.{child} is a {type(module).__name__}, not a plain linear layer")
        return module

    def _refuse(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._spec.architecture} cannot be split over {self._collective.size} ranks: {why}; use 1 rank"
        )


def _scale(span: Span, by: int) -> Span:
    return Span(span.start * by, span.stop * by)
