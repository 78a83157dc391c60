"""Tensor parallelism of recurrent layers: reduces the modules to a rank's heads, as `disagg.model.tensor_parallel`
does for attention.

A rank holds the rows of the input projections, the channels of the convolution, the decays and the states of its
heads, and the matching columns of the output projection, whose results are summed over the ranks. Where ranks share a
group of heads, a norm over the group needs one more sum over the ranks, of its squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from disagg.core.ports import Collective
from disagg.core.types import can_share_heads
from disagg.model.layers.class_names import class_name
from disagg.model.recurrent.heads import HeadShare, ModuleHeads, length
from disagg.model.recurrent.registry import RECURRENT, has_silu
from disagg.model.spec.layer_types import recurrent_layers
from disagg.model.tensor_parallel import Cut, SummedModule, cut_inputs, cut_outputs, set_sizes


@dataclass(frozen=True)
class RecurrentSplit:
    """The rank's part of the recurrent layers."""

    shares: Mapping[int, tuple[ModuleHeads, HeadShare]] = field(default_factory=dict)
    """Heads of each recurrent layer, and the rank's share; empty if ranks cannot share the layers."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The slice of each split parameter that the rank holds, by parameter name, as in `Sharding`."""
    names: frozenset[str] = frozenset()
    """Names of the recurrent modules."""
    whole: str = ""
    """Reason why each rank holds the layers whole; empty if the layers are split, or the model has none."""
    finish: Callable[[], None] = lambda: None
    """Cuts convolutions and small parameters to the rank's part, and replaces sizes and norms. Call this after the
    weights are loaded: until then these parts stay whole, so that transformers initializes them with the same values
    for every number of ranks."""


class SplitGroupNorm(SummedModule):
    """A gated RMS norm over groups of elements, each of which several ranks share: `[.., elements of the rank]`.

    The sums of squares, float32, are added over the ranks.
    """

    def __init__(self, own: Any, share: HeadShare, module: ModuleHeads) -> None:
        """`own`: the module's norm, with whole weights."""
        super().__init__()
        self.weight = own.weight
        self.groups, self.group = module.groups, share.groups.start
        self.elements = len(own.weight) // module.groups
        self.epsilon = own.variance_epsilon
        self.gate_last = bool(getattr(own, "norm_before_gate", False))
        self.weights_float = not hasattr(own, "group_size")
        """Whether the product with the weights is in float32 (Falcon-H1)."""

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the rank's elements of the norm of `hidden`, multiplied by SiLU of `gate` before or after."""
        factor = None if gate is None else nn.functional.silu(gate.float())
        x = hidden.float()
        if factor is not None and not self.gate_last:
            x = x * factor
        squares = x.new_zeros(*x.shape[:-1], self.groups)
        squares[..., self.group] = x.pow(2).sum(-1)
        self.collective.all_reduce(squares)
        mean = squares[..., self.group : self.group + 1] / self.elements
        x = x * torch.rsqrt(mean + self.epsilon)
        x = self.weight * (x if self.weights_float else x.to(hidden.dtype))
        if factor is not None and self.gate_last:
            x = x * factor
        normed: torch.Tensor = x.to(hidden.dtype)
        return normed


def split_recurrent(model: Any, collective: Collective) -> RecurrentSplit:
    """Shrinks the recurrent modules of `model`, on the meta device, to the rank's heads.

    All recurrent layers are split, or none. The result has the shares for a group of one rank too, because transfers
    need the division of the states.
    """
    layers = recurrent_layers(model.config)
    if not layers:
        return RecurrentSplit()
    modules = _modules(model, layers)
    found = {module.layer_idx: _heads(module) for module in modules.values()}
    if not modules or None in found.values():
        why = "they have no heads that ranks can share: each rank keeps the whole state"
        return RecurrentSplit(names=frozenset(modules), whole=why)
    heads = {layer: one for layer, one in found.items() if one is not None}
    rank, ranks = collective.rank, collective.size
    if not all(can_share_heads(one.heads, one.groups, ranks) for one in heads.values()):
        shares = {layer: (one, one.share(0, 1)) for layer, one in heads.items()}
        return RecurrentSplit(shares, names=frozenset(modules), whole=_why_whole(heads, ranks))
    shares = {layer: (one, one.share(rank, ranks)) for layer, one in heads.items()}
    if ranks == 1:
        return RecurrentSplit(shares, names=frozenset(modules))
    cuts: dict[str, Cut] = {}
    for name, module in modules.items():
        _shrink(module, name, shares[module.layer_idx], collective, cuts)
    finish = partial(_finish_all, modules, shares, collective)
    return RecurrentSplit(shares, cuts, frozenset(modules), "", finish)


def _why_whole(heads: Mapping[int, ModuleHeads], ranks: int) -> str:
    one = next(iter(heads.values()))
    groups = "" if one.groups == one.heads else f" in {one.groups} groups"
    return f"{ranks} ranks cannot share {one.heads} heads{groups} evenly: each rank keeps the whole state"


def _modules(model: Any, layers: tuple[int, ...]) -> dict[str, Any]:
    """Returns the recurrent modules by name, if they are registered and are all of the model's; else nothing."""
    found = {name: module for name, module in model.named_modules() if class_name(module) in RECURRENT}
    if sorted(module.layer_idx for module in found.values()) != sorted(layers):
        return {}
    return found


def _heads(module: Any) -> ModuleHeads | None:
    """Returns the heads of a module; None if the class has no heads, or this module differs from its class."""
    form = RECURRENT[class_name(module)]
    if form.heads is None or not has_silu(module):
        return None
    found = form.heads(module)
    return found if found.heads % found.groups == 0 and _fits(module, found) else None


def _fits(module: Any, heads: ModuleHeads) -> bool:
    """Returns whether the division covers each parameter of the module, with the parameter's size."""
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        if owner == heads.row[0]:
            fits = name.endswith(".bias") or parameter.shape[1] == length(heads.row[1])
        elif owner in heads.layers:
            fits = parameter.shape[0] == length(heads.layers[owner])
        elif name in heads.vectors:
            fits = parameter.numel() == length(heads.vectors[name])
        else:
            fits = owner in heads.whole
        if not fits:
            return False
    plain = (
        type(module.get_submodule(name)) in (nn.Linear, nn.Conv1d) for name in (*heads.layers, heads.row[0])
    )
    return all(plain) and (not heads.norm or _is_group_norm(module.get_submodule(heads.norm), heads))


def _is_group_norm(norm: Any, heads: ModuleHeads) -> bool:
    """Returns whether a norm is over the elements of each group of heads."""
    if hasattr(norm, "group_size"):
        return bool(norm.group_size * heads.groups == len(norm.weight))
    return getattr(norm, "n_groups", None) == heads.groups


def _shrink(
    module: Any,
    name: str,
    shared: tuple[ModuleHeads, HeadShare],
    collective: Collective,
    cuts: dict[str, Cut],
) -> None:
    """Reduces the linear layers of a module to the rank's part."""
    heads, share = shared
    for child, atoms in heads.layers.items():
        layer = module.get_submodule(child)
        if isinstance(layer, nn.Linear):
            cut_outputs(layer, f"{name}.{child}", Cut(0, share.spans(atoms)), cuts)
    child, atoms = heads.row
    (span,) = share.spans(atoms)
    cut_inputs(module, f"{name}.{child}", span, collective, cuts)


def _finish_all(
    modules: Mapping[str, Any],
    shares: Mapping[int, tuple[ModuleHeads, HeadShare]],
    collective: Collective,
) -> None:
    for module in modules.values():
        _finish(module, *shares[module.layer_idx], collective)


def _finish(module: Any, heads: ModuleHeads, share: HeadShare, collective: Collective) -> None:
    if heads.norm:
        _split_norm(module, heads, share, collective)
    for child, atoms in heads.layers.items():
        conv = module.get_submodule(child)
        if isinstance(conv, nn.Conv1d):
            for leaf, _ in list(conv.named_parameters()):
                _replace(conv, leaf, Cut(0, share.spans(atoms)))
            conv.in_channels = conv.out_channels = conv.groups = len(conv.weight)
    for name, atoms in heads.vectors.items():
        owner, _, leaf = name.rpartition(".")
        whole = getattr(module.get_submodule(owner), leaf)
        dim = next(dim for dim, size in enumerate(whole.shape) if size == whole.numel())
        _replace(module.get_submodule(owner), leaf, Cut(dim, share.spans(atoms)))
    set_sizes(module, heads.sizes(len(share.heads), len(share.groups)))


def _replace(place: Any, leaf: str, cut: Cut) -> None:
    """Replaces a whole parameter or buffer of `place` by the rank's part."""
    whole = getattr(place, leaf)
    part = cut.apply(whole.detach()).clone()
    is_parameter = isinstance(whole, nn.Parameter)
    setattr(place, leaf, nn.Parameter(part, requires_grad=False) if is_parameter else part)


def _split_norm(module: Any, heads: ModuleHeads, share: HeadShare, collective: Collective) -> None:
    """Replaces the norm of a module if ranks share a group; otherwise, the norm keeps whole groups."""
    norm = module.get_submodule(heads.norm)
    if collective.size > heads.groups:
        split = SplitGroupNorm(norm, share, heads)
        split.collective = collective
        setattr(module, heads.norm, split)
    elif hasattr(norm, "n_groups"):
        norm.n_groups = len(share.groups)
