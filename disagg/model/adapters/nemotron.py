"""Nemotron: attention that calls the AttentionInterface, in layers that do not hand it the step's context."""

from __future__ import annotations

from disagg.model.adapters.base import Adapter, hand_contexts

ADAPTER = Adapter(hand_contexts)
