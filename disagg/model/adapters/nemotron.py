"""Nemotron: the attention module calls the AttentionInterface, but the layers do not pass the step's context to
it."""

from __future__ import annotations

from disagg.model.adapters.base import Adapter, pass_contexts

ADAPTER = Adapter(pass_contexts)
