"""Divides a model's attention and MLPs over the ranks of a group: reduces linear layers to a rank's slice.

Registries (`attention_parts`, `mlp_parts`) name the layers of a class; modules of other classes are divided by the
model's own plan (`base_model_tp_plan`). Each rank holds and computes the whole embedding and output head, and every
part that cannot be divided exactly. If some attention module cannot be divided, the projections of all are held
whole; the KV cache and the attention itself are still divided by heads (`disagg.model.attention.paged.SharedHeads`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from disagg.core.ports import Collective
from disagg.core.types import Span, head_span
from disagg.model.layers.class_names import class_name
from disagg.model.spec.layer_types import attention_layers, recurrent_layers
from disagg.model.spec.model_spec import ModelSpec
from disagg.model.split.attention_parts import (
    QKV,
    AttentionParts,
    HeadsOfRank,
    IndivisibleError,
    attention_parts,
)
from disagg.model.split.mlp_parts import MLP_PARTS, MLPParts
from disagg.model.split.row_norm import SplitRowRMSNorm
from disagg.model.tensor_parallel import (
    OWN_QUERIES,
    Cut,
    Misfit,
    cut_inputs,
    cut_outputs,
    cut_parameter,
    even_span,
    name_pattern,
    query_spans,
    section_spans,
)

_PER_HEAD = (
    "replicated_with_grad_allreduce"  # style of a module applied to each head: every rank holds it whole
)
_OF_OTHERS = ("local_params", "embedding_rowwise")
"""Styles of parameters that belong to a module with a plan of its own, and of the embedding."""


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
    model: Any,
    spec: ModelSpec,
    collective: Collective,
    without: Container[str] = (),
    misfit: Misfit = lambda *_: "",
) -> Sharding:
    """Shrinks `model`, on the meta device, to the rank's slices; the modules with the names `without` are unchanged.

    Raises UnsupportedModelError when the ranks cannot share the query heads.
    """
    if collective.size == 1:
        return Sharding()
    return _Sharder(model, spec, collective, misfit).run(without)


@dataclass
class _Slices:
    """The rank's slices of a module."""

    columns: dict[str, Cut] = field(default_factory=dict)
    """Outputs of linear layers, by the name within the module."""
    rows: dict[str, Span] = field(default_factory=dict)
    """Inputs of the linear layers whose results are summed over the ranks."""
    vectors: dict[str, Cut] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Values of attributes; see `AttentionParts.sizes`."""
    norms: dict[str, tuple[Span, SplitRowRMSNorm]] = field(default_factory=dict)
    """Elements of norms over all heads, and the norms over these elements."""
    queries: Span | None = None
    """Query heads of an attention module."""


class _Sharder:
    def __init__(self, model: Any, spec: ModelSpec, collective: Collective, misfit: Misfit) -> None:
        self._model = model
        self._spec = spec
        self._collective = collective
        self._misfit = misfit
        query_spans(spec, collective.rank, collective.size)  # raises if the ranks cannot share the heads
        self._cuts: dict[str, Cut] = {}
        self._modules = dict(model.named_modules(remove_duplicate=False))
        """Modules by name. `get_submodule` looks up each part of a name again."""
        self._linear_attention = set(recurrent_layers(model.config)) - set(attention_layers(model.config))
        """Indices of the layers with a recurrent state only."""

    def run(self, without: Container[str]) -> Sharding:
        whole: dict[str, str] = {}
        planned = self._planned(without)
        attention: dict[str, AttentionParts | dict[str, str]] = {
            parent: plan for parent, plan in planned.items() if self._is_attention(parent)
        }
        attention |= self._registered(without)
        try:
            slices = {
                parent: self._own(parent, partial(self._attention_slices, parent, found))
                for parent, found in attention.items()
            }
            self._check_layers(len(attention))
        except IndivisibleError as why:
            whole["attention"] = str(why)
        else:
            for parent, one in slices.items():
                self._cut(parent, one)
        mlps: dict[str, MLPParts | dict[str, str]] = {
            parent: plan for parent, plan in planned.items() if parent not in attention
        }
        mlps |= {
            name: MLP_PARTS[class_name(module)]
            for name, module in self._model.named_modules()
            if class_name(module) in MLP_PARTS and name not in without
        }
        for parent, found in mlps.items():
            try:
                own = self._own(parent, partial(self._mlp_slices, parent, found))
            except IndivisibleError as why:
                whole[name_pattern(parent)] = str(why)
            else:
                self._cut(parent, own)
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
            for name in names if style not in _OF_OTHERS else ():
                parent, _, child = name.rpartition(".")
                left_out = name in without or parent in without
                if not left_out and fnmatchcase(name, f"{prefix}.{pattern}"):
                    planned.setdefault(parent, {})[child] = style
        return planned

    def _registered(self, without: Container[str]) -> Iterator[tuple[str, AttentionParts]]:
        """Yields the parts of the registered attention modules, by name."""
        for name, module in self._model.named_modules():
            parts = None if name in without else attention_parts(module)
            if parts is not None:
                yield name, parts

    def _is_attention(self, parent: str) -> bool:
        module = self._modules[parent]
        if hasattr(module, "self_attn"):
            return False  # a whole decoder layer may have a layer number too
        layer = getattr(module, "layer_idx", None)
        if layer in self._linear_attention:
            return False  # linear attention has "attention" in its name too
        return "attn" in parent or "attention" in parent or layer is not None

    def _check_layers(self, count: int) -> None:
        layers = self._spec.attention_layers
        if count != layers:
            raise IndivisibleError(f"the heads of {count} of {layers} attention layers are known")

    def _own(self, parent: str, slices: Callable[[int], _Slices]) -> _Slices:
        """Returns the rank's slices of a module. `slices`: the function of a rank's number.

        Raises IndivisibleError, on all ranks alike, if any rank cannot hold its slices.
        """
        each = [slices(rank) for rank in range(self._collective.size)]
        for one in each:
            self._check_fit(parent, one)
        return each[self._collective.rank]

    def _attention_slices(self, parent: str, found: AttentionParts | dict[str, str], rank: int) -> _Slices:
        """Returns a rank's slices of an attention module, given its parts or plan. Raises IndivisibleError."""
        parts = found if isinstance(found, AttentionParts) else _attention_of_plan(found)
        number, size = self._class_of(parent), self._collective.size
        shape, queries = self._spec.shapes[number], query_spans(self._spec, rank, size)[number]
        groups = head_span(rank, size, shape.kv_heads)
        if parts.blocks % size:
            raise IndivisibleError(f"{size} ranks cannot share its {parts.blocks} blocks of heads")
        shared = max(0, head_span(rank - 1, size, shape.kv_heads).stop - groups.start) if rank else 0
        heads, slices = HeadsOfRank(shape, queries, groups, shared), _Slices(queries=queries)
        self._check_covered(parent, parts, {shape.k_dim, shape.v_dim})
        for child, sections in parts.columns.items():
            if self._has(parent, child):
                outputs = self._linear(parent, child).out_features
                slices.columns[child] = Cut(0, heads.outputs(child, sections, outputs))
        slices.rows[parts.row] = heads.inputs(parts.row, self._linear(parent, parts.row).in_features)
        slices.vectors = {leaf: Cut(0, (queries,)) for leaf in parts.vectors if self._has(parent, leaf)}
        for child, section in parts.norms.items():
            (part,) = heads.outputs(child, (section,), len(self._child(parent, child).weight))
            norm = SplitRowRMSNorm(self._child(parent, child), part, heads.shared_elements(section))
            slices.norms[child] = part, norm
        slices.sizes = {name: heads.size(kind) for name, kind in parts.sizes.items()}
        return slices

    def _check_covered(self, parent: str, parts: AttentionParts, head_dims: Container[int]) -> None:
        """Raises IndivisibleError unless each parameter is divided, whole on each rank, or as large as a head.

        Only a vector of the module or of its direct children applies to each head. A vector of this size in a deeper
        module can belong to one of several heads (StableLM).
        """
        layers = (*parts.columns, parts.row)
        for name, parameter in self._modules[parent].named_parameters():
            owner = name.rpartition(".")[0]
            known = owner in layers or owner in parts.norms or name in parts.vectors
            known |= any(f"{name}.".startswith(f"{whole}.") for whole in parts.whole)
            each_head = name.count(".") <= 1 and parameter.dim() == 1 and len(parameter) in head_dims
            if not (known or each_head):
                raise IndivisibleError(f"its {name} {tuple(parameter.shape)} is neither split nor per head")

    def _class_of(self, parent: str) -> int:
        return self._spec.class_of(self._modules[parent].layer_idx) if self._spec.more else 0

    def _has(self, parent: str, child: str) -> bool:
        """Returns whether the module `parent` has the layer or parameter `child`.

        Layers that reuse K and V of an earlier layer have no projections of K and V. Layers that use K as V have no
        projection of V.
        """
        return self._child(parent, child) is not None

    def _child(self, parent: str, child: str) -> Any:
        found = self._modules[parent]
        for name in child.split("."):
            found = getattr(found, name, None)
        return found

    def _mlp_slices(self, parent: str, found: MLPParts | dict[str, str], rank: int) -> _Slices:
        """Returns a rank's slices of an MLP, given its parts or plan. Raises IndivisibleError."""
        parts = found if isinstance(found, MLPParts) else self._mlp_of_plan(parent, found)
        width, size = self._linear(parent, parts.row).in_features, self._collective.size
        own, slices = even_span(rank, size, width), _Slices()
        if width < size:
            raise IndivisibleError(f"{size} ranks cannot share {width} inner elements")
        for child in parts.layers_of(self._modules[parent]):
            outputs = self._linear(parent, child).out_features
            if outputs % width:
                raise IndivisibleError(f"its {child} has {outputs} out_features instead of {width}")
            slices.columns[child] = Cut(0, section_spans(own, width, outputs))
        slices.rows[parts.row] = own
        return slices

    def _mlp_of_plan(self, parent: str, plan: dict[str, str]) -> MLPParts:
        module = self._modules[parent]
        if getattr(module, "activation_sparsity", 0.0):
            raise IndivisibleError("the threshold of its sparse activations depends on all activations")
        columns = tuple(sorted(child for child, style in plan.items() if style == "colwise"))
        row = _planned_row(plan, columns)
        for name, parameter in module.named_parameters():
            if name.split(".")[0] not in plan:
                raise IndivisibleError(f"its {name} {tuple(parameter.shape)} is not split")
        width = self._linear(parent, row).in_features
        for child in columns:
            outputs = self._linear(parent, child).out_features
            if outputs != width:
                raise IndivisibleError(f"its {child} has {outputs} out_features instead of {width}")
        return MLPParts(columns, row)

    def _check_fit(self, parent: str, slices: _Slices) -> None:
        """Raises IndivisibleError if the rank cannot hold a slice, because of the format of quantized weights."""
        cuts = slices.columns | {child: Cut(1, (own,)) for child, own in slices.rows.items()}
        for child, cut in cuts.items():
            layer = self._linear(parent, child)
            why = self._misfit(f"{parent}.{child}", (layer.out_features, layer.in_features), cut)
            if why:
                raise IndivisibleError(why)

    def _linear(self, parent: str, child: str) -> nn.Linear:
        module = self._child(parent, child)
        if type(module) is not nn.Linear:
            raise IndivisibleError(f"its {child} is a {type(module).__name__}, not a plain linear layer")
        return module

    def _cut(self, parent: str, slices: _Slices) -> None:
        module = self._modules[parent]
        for child, cut in slices.columns.items():
            cut_outputs(self._linear(parent, child), f"{parent}.{child}", cut, self._cuts)
        for child, own in slices.rows.items():
            owner = module.get_submodule(child.rpartition(".")[0])
            cut_inputs(owner, f"{parent}.{child}", own, self._collective, self._cuts)
        for leaf, cut in slices.vectors.items():
            cut_parameter(module, parent, leaf, cut, self._cuts)
        for child, (part, norm) in slices.norms.items():
            norm.collective = self._collective
            setattr(module, child, norm)
            self._cuts[f"{parent}.{child}.weight"] = Cut(0, (part,))
        _set_sizes(module, slices.sizes)
        if slices.queries is not None:
            setattr(module, OWN_QUERIES, slice(slices.queries.start, slices.queries.stop))


def _attention_of_plan(plan: dict[str, str]) -> AttentionParts:
    """Returns the parts that the plan of an attention module names. Raises IndivisibleError."""
    row = _planned_row(plan, QKV)
    whole = tuple(child for child, style in plan.items() if style == _PER_HEAD)
    return AttentionParts({child: QKV[child] for child in plan if child in QKV}, row, whole=whole)


def _planned_row(plan: Mapping[str, str], columns: Container[str]) -> str:
    """Returns the name of the only row-parallel layer of a module's plan. Raises IndivisibleError for a plan with
    other layers than this one and `columns`."""
    rows = [child for child, style in plan.items() if style == "rowwise"]
    for child, style in plan.items():
        known = (child in columns and style == "colwise") or style in ("rowwise", _PER_HEAD)
        if not known:
            raise IndivisibleError(f"its plan has '{style}' for {child}")
    if len(rows) != 1:
        raise IndivisibleError(f"it has {len(rows)} row-parallel layers, not one")
    return rows[0]


def _set_sizes(module: Any, sizes: Mapping[str, int]) -> None:
    """Sets attributes of a module. Those of its configuration are set in a copy that belongs to this module."""
    for name, value in sizes.items():
        owner, _, leaf = name.rpartition(".")
        if owner:
            module.config = copy.copy(module.config)
        setattr(module.config if owner else module, leaf, value)
