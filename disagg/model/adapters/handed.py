"""StableLM, Nemotron, BioGPT: attention that calls the AttentionInterface, in layers that do not hand it the context.

BioGPT's layers do; transformers only does not say of it that its attention can be replaced.
"""

from __future__ import annotations

from typing import Any

from disagg.model.adapters.base import Adapter, StepInputs, hand_context


def _adapt(model: Any, step: StepInputs) -> None:
    for layer in model.base_model.layers:
        hand_context(layer.self_attn, step)


ADAPTER = Adapter(_adapt)
