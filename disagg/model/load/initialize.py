"""Initializes the tensors that sources of weights do not hold: computed buffers, and in models with random weights
norms and other vectors.

transformers draws from the process's generator, so each module has its own seed. Vectors are drawn whole and then
cut, so a whole vector is equal for any TP size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from disagg.core.errors import UnsupportedModelError
from disagg.model.experts.quantized import quantized_experts
from disagg.model.layers.quantized import QuantizedModule
from disagg.model.load.weights import own_part, seed_of
from disagg.model.tensor_parallel import Cut


def initialize(
    model: Any,
    seed: int,
    device: torch.device,
    shapes: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
) -> None:
    """Initializes the tensors of a rank's model on `device`, except for those of linear layers and quantized experts.

    `shapes` and `cuts`: full shape of each parameter, and the rank's part of it. Raises UnsupportedModelError.
    """
    owners = dict(_owners(model, model))
    for name, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        loaded = isinstance(module, nn.Linear | QuantizedModule) or quantized_experts(module) is not None
        if any(tensor is not None for tensor in own) and not loaded:
            with _seeded(seed_of(seed, name), device), _whole_vectors(module, name, shapes, cuts):
                _init_weights(owners[module], module)
    # A parent module may set a buffer that no checkpoint holds (the multipliers of Falcon-H1).
    stored = model.state_dict(keep_vars=True)
    unset = {name for name, buffer in model.named_buffers() if name not in stored and not is_set(buffer)}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) and any(buffer.startswith(f"{name}.") for buffer in unset):
            with _seeded(seed_of(seed, name), device):
                _init_weights(owners[module], module)


def is_set(tensor: torch.Tensor) -> bool:
    """Returns whether all elements of a tensor are finite; floats are NaN until they are initialized or loaded."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the process's generators of the host and of `device`, and restores their states at the end."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for one in devices:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def _whole_vectors(
    module: nn.Module, name: str, shapes: Mapping[str, tuple[int, ...]], cuts: Mapping[str, Cut]
) -> Iterator[None]:
    """Gives the module whole vectors in place of the rank's parts, and cuts the vectors at the end."""
    divided = dict[str, Cut]()
    for leaf, part in module._parameters.items():
        cut = cuts.get(f"{name}.{leaf}")
        if part is not None and part.dim() == 1 and cut is not None:
            divided[leaf] = cut
            whole = part.new_full(shapes[f"{name}.{leaf}"], float("nan"))
            module._parameters[leaf] = nn.Parameter(whole, requires_grad=False)
    yield
    for leaf, cut in divided.items():
        drawn = module._parameters[leaf]
        assert drawn is not None
        module._parameters[leaf] = nn.Parameter(own_part(cut, drawn), requires_grad=False)


def _owners(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yields each module with the innermost transformers model that contains it, which can initialize the module."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    yield module, owner
    for child in module.children():
        yield from _owners(child, owner)


def _init_weights(model: Any, module: nn.Module) -> None:
    try:
        model._init_weights(module)
    except AttributeError as exc:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported: its {type(module).__name__} cannot be initialized separately"
        ) from exc
