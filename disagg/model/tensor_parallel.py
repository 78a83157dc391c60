"""Tensor parallelism: slices of parameters, and layers whose results are summed over the ranks.

A column-parallel layer keeps some output rows (query heads, KV heads, a part of the MLP). The row-parallel layer
after it keeps the matching input columns, and its results are summed over the ranks (Megatron-LM, Shoeybi et al.,
2019). `disagg.model.split`, `disagg.model.experts` and `disagg.model.recurrent` divide the parts of a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from disagg.core.errors import UnsupportedModelError
from disagg.core.ports import Collective
from disagg.core.types import Span
from disagg.model.spec.model_spec import ModelSpec


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


OWN_QUERIES = "own_queries"
"""Attribute of a divided attention module: the slice of the query heads that the rank has."""
Misfit = Callable[[str, tuple[int, int], Cut], str]
"""Function of the name of a linear layer, its outputs and inputs, and a slice. Returns the reason why a rank cannot
hold the slice of the layer; empty if it can."""


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


def set_sizes(module: nn.Module, sizes: Mapping[str, int]) -> None:
    """Sets attributes of a module and of modules within it, by name."""
    for name, size in sizes.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, size)


def even_span(rank: int, ranks: int, elements: int) -> Span:
    """Returns the part of `elements` elements that rank `rank` of `ranks` holds. The sizes of parts differ by at most
    one."""
    return Span(rank * elements // ranks, (rank + 1) * elements // ranks)


def section_spans(own: Span, section: int, elements: int) -> tuple[Span, ...]:
    """Returns the spans of a rank in `elements` elements that consist of sections of `section` elements each, as gate
    and up of an MLP: in every section the rank has the span `own`."""
    return tuple(Span(start + own.start, start + own.stop) for start in range(0, elements, section))


def name_pattern(name: str) -> str:
    """Returns `name` with layer numbers replaced: `model.layers.*.mlp` for `model.layers.7.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
