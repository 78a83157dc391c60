"""Adapter of StableLM: its attention modules call the AttentionInterface, but its layers do not pass the step's
context to them."""

from __future__ import annotations

from disagg.model.adapters.base import Adapter, pass_contexts, plan_of

ADAPTER = Adapter(pass_contexts, plan=plan_of("layers.*.mlp", ["gate_proj", "up_proj"], "down_proj"))
