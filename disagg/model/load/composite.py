"""Multimodal checkpoints: the text part of one is a language model of its own, and answers text prompts."""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

_PART = "language_model."


def text_part(config: Any) -> Any:
    """The configuration of the text part; `config` itself when it has none that can be served alone.

    The part is a copy. Settings of the whole about all weights (quantization, the tied head) apply to the copy too.
    """
    text = config.get_text_config() if not config.is_encoder_decoder else config
    causal, multimodal = AutoModelForCausalLM._model_mapping, AutoModelForMultimodalLM._model_mapping
    if text is config or type(text) not in causal or type(config) not in multimodal:
        return config
    text = copy.deepcopy(text)
    text.architectures = [causal[type(text)].__name__]
    # For some types transformers builds a causal model of the text part, by the part's own setting.
    if causal[type(config)].config_class is type(config):
        text.tie_word_embeddings = config.tie_word_embeddings
    if getattr(config, "quantization_config", None):
        text.quantization_config = config.quantization_config
    return text


def text_name(name: str) -> str:
    """A weight's name in the text part alone, from that in the multimodal model."""
    return name.replace(_PART, "", 1)
