"""The head of a model, which turns hidden states into logits, run apart from the model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class ModelHead:
    """Computes logits of the same pass at other positions, without a new pass through the layers.

    The head is everything that the model's `forward` does after its base model: `lm_head`, and scales or soft caps of
    the logits. The logits of a whole prompt would take `tokens x vocab x 4` bytes, so they are computed in parts.
    """

    def __init__(self, model: Any) -> None:
        """`model`: a transformers model with a head."""
        self._base: nn.Module | None = model.base_model if model.base_model is not model else None

    @property
    def is_separate(self) -> bool:
        """Whether the model has a base model below its head."""
        return self._base is not None

    @contextmanager
    def after_one_pass(self) -> Iterator[None]:
        """Within the block the model's first call is a whole pass; each later call only computes the head, from the
        hidden states of the first call. All calls have the same arguments, except for `logits_to_keep`."""
        base = self._base
        assert base is not None, "requests for prompt log-probabilities are refused"
        own, forward = vars(base).get("forward"), base.forward
        kept: list[Any] = []

        def first_or_kept(*args: Any, **kwargs: Any) -> Any:
            if not kept:
                kept.append(forward(*args, **kwargs))
            return kept[0]

        base.forward = first_or_kept
        try:
            yield
        finally:
            if own is None:
                del base.forward
            else:
                base.forward = own
