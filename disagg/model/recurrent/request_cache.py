"""The cache object of one request that is passed to transformers' models. It stores only the recurrent state.

The cache returns K and V unchanged to the model, whose attention writes them to the paged pool.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from disagg.core.errors import UnsupportedModelError
from disagg.model.spec.layer_types import attention_layers, recurrent_layers


class StatePlace(NamedTuple):
    """Identifies one tensor of a cache."""

    layer: int
    number: int
    """Index among the states of the layer."""
    kind: str
    """`conv` or `recurrent`."""


class _PassedKV(CacheLayerMixin):  # type: ignore[misc]
    """The attention part of a layer: returns the given K and V."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Stores nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the arguments."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the mask sizes of the new tokens only."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Returns 0: the runner always passes positions."""
        return 0

    def get_max_length(self) -> int:
        """Returns -1: the length has no limit."""
        return -1


class _StateAndPassedKV(LinearAttentionLayer, _PassedKV):  # type: ignore[misc]
    """A layer with a recurrent state and attention."""

    def __init__(self, number_of_states: int) -> None:
        _PassedKV.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class RequestCache(Cache):  # type: ignore[misc]
    """The recurrent state of one request, in the form of transformers' cache."""

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
        """The layer of the latest `update`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V unchanged, and records `layer_idx`."""
        self.layer = layer_idx
        return key_states, value_states

    def states(self) -> list[tuple[StatePlace, torch.Tensor]]:
        """Returns the state's tensors, in a fixed order."""
        found = []
        for index, layer in enumerate(self.layers):
            for number in range(getattr(layer, "number_of_states", 0)):
                for kind in ("conv", "recurrent"):
                    tensor = getattr(layer, f"{kind}_states")[number]
                    if tensor is not None:
                        found.append((StatePlace(index, number, kind), tensor))
        return found

    def form(self) -> list[tuple[StatePlace, tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each tensor of `states`."""
        return [(place, tuple(tensor.shape), tensor.dtype) for place, tensor in self.states()]

    @property
    def nbytes(self) -> int:
        """Size of the state."""
        return sum(tensor.nbytes for _, tensor in self.states())

    def require(self, architecture: str, layers: tuple[int, ...]) -> None:
        """Raises a one-line UnsupportedModelError unless each of the recurrent `layers` stores its state here."""
        missing = set(layers) - {place.layer for place, _ in self.states()}
        if missing:
            raise UnsupportedModelError(
                f"{architecture} is not supported: layers {sorted(missing)} store their state outside of the cache"
            )

    def restore(self, place: StatePlace, tensor: torch.Tensor) -> None:
        """Stores one tensor of another cache's `states`."""
        layer = self.layers[place.layer]
        getattr(layer, f"update_{place.kind}_state")(tensor, place.number)
        layer.has_previous_state[place.number] = True


class MiniMaxRequestCache(RequestCache, MiniMaxCache):  # type: ignore[misc]
    """MiniMax requires its own cache class, with other methods for the state of linear attention."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear_cache: list[torch.Tensor] = []
        """Unused: the base class would keep the states here."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Returns a layer's state, `[requests, heads, head_dim, head_dim]`; None before the first token."""
        state: torch.Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Stores a layer's new state."""
        self.restore(StatePlace(layer_idx, 0, "recurrent"), linear_cache)


def make_cache(config: Any) -> RequestCache:
    """Returns an empty cache of the class that the model requires."""
    return MiniMaxRequestCache(config) if config.model_type == "minimax" else RequestCache(config)
