"""Adapters: attention modules of transformers that do not call its AttentionInterface, or hand it too little.

An adapter replaces the attention's `forward` of one built model, and of nothing else: it computes queries, keys and
values with the module's own projections and its own rotary functions, and attends through the step's context.
"""

from __future__ import annotations

import importlib
from typing import Any

from disagg.model.adapters.base import Adapter

_FILES = {
    "biogpt": "biogpt",
    "bloom": "bloom",
    "codegen": "codegen",
    "diffllama": "diffllama",
    "doge": "doge",
    "falcon": "falcon",
    "gpt_neo": "gpt_neo",
    "gpt_neox_japanese": "gpt_neox_japanese",
    "gptj": "gptj",
    "hrm_text": "hrm_text",
    "jetmoe": "jetmoe",
    "llama4_text": "llama4",
    "megatron-bert": "bert",
    "mpt": "mpt",
    "nemotron": "nemotron",
    "openai-gpt": "openai_gpt",
    "rembert": "bert",
    "roformer": "bert",
    "stablelm": "stablelm",
    "xglm": "xglm",
}
"""Module of this folder by model type. Loaded when such a model is built: it imports transformers' own code."""


def adapter_of(config: Any) -> Adapter | None:
    """The adapter of a configuration's model type; None for a type that needs none."""
    file = _FILES.get(config.model_type)
    if file is None:
        return None
    adapter: Adapter = importlib.import_module(f"{__name__}.{file}").ADAPTER
    return adapter
