"""The form of a module of experts: the layout of its stacked weights.

transformers stacks the weights of all experts of a layer in parameters of three dimensions. Its decorator
`use_experts_implementation` describes the layout by attributes (`has_gate`, `has_bias`, `is_transposed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from disagg.core.types import Span

DOWN = "down_proj"
_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
_PROBED_ROWS = 3


class ExpertsFormError(Exception):
    """Raised for experts with an unknown form; the message is the reason."""


@dataclass(frozen=True)
class ExpertsForm:
    """The layout of the weights of a module of experts."""

    up: str
    """Name of the first product's weights: `gate_up_proj`, or `up_proj` without a gate."""
    inner: int
    """Number of elements between the two products of an expert."""
    transposed: bool
    """Whether weights are `[experts, inputs, outputs]`, not `[experts, outputs, inputs]`."""
    has_gate: bool
    has_bias: bool
    interleaved: bool = False
    """Whether rows of gate and up alternate; otherwise all rows of the gate come first."""

    @property
    def outputs(self) -> int:
        """Number of outputs of the first product."""
        return 2 * self.inner if self.has_gate else self.inner

    @property
    def up_dim(self) -> int:
        """Dimension of the first product's outputs in its weights."""
        return 2 if self.transposed else 1

    @property
    def down_dim(self) -> int:
        """Dimension of the second product's inputs in its weights."""
        return 1 if self.transposed else 2

    def up_spans(self, inner: Span) -> tuple[Span, ...]:
        """Returns the first product's outputs that belong to the inner elements `inner`."""
        if not self.has_gate:
            return (inner,)
        if self.interleaved:
            return (Span(2 * inner.start, 2 * inner.stop),)
        return inner, Span(self.inner + inner.start, self.inner + inner.stop)


def experts_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the modules of `model` that hold the stacked weights of several experts, by name."""
    for name, module in model.named_modules():
        if all(hasattr(module, attribute) for attribute in _ATTRIBUTES):
            yield name, module


def form_of(module: Any) -> ExpertsForm:
    """Returns the form of a module of experts, which may be on the meta device. Raises ExpertsFormError."""
    if module.has_post_expert_norm:
        raise ExpertsFormError("a norm follows the experts' second product")
    up, transposed = "gate_up_proj" if module.has_gate else "up_proj", bool(module.is_transposed)
    biases = [f"{name}_bias" for name in (up, DOWN)] if module.has_bias else []
    found = sorted(name for name, _ in module.named_parameters())
    if found != sorted([up, DOWN, *biases]):
        raise ExpertsFormError(f"its experts have other parameters: {', '.join(found)}")
    weights, down = getattr(module, up), getattr(module, DOWN)
    if weights.dim() != 3 or down.dim() != 3:
        raise ExpertsFormError("the weights of its experts are not stacked")
    form = ExpertsForm(
        up, down.shape[1 if transposed else 2], transposed, bool(module.has_gate), bool(module.has_bias)
    )
    if weights.shape[form.up_dim] != form.outputs:
        raise ExpertsFormError(f"its {up} is {tuple(weights.shape)} and its {DOWN} is {tuple(down.shape)}")
    return _with_order(form, module)


def gated(form: ExpertsForm, module: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns the inner elements of the experts, given the first product's outputs `x` `[rows, outputs]`."""
    y: torch.Tensor = module._apply_gate(x) if form.has_gate else module.act_fn(x)
    return y


def _with_order(form: ExpertsForm, module: Any) -> ExpertsForm:
    """Returns `form` with the order of the rows of gate and up, which is found by applying the module's activation to
    random numbers."""
    half = Span(0, (form.inner + 1) // 2)
    own = torch.Generator().manual_seed(0)  # torch's own generator is not changed
    x = torch.randn(_PROBED_ROWS, form.outputs, dtype=torch.float64, generator=own)
    for interleaved in (False, True) if form.has_gate else (False,):
        candidate = replace(form, interleaved=interleaved)
        part = torch.cat([x[:, span.start : span.stop] for span in candidate.up_spans(half)], 1)
        try:
            whole, found = gated(form, module, x), gated(form, module, part)
        except (RuntimeError, AttributeError, TypeError) as exc:
            raise ExpertsFormError("the activation of its experts needs more than their products") from exc
        fits = found.shape == (_PROBED_ROWS, len(half))
        if fits and torch.allclose(found, whole[:, : len(half)], atol=1e-6):
            return candidate
    raise ExpertsFormError("the activation of its experts mixes their inner elements")
