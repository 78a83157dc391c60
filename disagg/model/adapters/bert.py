"""Adapter of Megatron-BERT, RemBERT and RoFormer: encoders that run as decoders. RoFormer has rotary embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from disagg.model.adapters.base import Adapter, StepInputs, heads


def _adapt(model: Any, step: StepInputs) -> None:
    encoder = model.base_model.encoder
    if hasattr(
        encoder, "embed_positions"
    ):  # its own forward would use a token's index in the step as position
        encoder.embed_positions.forward = partial(_of_positions, encoder.embed_positions, step)
    for layer in encoder.layer:
        attention = layer.attention.self
        attention.forward = partial(_forward, attention, step)


def _of_positions(table: Any, step: StepInputs, *_: Any) -> torch.Tensor:
    """Returns the sines and cosines at the positions of the step's tokens, `[tokens, head_dim]`."""
    found: torch.Tensor = table.weight[step.positions.flatten()]
    return found


def _forward(
    attention: Any,
    step: StepInputs,
    hidden_states: torch.Tensor,
    *,
    sinusoidal_pos: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    projections = (attention.query, attention.key, attention.value)
    parts = [heads(project(hidden_states), attention.attention_head_size) for project in projections]
    if sinusoidal_pos is not None:
        turned = len(parts) if attention.rotary_value else 2
        by_head = [part.transpose(1, 2) for part in parts[:turned]]
        parts[:turned] = [
            part.transpose(1, 2)
            for part in attention.apply_rotary_position_embeddings(sinusoidal_pos, *by_head)
        ]
    q, k, v = parts
    return step.attend(attention, q, k, v), None


def _refused(config: Any) -> str:
    if not config.is_decoder:
        return "attention in both directions (is_decoder = False)"
    return "cross-attention" if config.add_cross_attention else ""


ADAPTER = Adapter(_adapt, _refused)
