"""The experts that a step chooses: their bytes, and steps that repeat the choices of another step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from disagg.model.experts.form import experts_of
from disagg.model.experts.quantized import quantized_experts

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden states, chosen experts and their weights: the arguments of a module of experts."""


class ExpertChoices:
    """The choices of experts in a step of one token per request."""

    def __init__(self, model: Any) -> None:
        self._modules = [module for _, module in experts_of(model)]
        self._chosen: dict[Any, Arguments] = {}

    def __bool__(self) -> bool:
        """Returns whether the model has experts."""
        return bool(self._modules)

    @property
    def known(self) -> bool:
        """Whether the choices of a step are recorded."""
        return bool(self._chosen)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the choices of the step that the block runs. A CUDA graph does not record them."""

        def note(module: Any, args: Arguments) -> None:
            self._chosen[module] = args

        with _before_each(self._modules, note):
            yield

    @contextmanager
    def repeated(self, request: int) -> Iterator[None]:
        """Inside the block, a step of one token has the recorded choices of request number `request`, if any.

        Without them, rounding may change which of two experts with nearly equal scores is chosen.
        """

        def replace(module: Any, args: Arguments) -> Arguments:
            _, chosen, weights = self._chosen[module]
            row = slice(request, request + 1)
            return args[0], chosen[row], weights[row]

        with _before_each(self._chosen, replace):
            yield

    def unread_bytes(self) -> int:
        """Returns the bytes of the experts that no token of the recorded step chooses."""
        unread = 0
        for module, (_, chosen, _) in self._chosen.items():
            parameters, quantized = list(module.parameters()), quantized_experts(module)
            experts = len(parameters[0]) if quantized is None else quantized.experts
            left = experts - int(chosen.flatten().bincount().count_nonzero())
            unread += sum(one.nbytes for one in parameters) * left // experts
        return unread


@contextmanager
def _before_each(
    modules: Iterable[Any], work: Callable[[Any, Arguments], Arguments | None]
) -> Iterator[None]:
    """Inside the block, `work` gets each module and its arguments before the module runs, and may replace them."""
    hooks = [module.register_forward_pre_hook(work) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
