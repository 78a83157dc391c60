"""BioGPT: calls the AttentionInterface, although transformers does not mark its attention as replaceable."""

from __future__ import annotations

from disagg.model.adapters.base import QKV, Adapter, pass_contexts, plan_of

ADAPTER = Adapter(pass_contexts, plan=plan_of("layers.*.self_attn", QKV, "out_proj"))
