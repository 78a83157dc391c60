"""The heads of recurrent modules: which elements of each parameter and of each state belong to which head.

Tensor parallelism (`split`) and transfers of states between groups of different sizes need this division. A module
has heads, and consecutive heads form groups. The heads of a group share a key (gated delta rule), or B and C (state
spaces), so ranks that share a group both hold the group's elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from disagg.core.types import Span, head_span
from disagg.kv.mamba_pool import StateForm, StateHeads, StateSection

Owner = Literal["head", "group"]


class Atom(NamedTuple):
    """Consecutive elements that belong to one head or to one group."""

    owner: Owner
    number: int
    """Index of the head or group."""
    elements: int


Atoms = tuple[Atom, ...]
"""A whole dimension of a parameter, in order."""


class HeadShare(NamedTuple):
    """The heads and groups of one rank. Several ranks may hold the same group."""

    heads: Span
    groups: Span

    def spans(self, atoms: Atoms) -> tuple[Span, ...]:
        """Returns the rank's elements of a dimension; adjacent elements are one span."""
        found: list[Span] = []
        start = 0
        for owner, number, elements in atoms:
            span = Span(start, start := start + elements)
            if number not in (self.heads if owner == "head" else self.groups):
                continue
            if found and found[-1].stop == span.start:
                span = Span(found.pop().start, span.stop)
            found.append(span)
        return tuple(found)


@dataclass(frozen=True)
class ModuleHeads:
    """The division of one recurrent module by heads."""

    heads: int
    groups: int
    layers: Mapping[str, Atoms]
    """Output rows of linear layers and channels of convolutions, by the name within the module."""
    vectors: Mapping[str, Atoms]
    """Parameters and buffers with one long dimension, by name; elements of that dimension."""
    row: tuple[str, Atoms]
    """Name of the output projection, and its input columns."""
    sizes: Callable[[int, int], Mapping[str, int]]
    """Function of (heads, groups) that returns the attributes of the module that depend on them, by name."""
    states: Mapping[str, tuple[tuple[Owner, int], ...]]
    """For each kind of state: the owners of the sections of the first dimension, and the elements for each owner."""
    norm: str = ""
    """Name of a norm over the elements of each group of heads; empty if the module's norm is over each head."""
    whole: frozenset[str] = field(default_factory=frozenset)
    """Layers and norms that every rank needs whole."""

    def share(self, rank: int, ranks: int) -> HeadShare:
        """Returns the share of a rank, if `can_share_heads`."""
        return HeadShare(*(head_span(rank, ranks, count) for count in (self.heads, self.groups)))

    def state_heads(self, kind: str, share: HeadShare) -> StateHeads:
        """Returns the division of the states of a kind, on the rank with `share`."""
        counts = {"head": (self.heads, len(share.heads)), "group": (self.groups, len(share.groups))}
        sections = (StateSection(*counts[owner], rows) for owner, rows in self.states[kind])
        return StateHeads(self.heads, self.groups, tuple(sections))


def divided(
    forms: Iterable[StateForm], shares: Mapping[int, tuple[ModuleHeads, HeadShare]]
) -> list[StateForm]:
    """Returns the forms of a rank's states with their division by heads. `shares`: modules by layer; empty if ranks
    cannot share the model's recurrent layers."""
    if not shares:
        return list(forms)
    return [form._replace(heads=_state_heads(form, *shares[form.place.layer])) for form in forms]


def _state_heads(form: StateForm, module: ModuleHeads, share: HeadShare) -> StateHeads:
    return module.state_heads(form.place.kind, share)


def mamba2(module: Any) -> ModuleHeads:
    """Returns the heads of a Mamba-2 module. A group shares B and C, and its norm is over the group's heads."""
    dim, size = module.head_dim, module.ssm_state_size
    heads, groups = module.num_heads, module.n_groups
    x, b, dt = _each("head", heads, dim), _each("group", groups, size), _each("head", heads, 1)
    projected = (*x, *x, *b, *b, *dt)  # gate, input, B, C, time step
    vectors = {"dt_bias": dt, "A_log": dt, "D": dt}
    if hasattr(module, "mup_vector"):
        vectors["mup_vector"] = projected
    normed = hasattr(module.norm, "weight")
    if normed:
        vectors["norm.weight"] = x

    def sizes(heads: int, groups: int) -> dict[str, int]:
        found = {"num_heads": heads, "n_groups": groups, "intermediate_size": heads * dim}
        found["conv_dim"] = heads * dim + 2 * groups * size
        if hasattr(module, "groups_time_state_size"):
            found["groups_time_state_size"] = groups * size
        return found

    return ModuleHeads(
        heads,
        groups,
        layers={"in_proj": projected, "conv1d": (*x, *b, *b)},
        vectors=vectors,
        row=("out_proj", x),
        sizes=sizes,
        states={"conv": (("head", dim), ("group", size), ("group", size)), "recurrent": (("head", 1),)},
        norm="norm" if normed else "",
    )


def qwen3_next(module: Any) -> ModuleHeads:
    """Returns the heads of Qwen3-Next's gated delta rule. The projections are ordered by key head."""
    each = module.num_v_heads // module.num_k_heads
    key, value = module.head_k_dim, module.head_v_dim
    qkvz: list[Atom] = []
    ba: list[Atom] = []
    for group in range(module.num_k_heads):
        heads = range(group * each, (group + 1) * each)
        qkvz += [Atom("group", group, 2 * key), *(Atom("head", head, value) for head in (*heads, *heads))]
        ba += [Atom("head", head, 1) for head in (*heads, *heads)]
    return _delta(module, {"in_proj_qkvz": tuple(qkvz), "in_proj_ba": tuple(ba)}, row="out_proj", norm="norm")


def qwen3_5(module: Any) -> ModuleHeads:
    """Returns the heads of Qwen3.5's gated delta rule."""
    _, value, one, mixed = _delta_atoms(module)
    layers = {"in_proj_qkv": mixed, "in_proj_z": value, "in_proj_b": one, "in_proj_a": one}
    return _delta(module, layers, row="out_proj", norm="norm")


def olmo_hybrid(module: Any) -> ModuleHeads:
    """Returns the heads of OLMo Hybrid's gated delta rule."""
    key, value, one, _ = _delta_atoms(module)
    layers = {"q_proj": key, "k_proj": key, "v_proj": value, "g_proj": value, "a_proj": one, "b_proj": one}
    return _delta(module, layers, row="o_proj", norm="o_norm")


def kimi_linear(module: Any) -> ModuleHeads:
    """Returns the heads of Kimi Linear's delta attention. Each head is a group."""
    x = _each("head", module.num_heads, module.head_dim)
    gates = {"g_b_proj": x, "forget_gate.f_b_proj": x}
    return _kimi(module, gates, frozenset({"g_a_proj", "forget_gate.f_a_proj", "o_norm"}))


def bailing(module: Any) -> ModuleHeads:
    """Returns the heads of Bailing's delta attention. Each head is a group."""
    x = _each("head", module.num_heads, module.head_dim)
    return _kimi(module, {"g_proj": x, "forget_gate.f_proj": x}, frozenset({"o_norm"}))


def _kimi(module: Any, gates: Mapping[str, Atoms], whole: frozenset[str]) -> ModuleHeads:
    dim, heads = module.head_dim, module.num_heads
    x, one = _each("head", heads, dim), _each("head", heads, 1)

    def sizes(heads: int, _: int) -> dict[str, int]:
        qkv = heads * dim
        return {
            "num_heads": heads,
            "qkv_dim": qkv,
            "conv_dim": 3 * qkv,
            "forget_gate.num_heads": heads,
            "forget_gate.qkv_dim": qkv,
        }

    return ModuleHeads(
        heads,
        heads,
        layers={"q_proj": x, "k_proj": x, "v_proj": x, "b_proj": one, "conv1d": (*x, *x, *x), **gates},
        vectors={"forget_gate.dt_bias": x, "forget_gate.A_log": one},
        row=("o_proj", x),
        sizes=sizes,
        states={"conv": (("head", dim),) * 3, "recurrent": (("head", 1),)},
        whole=whole,
    )


def _delta(module: Any, layers: Mapping[str, Atoms], *, row: str, norm: str) -> ModuleHeads:
    _, value, one, mixed = _delta_atoms(module)
    k_dim, v_dim = module.head_k_dim, module.head_v_dim

    def sizes(heads: int, groups: int) -> dict[str, int]:
        return {
            "num_v_heads": heads,
            "num_k_heads": groups,
            "key_dim": groups * k_dim,
            "value_dim": heads * v_dim,
            "conv_dim": 2 * groups * k_dim + heads * v_dim,
        }

    return ModuleHeads(
        module.num_v_heads,
        module.num_k_heads,
        layers={**layers, "conv1d": mixed},
        vectors={"dt_bias": one, "A_log": one},
        row=(row, value),
        sizes=sizes,
        states={"conv": (("group", k_dim), ("group", k_dim), ("head", v_dim)), "recurrent": (("head", 1),)},
        whole=frozenset({norm}),
    )


def _delta_atoms(module: Any) -> tuple[Atoms, Atoms, Atoms, Atoms]:
    """Returns the atoms of keys, of values, of numbers for each head, and of the convolution's channels."""
    key = _each("group", module.num_k_heads, module.head_k_dim)
    value = _each("head", module.num_v_heads, module.head_v_dim)
    return key, value, _each("head", module.num_v_heads, 1), (*key, *key, *value)


def _each(owner: Owner, count: int, elements: int) -> Atoms:
    return tuple(Atom(owner, index, elements) for index in range(count))


def length(atoms: Sequence[Atom]) -> int:
    """Returns the number of elements of a dimension."""
    return sum(atom.elements for atom in atoms)
