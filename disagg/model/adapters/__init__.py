"""Adapters for attention modules that do not call transformers' AttentionInterface, or call it without all arguments.

An adapter changes the modules of one built model, and no class of transformers. Most adapters replace the `forward`
of each attention module. The new `forward` computes queries, keys and values with the module's own projections and
rotary functions, and then calls the step's attention context.
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
"""Name of the adapter's module in this folder, by model type. A module is imported only when a model of its type is
built, because the module imports transformers."""


def adapter_of(config: Any) -> Adapter | None:
    """Returns the adapter of the configuration's model type; None if the type needs no adapter."""
    file = _FILES.get(config.model_type)
    if file is None:
        return None
    adapter: Adapter = importlib.import_module(f"{__name__}.{file}").ADAPTER
    return adapter
