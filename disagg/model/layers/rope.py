"""Rotary embeddings that change with the length of a request (`longrope`, as in Phi-3).

transformers chooses short or long frequencies by the longest sequence of a batch. This module chooses for each token,
by the length of the token's request, because a step mixes requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from disagg.model.batch import StepBatch


class LengthRope(nn.Module):
    """Wraps a model's rotary module; the runner sets `long` before each step."""

    def __init__(self, rotary: Any, switch_tokens: int) -> None:
        """Requests of more than `switch_tokens` tokens use the long frequencies."""
        super().__init__()
        self.rotary = rotary
        self.switch_tokens = switch_tokens
        self.long: torch.Tensor | None = None
        """bool `[1, T]`: whether each token's request is long; None: all requests are short."""

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin `[1, T, dim]` of int64 `position_ids` `[1, T]`, in the dtype of `x`."""
        last = self.switch_tokens - 1
        # The wrapped module chooses frequencies by the highest position. Clamping affects only tokens of long
        # requests, for which the short result is not used.
        short: tuple[torch.Tensor, torch.Tensor] = self.rotary(x, position_ids.clamp(max=last), **more)
        if self.long is None:
            return short
        beyond = torch.full_like(position_ids[:, :1], last + 1)
        long = self.rotary(x, torch.cat([position_ids, beyond], dim=1), **more)
        cos, sin = (torch.where(self.long[..., None], a[:, :-1], b) for a, b in zip(long, short, strict=True))
        return cos, sin


def wrap_ropes(model: Any, switch_tokens: int) -> list[LengthRope]:
    """Wraps each `longrope` module of `model` in a `LengthRope`; returns the wrappers."""
    found = [name for name, m in model.named_modules() if getattr(m, "rope_type", None) == "longrope"]
    ropes = []
    for name in found:
        parent, _, leaf = name.rpartition(".")
        ropes.append(LengthRope(model.get_submodule(name), switch_tokens))
        setattr(model.get_submodule(parent), leaf, ropes[-1])
    return ropes


def long_tokens(batch: StepBatch, switch_tokens: int) -> list[int]:
    """Returns one number per token of the step: 1 if the token's request has more than `switch_tokens` tokens, else
    0."""
    return [
        int(max(sequence.prompt_tokens, sequence.stop) > switch_tokens)
        for sequence in batch.sequences
        for _ in sequence.tokens
    ]
