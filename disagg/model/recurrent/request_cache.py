"""The cache object that a step passes to transformers' models. The cache contains only the recurrent states.

The cache returns K and V unchanged to the model; the model's attention writes K and V to the paged pool.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from disagg.core.errors import InvariantError, UnsupportedModelError
from disagg.kv.mamba_pool import StateForm, StatePlace, States
from disagg.model.spec.layer_types import attention_layers, recurrent_layers


class _PassedKV(CacheLayerMixin):  # type: ignore[misc]
    """The cache of an attention layer: stores nothing, and returns the given K and V."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Stores nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the arguments."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the mask sizes for the new tokens only: length and offset."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Returns 0: the runner always passes positions."""
        return 0

    def get_max_length(self) -> int:
        """Returns -1: the length has no limit."""
        return -1


class _StateAndPassedKV(LinearAttentionLayer, _PassedKV):  # type: ignore[misc]
    """The cache of a layer with both a recurrent state and attention."""

    def __init__(self, number_of_states: int) -> None:
        _PassedKV.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class StateCache(Cache):  # type: ignore[misc]
    """The recurrent states of a batch, in the form of transformers' cache."""

    def __init__(self, config: Any) -> None:
        attention, recurrent = set(attention_layers(config)), set(recurrent_layers(config))
        count = getattr(config, "number_of_conv_states", 1)
        layers: list[Any] = []
        for layer in range(config.num_hidden_layers):
            if layer in recurrent:
                kind = _StateAndPassedKV if layer in attention else LinearAttentionLayer
                layers.append(kind(number_of_states=count))
            else:
                layers.append(_PassedKV() if layer in attention else DummyLayer())
        Cache.__init__(self, layers=layers)
        self.layer = -1
        """Index of the layer that called `update` last."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V unchanged, and records `layer_idx`."""
        self.layer = layer_idx
        return key_states, value_states

    def states(self) -> States:
        """Returns the states' tensors, `[batch, ...]`, in a fixed order."""
        found = []
        for index, layer in enumerate(self.layers):
            for number in range(getattr(layer, "number_of_states", 0)):
                for kind in ("conv", "recurrent"):
                    tensor = getattr(layer, f"{kind}_states")[number]
                    if tensor is not None:
                        found.append((StatePlace(index, number, kind), tensor))
        return found

    def forms(self) -> list[StateForm]:
        """Returns the shape and dtype of each tensor of `states`."""
        return [StateForm(place, tuple(one.shape[1:]), one.dtype) for place, one in self.states()]

    def require(self, architecture: str, layers: tuple[int, ...]) -> None:
        """Raises a one-line UnsupportedModelError unless each of the recurrent `layers` stores its state in this
        cache."""
        missing = set(layers) - {place.layer for place, _ in self.states()}
        if missing:
            raise UnsupportedModelError(
                f"{architecture} is not supported: layers {sorted(missing)} store their state outside of the cache"
            )

    def bind(self, states: States, *, begun: bool) -> None:
        """Makes `states` the memory of this cache: the model reads its states there, and writes new states there.

        `begun`: whether the states follow earlier tokens; otherwise the states are zero.
        """
        for place, tensor in states:
            layer = self.layers[place.layer]
            getattr(layer, f"{place.kind}_states")[place.number] = tensor
            getattr(layer, f"is_{place.kind}_states_initialized")[place.number] = True
            if place.kind == "conv":
                layer.conv_kernel_size[place.number] = tensor.shape[-1]
                layer.dtype, layer.device = tensor.dtype, tensor.device
            layer.has_previous_state[place.number] = begun

    def require_bound(self, states: States) -> None:
        """Raises InvariantError unless the model has written its states into the memory of `states`."""
        for (place, bound), (_, now) in zip(states, self.states(), strict=True):
            if now is not bound:
                raise InvariantError(
                    f"layer {place.layer} has changed its shapes: its {place.kind} state is {tuple(now.shape)} now, "
                    f"and no longer in the pool, where its shape is {tuple(bound.shape)}"
                )


class MiniMaxStateCache(StateCache, MiniMaxCache):  # type: ignore[misc]
    """The `StateCache` of MiniMax, which requires a subclass of `MiniMaxCache` and calls its methods for states."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear_cache: list[torch.Tensor] = []
        """Unused: `MiniMaxCache` would keep the states in this list."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Returns a layer's state, `[requests, heads, head_dim, head_dim]`; None before the first token."""
        state: torch.Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Stores a layer's new state."""
        self.update_recurrent_state(linear_cache, layer_idx)
        self.layers[layer_idx].has_previous_state[0] = True


def make_cache(config: Any) -> StateCache:
    """Returns an empty cache of the class that the model requires."""
    return MiniMaxStateCache(config) if config.model_type == "minimax" else StateCache(config)


def cache_argument(model: torch.nn.Module) -> str:
    """Returns the name of the argument of `forward` that takes the cache."""
    name = "cache_params"
    return name if name in inspect.signature(model.forward).parameters else "past_key_values"
