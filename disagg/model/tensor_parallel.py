"""Tensor parallelism: reduces every linear layer to a rank's slice, by the model's own plan (`base_model_tp_plan`).

A column-parallel layer keeps some output rows (query heads, KV heads, a part of the MLP). The row-parallel layer
after it keeps the matching input columns, and its results are summed over the ranks (Megatron-LM, Shoeybi et al.,
2019). Each rank holds and computes the whole embedding and output head, and every part that cannot be split exactly.
Some attention modules cannot be split (fused projections, latent attention, norms over all heads). The KV cache and
the attention itself are still split by heads; see `disagg.model.attention.paged.SharedHeads`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from disagg.core.errors import UnsupportedModelError
from disagg.core.ports import Collective
from disagg.core.types import Span, head_span
from disagg.model.spec.layer_types import attention_layers, recurrent_layers
from disagg.model.spec.model_spec import ModelSpec

_QKV = ("q_proj", "k_proj", "v_proj")
_PER_HEAD = (
    "replicated_with_grad_allreduce"  # style of a module applied to each head: every rank holds it whole
)


@dataclass(frozen=True)
class Cut:
    """The part of a full parameter that a rank holds: `spans` along `dim`, one after another."""

    dim: int
    spans: tuple[Span, ...]

    def __len__(self) -> int:
        """Returns the size of the part along `dim`."""
        return sum(map(len, self.spans))

    def apply(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the rank's part of `full`, as a view if it is one span."""
        parts = [full.narrow(self.dim, span.start, len(span)) for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


class SummedModule(nn.Module):
    """A module whose forward sums over the ranks of a group."""

    collective: Collective


class RowParallelLinear(SummedModule, nn.Linear):
    """A linear layer over the rank's input columns: `[.., columns]` to `[.., out]`, summed over the ranks.

    Every rank holds the bias; it is added once, after the sum.
    """

    product: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Function that computes the product with the weight; None: torch computes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the full layer's output, equal on every rank."""
        y = nn.functional.linear(x, self.weight) if self.product is None else self.product(x)
        self.collective.all_reduce(y)
        return y if self.bias is None else y + self.bias


def query_spans(spec: ModelSpec, rank: int, size: int) -> tuple[Span, ...]:
    """Returns the query heads of a rank in each layer class.

    Raises UnsupportedModelError when the number of query heads is not a multiple of `size`.
    """
    counts = [shape.q_heads for shape in spec.shapes]
    if size < 1 or any(heads % size for heads in counts):
        sizes = ", ".join(str(n) for n in range(1, max(counts) + 1) if not any(heads % n for heads in counts))
        heads = " or ".join(str(count) for count in sorted({*counts}))
        raise UnsupportedModelError(
            f"{spec.architecture} has {heads} query heads, which {size} ranks cannot share; use {sizes}"
        )
    return tuple(even_span(rank, size, heads) for heads in counts)


def check_tp(spec: ModelSpec, sizes: Mapping[str, int]) -> None:
    """Raises UnsupportedModelError, with the role's name, if a role's TP size in `sizes` cannot split the model."""
    for role, tp in sizes.items():
        try:
            query_spans(spec, 0, tp)
        except UnsupportedModelError as exc:
            raise UnsupportedModelError(f"{role}.tp = {tp}: {exc}") from exc


@dataclass(frozen=True)
class Sharding:
    """The result of splitting a model over ranks: the parts that are split, and those that are not."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    """The slice of each split parameter that the rank holds, by parameter name."""
    whole_attention: bool = False
    """Whether the projections of attention are not split, so that attention takes and returns all heads on every
    rank."""
    whole: dict[str, str] = field(default_factory=dict)
    """The reason, by name, for each part of the model that is not split."""


def shard_model(
    model: Any, spec: ModelSpec, collective: Collective, without: Container[str] = ()
) -> Sharding:
    """Shrinks `model`, on the meta device, to the rank's slices; the modules with the names `without` are unchanged.

    Raises UnsupportedModelError when the ranks cannot share the query heads.
    """
    if collective.size == 1:
        return Sharding()
    return _Sharder(model, spec, collective).run(without)


class _UnsplittableError(Exception):
    """Raised for a part of the model that cannot be split; the message is the reason."""


class _Sharder:
    def __init__(self, model: Any, spec: ModelSpec, collective: Collective) -> None:
        self._model = model
        self._spec = spec
        self._collective = collective
        self._queries = query_spans(spec, collective.rank, collective.size)
        self._cuts: dict[str, Cut] = {}
        self._recurrent = set(recurrent_layers(model.config))

    def run(self, without: Container[str]) -> Sharding:
        whole: dict[str, str] = {}
        planned = self._planned(without)
        attention = {parent: plan for parent, plan in planned.items() if self._is_attention(parent)}
        try:
            rows = {parent: self._check_attention(parent, plan) for parent, plan in attention.items()}
            self._check_layers(attention)
        except _UnsplittableError as why:
            whole["attention"] = str(why)
        else:
            for parent, row in rows.items():
                self._cut_attention(parent, row)
        for parent in planned.keys() - attention.keys():
            try:
                columns, row = self._check_mlp(parent, planned[parent])
            except _UnsplittableError as why:
                whole[name_pattern(parent)] = str(why)
            else:
                self._cut_mlp(parent, columns, row)
        return Sharding(self._cuts, "attention" in whole, whole)

    def _planned(self, without: Container[str]) -> dict[str, dict[str, str]]:
        """Returns the plan's style of each module and parameter of the model, by parent name, then by own name.

        The modules `without` and their children are omitted.
        """
        styles = getattr(self._model.config, "base_model_tp_plan", None) or {}
        prefix = self._model.base_model_prefix
        names = [name for name, _ in self._model.named_modules()]
        names += [name for name, _ in self._model.named_parameters()]
        planned: dict[str, dict[str, str]] = {}
        for pattern, style in styles.items():
            for name in names:
                parent, _, child = name.rpartition(".")
                left_out = name in without or parent in without
                if not left_out and fnmatchcase(name, f"{prefix}.{pattern}"):
                    planned.setdefault(parent, {})[child] = style
        return planned

    def _is_attention(self, parent: str) -> bool:
        module = self._model.get_submodule(parent)
        if hasattr(module, "self_attn"):
            return False  # a whole decoder layer may have a layer number too
        layer = getattr(module, "layer_idx", None)
        if layer in self._recurrent - set(attention_layers(self._model.config)):
            return False  # linear attention has "attention" in its name too
        return "attn" in parent or "attention" in parent or layer is not None

    def _check_layers(self, attention: Iterable[str]) -> None:
        count, layers = len(list(attention)), self._spec.attention_layers
        if count != layers:
            raise _UnsplittableError(f"its plan covers {count} of {layers} attention layers")

    def _check_attention(self, parent: str, plan: dict[str, str]) -> str:
        """Returns the name of the attention's row-parallel layer. Raises if the attention cannot be split."""
        shape = self._spec.shapes[self._class_of(parent)]
        row = self._rest(parent, plan, allowed=set(_QKV), head_dims={shape.k_dim, shape.v_dim})
        widths = (shape.q_heads * shape.k_dim, shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim)
        for child, width in zip(_QKV, widths, strict=True):
            if child == "q_proj" or self._has(parent, child):
                self._check_width(parent, child, "out_features", width)
        self._check_width(parent, row, "in_features", shape.q_heads * shape.v_dim)
        return row

    def _cut_attention(self, parent: str, row: str) -> None:
        number = self._class_of(parent)
        shape, queries = self._spec.shapes[number], self._queries[number]
        heads = head_span(self._collective.rank, self._collective.size, shape.kv_heads)
        self._cut_columns(parent, "q_proj", _scale(queries, shape.k_dim))
        for child, dim in (("k_proj", shape.k_dim), ("v_proj", shape.v_dim)):
            if self._has(parent, child):
                self._cut_columns(parent, child, _scale(heads, dim))
        self._cut_row(parent, row, _scale(queries, shape.v_dim))

    def _class_of(self, parent: str) -> int:
        return self._spec.class_of(self._model.get_submodule(parent).layer_idx) if self._spec.more else 0

    def _has(self, parent: str, child: str) -> bool:
        """Returns whether the attention module `parent` has the projection `child`.

        Layers that reuse K and V of an earlier layer have no projections of K and V. Layers that use K as V have no
        projection of V.
        """
        return not self._spec.places or getattr(self._model.get_submodule(parent), child, None) is not None

    def _check_mlp(self, parent: str, plan: dict[str, str]) -> tuple[list[str], str]:
        """Returns the names of the MLP's column-parallel layers and of its row-parallel layer. Raises if the MLP
        cannot be split.
        """
        if getattr(self._model.get_submodule(parent), "activation_sparsity", 0.0):
            raise _UnsplittableError("the threshold of its sparse activations depends on all activations")
        columns = sorted(child for child, style in plan.items() if style == "colwise")
        row = self._rest(parent, plan, allowed=set(columns))
        for child in columns:
            self._check_width(parent, child, "out_features", self._linear(parent, row).in_features)
        return columns, row

    def _cut_mlp(self, parent: str, columns: list[str], row: str) -> None:
        width = self._linear(parent, row).in_features
        span = even_span(self._collective.rank, self._collective.size, width)
        for child in columns:
            self._cut_columns(parent, child, span)
        self._cut_row(parent, row, span)

    def _rest(
        self, parent: str, plan: dict[str, str], allowed: set[str], head_dims: Container[int] = ()
    ) -> str:
        """Returns the name of the only row-parallel child of `parent`. Raises unless every other parameter can be
        split, or has the size of one head.
        """
        rows = [child for child, style in plan.items() if style == "rowwise"]
        for child, style in plan.items():
            known = (child in allowed and style == "colwise") or style in ("rowwise", _PER_HEAD)
            if not known:
                raise _UnsplittableError(f"its plan has '{style}' for {child}")
        if len(rows) != 1:
            raise _UnsplittableError(f"it has {len(rows)} row-parallel layers, not one")
        for name, parameter in self._model.get_submodule(parent).named_parameters():
            child = name.split(".")[0]
            whole = child not in plan or plan[child] == _PER_HEAD
            if whole and not (parameter.dim() == 1 and len(parameter) in head_dims):
                raise _UnsplittableError(f"its {name} {tuple(parameter.shape)} is neither split nor per head")
        return rows[0]

    def _check_width(self, parent: str, child: str, side: str, width: int) -> None:
        found = getattr(self._linear(parent, child), side)
        if found != width:
            raise _UnsplittableError(f"its {child} has {found} {side} instead of {width}")

    def _cut_columns(self, parent: str, child: str, span: Span) -> None:
        cut_outputs(self._linear(parent, child), f"{parent}.{child}", Cut(0, (span,)), self._cuts)

    def _cut_row(self, parent: str, child: str, span: Span) -> None:
        module = self._model.get_submodule(parent)
        cut_inputs(module, f"{parent}.{child}", span, self._collective, self._cuts)

    def _linear(self, parent: str, child: str) -> nn.Linear:
        module = getattr(self._model.get_submodule(parent), child, None)
        if type(module) is not nn.Linear:
            raise _UnsplittableError(f"its {child} is a {type(module).__name__}, not a plain linear layer")
        return module


def cut_outputs(linear: nn.Linear, name: str, cut: Cut, cuts: dict[str, Cut]) -> None:
    """Makes a linear layer on the meta device column-parallel: reduces weight and bias to the output features `cut`.

    `name`: full name of the layer. Adds the cuts of its parameters to `cuts`.
    """
    for leaf, _ in list(linear.named_parameters(recurse=False)):
        cut_parameter(linear, name, leaf, cut, cuts)
    linear.out_features = len(cut)


def cut_parameter(module: nn.Module, name: str, leaf: str, cut: Cut, cuts: dict[str, Cut]) -> None:
    """Reduces the parameter `leaf` of a module on the meta device to `cut`.

    `name`: full name of the module. Adds the cut to `cuts`.
    """
    part = torch.empty_like(cut.apply(getattr(module, leaf).detach()))
    setattr(module, leaf, nn.Parameter(part, requires_grad=False))
    cuts[f"{name}.{leaf}"] = cut


def cut_inputs(
    parent: nn.Module, name: str, span: Span, collective: Collective, cuts: dict[str, Cut]
) -> None:
    """Replaces a linear layer of `parent`, on the meta device, by a `RowParallelLinear` over input features `span`.

    `name`: full name of the layer. Adds the cut of its weight to `cuts`.
    """
    child = name.rpartition(".")[2]
    linear = getattr(parent, child)
    swapped = RowParallelLinear(
        len(span),
        linear.out_features,
        bias=linear.bias is not None,
        device="meta",
        dtype=linear.weight.dtype,
    )
    swapped.collective = collective
    setattr(parent, child, swapped)
    cuts[f"{name}.weight"] = Cut(1, (span,))


def even_span(rank: int, ranks: int, elements: int) -> Span:
    """Returns the part of `elements` elements that rank `rank` of `ranks` holds. The sizes of parts differ by at most
    one."""
    return Span(rank * elements // ranks, (rank + 1) * elements // ranks)


def name_pattern(name: str) -> str:
    """Returns `name` with layer numbers replaced: `model.layers.*.mlp` for `model.layers.7.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _scale(span: Span, by: int) -> Span:
    return Span(span.start * by, span.stop * by)
