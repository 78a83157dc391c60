"""Multimodal checkpoints: only the text part is served, because it is a complete language model."""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

_PART = "language_model."


def text_part(config: Any) -> Any:
    """Returns a copy of the text part's configuration; returns `config` itself if no text part can be served alone.

    Settings of the whole model that concern all weights (quantization, tied embeddings) are copied into the result.
    """
    text = config.get_text_config() if not config.is_encoder_decoder else config
    causal, multimodal = AutoModelForCausalLM._model_mapping, AutoModelForMultimodalLM._model_mapping
    if text is config or type(text) not in causal or type(config) not in multimodal:
        return config
    text = copy.deepcopy(text)
    text.architectures = [causal[type(text)].__name__]
    # For other types, transformers' causal model reads this setting from the text part's configuration.
    if causal[type(config)].config_class is type(config):
        text.tie_word_embeddings = config.tie_word_embeddings
    if getattr(config, "quantization_config", None):
        text.quantization_config = config.quantization_config
    return text


def text_name(name: str) -> str:
    """Returns a weight's name in the text part, given the name in the multimodal model."""
    return name.replace(_PART, "", 1)
