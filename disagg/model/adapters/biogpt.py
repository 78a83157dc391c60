"""Adapter of BioGPT: its attention calls the AttentionInterface, although transformers does not mark it as
replaceable."""

from __future__ import annotations

from disagg.model.adapters.base import QKV, Adapter, pass_contexts, plan_of

ADAPTER = Adapter(pass_contexts, plan=plan_of("layers.*.self_attn", QKV, "out_proj"))
