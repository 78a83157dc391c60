"""BioGPT: calls the AttentionInterface, though transformers does not say that its attention can be replaced."""

from __future__ import annotations

from disagg.model.adapters.base import QKV, Adapter, hand_contexts, plan_of

ADAPTER = Adapter(hand_contexts, plan=plan_of("layers.*.self_attn", QKV, "out_proj"))
