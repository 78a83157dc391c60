"""What adapters share: the step under way, as attention modules reach it, and constants that follow the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from disagg.core.errors import InvariantError
from disagg.model.attention.paged import AttentionContext, paged_attention


class StepInputs:
    """The context and the positions of the step under way, for modules that the model's `forward` hands neither.

    Each model has its own: a model's steps run on one thread, but several models may run at once.
    """

    def __init__(self, model: Any) -> None:
        """Every call of `model`, with `paged_context` and `position_ids` by keyword, is a step from now on."""
        self._context: AttentionContext | None = None
        self._positions: torch.Tensor | None = None
        own = model.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._of(kwargs["paged_context"], kwargs["position_ids"]):
                return own(*args, **kwargs)

        model.forward = forward

    @contextmanager
    def _of(self, context: AttentionContext, positions: torch.Tensor) -> Iterator[None]:
        self._context, self._positions = context, positions
        try:
            yield
        finally:
            self._context = self._positions = None

    @property
    def context(self) -> AttentionContext:
        """The step's attention. Raises InvariantError outside of a step."""
        if self._context is None:
            raise InvariantError("an attention module was called outside of a step")
        return self._context

    @property
    def positions(self) -> torch.Tensor:
        """int64 `[rows, tokens]`: the tokens' positions. Raises InvariantError outside of a step."""
        if self._positions is None:
            raise InvariantError("an attention module was called outside of a step")
        return self._positions

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        """Attention of `module`, which has a `layer_idx`: `q`, `k`, `v` `[rows, tokens, heads, dim]`.

        `named`: keyword arguments of `paged_attention`. Returns `[rows, tokens, query heads * dim of v]`.
        """
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = paged_attention(module, q, k, v, None, paged_context=self.context, **named)
        return out.flatten(2)


@dataclass(frozen=True)
class Adapter:
    """How one family of models is served."""

    adapt: Callable[[Any, StepInputs], None]
    """Changes a model that was just built, on the meta device, with attention `eager`."""
    refused: Callable[[Any], str] = lambda config: ""
    """Why a configuration of the family is not covered; empty when it is."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """A tensor-parallel plan for a family that transformers has none of; see `base_model_tp_plan`."""


def plan_of(parent: str, columns: Iterable[str], row: str) -> dict[str, str]:
    """Splits linear layers of `parent`: the outputs of `columns`, and the inputs of `row`, which reads them."""
    styles = dict.fromkeys(columns, "colwise") | {row: "rowwise"}
    return {f"{parent}.{child}": style for child, style in styles.items()}


def hand_context(
    attention: Any,
    step: StepInputs,
    through: Callable[[AttentionContext], AttentionContext] = lambda context: context,
) -> None:
    """Lets a module that calls the AttentionInterface, but is not handed the step's context, attend `through` it."""
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs | {"paged_context": through(step.context)})

    attention.forward = forward


def hand_contexts(model: Any, step: StepInputs) -> None:
    """`hand_context` for the attention of each layer."""
    for layer in model.base_model.layers:
        hand_context(layer.self_attn, step)


class Constant:
    """A small tensor that every step reads, on whichever device the step runs."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def on(self, device: torch.device) -> torch.Tensor:
        """The tensor; copied once when `device` is another one than before."""
        if self._value.device != device:
            self._value = self._value.to(device)
        return self._value


QKV = ("q_proj", "k_proj", "v_proj")
"""Projections of their own for queries, keys and values."""


def projected(attention: Any, hidden_states: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values of a module with `QKV`, each `[rows, tokens, heads, head_dim]`."""
    return [heads(getattr(attention, name)(hidden_states), attention.head_dim) for name in QKV]


def heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[..., heads * head_dim]` as `[..., heads, head_dim]`."""
    return x.reshape(*x.shape[:-1], -1, head_dim)
