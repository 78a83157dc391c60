"""Adapter of Nemotron: its attention modules call the AttentionInterface, but its layers do not pass the step's
context to them."""

from __future__ import annotations

from disagg.model.adapters.base import Adapter, pass_contexts

ADAPTER = Adapter(pass_contexts)
