"""Nemotron: its attention calls the AttentionInterface, but its layers do not pass the step's context."""

from __future__ import annotations

from disagg.model.adapters.base import Adapter, pass_contexts

ADAPTER = Adapter(pass_contexts)
