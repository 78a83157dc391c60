"""Common parts of adapters: the current step's inputs for attention modules, and constants on the step's device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from disagg.core.errors import InvariantError
from disagg.model.attention.paged import AttentionContext, paged_attention
from disagg.model.tensor_parallel import OWN_QUERIES


class StepInputs:
    """Context and positions of the current step, for modules that do not receive them from the model's `forward`.

    One object per model: a model's steps run on one thread, but several models may run at once.
    """

    def __init__(self, model: Any) -> None:
        """Wraps `model.forward`, which must be called once per step, with `paged_context` and `position_ids`."""
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
        """The step's attention context. Raises InvariantError outside of a step."""
        if self._context is None:
            raise InvariantError("an attention module was called outside of a step")
        return self._context

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the tokens, int64 `[rows, tokens]`. Raises InvariantError outside of a step."""
        if self._positions is None:
            raise InvariantError("an attention module was called outside of a step")
        return self._positions

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        """Computes the attention of `module`, which has a `layer_idx`. `q`, `k`, `v`: `[rows, tokens, heads, dim]`.

        `named`: keyword arguments of `paged_attention`, with `alibi_slopes` of all heads. Returns
        `[rows, tokens, query heads * dim of v]`.
        """
        own = getattr(module, OWN_QUERIES, None)
        if own is not None and "alibi_slopes" in named:
            named["alibi_slopes"] = named["alibi_slopes"][own]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = paged_attention(module, q, k, v, None, paged_context=self.context, **named)
        return out.flatten(2)


@dataclass(frozen=True)
class Adapter:
    """The changes that the models of one family need so that they can be served."""

    adapt: Callable[[Any, StepInputs], None]
    """Function that changes a new model in place. The model is on the meta device, and was built with `eager`
    attention."""
    refused: Callable[[Any], str] = lambda config: ""
    """Function that returns the reason why a configuration of the family is unsupported; empty if supported."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """Tensor-parallel plan, if transformers has none for the family; see `base_model_tp_plan`."""


def plan_of(parent: str, columns: Iterable[str], row: str) -> dict[str, str]:
    """Returns a tensor-parallel plan for the linear layers of the module `parent`.

    The layers `columns` are split by output; the layer `row`, which follows them, is split by input.
    """
    styles = dict.fromkeys(columns, "colwise") | {row: "rowwise"}
    return {f"{parent}.{child}": style for child, style in styles.items()}


def pass_context(
    attention: Any,
    step: StepInputs,
    through: Callable[[AttentionContext], AttentionContext] = lambda context: context,
) -> None:
    """Passes the step's context to a module that calls the AttentionInterface without a context.

    `through` may replace or wrap the context.
    """
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs | {"paged_context": through(step.context)})

    attention.forward = forward


def pass_contexts(model: Any, step: StepInputs) -> None:
    """Calls `pass_context` for the attention of each layer."""
    for layer in model.base_model.layers:
        pass_context(layer.self_attn, step)


class Constant:
    """A small constant tensor, kept on the device of the last step that used it."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def on(self, device: torch.device) -> torch.Tensor:
        """Returns the tensor on `device`; copies the tensor only when the device changes."""
        if self._value.device != device:
            self._value = self._value.to(device)
        return self._value


QKV = ("q_proj", "k_proj", "v_proj")
"""Names of the projections of a module with one projection each for queries, keys and values."""


def projected(attention: Any, hidden_states: torch.Tensor) -> list[torch.Tensor]:
    """Returns queries, keys and values of a module with `QKV`, each `[rows, tokens, heads, head_dim]`."""
    return [heads(getattr(attention, name)(hidden_states), attention.head_dim) for name in QKV]


def heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reshapes `[..., heads * head_dim]` to `[..., heads, head_dim]`."""
    return x.reshape(*x.shape[:-1], -1, head_dim)
