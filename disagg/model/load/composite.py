"""Multimodal checkpoints: only the text part is served, because it is a complete language model."""

from __future__ import annotations

import copy
import re
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

_PART = re.compile(r"(language_model|text_model)\.")
WRAPPED = (
    "aya_vision",
    "cohere2_vision",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
    "voxtral",
)
"""Types that transformers does not list as causal models, and whose text part equals one. Tests compare each of them
with the whole model; other types may mask their text differently."""
_PLAIN = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Types of text parts that have no causal model of their own, and the equal type that has one. Their rotary positions
have three axes, which are equal for text."""
_AXES = ("type", "mrope_section", "mrope_interleaved")


def text_part(config: Any) -> Any:
    """Returns a copy of the text part's configuration; returns `config` itself if no text part can be served alone.

    Settings of the whole model that concern all weights (quantization, tied embeddings) are copied into the result.
    """
    text = config.get_text_config() if not config.is_encoder_decoder else config
    causal, multimodal = AutoModelForCausalLM._model_mapping, AutoModelForMultimodalLM._model_mapping
    if text is config or type(config) not in multimodal:
        return config
    if type(config) not in causal and config.model_type not in WRAPPED:
        return config
    text = _plain(text)
    if type(text) not in causal:
        return config
    text.architectures = [causal[type(text)].__name__]
    if _has_head(config):
        text.tie_word_embeddings = config.tie_word_embeddings
    if getattr(config, "quantization_config", None):
        text.quantization_config = config.quantization_config
    return text


def text_name(name: str) -> str:
    """Returns a weight's name in the text part, given the name in the multimodal model."""
    return _PART.sub("", name, count=1)


def auto_class(config: Any) -> Any:
    """Returns the class of transformers that loads the whole model of a configuration."""
    causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if causal else AutoModelForMultimodalLM


def _plain(text: Any) -> Any:
    """Returns a copy of a text part's configuration, with the type of an equal causal model where it has none."""
    name = _PLAIN.get(text.model_type)
    if name is None:
        return copy.deepcopy(text)
    values = {key: value for key, value in text.to_dict().items() if key != "model_type"}
    rope = {key: value for key, value in values["rope_parameters"].items() if key not in _AXES}
    return AutoConfig.for_model(name, **values | {"rope_parameters": rope})


def _has_head(config: Any) -> bool:
    """Returns whether the setting of the whole model (`tie_word_embeddings`) ties the head.

    If not, the setting of the text part does: for some types, transformers builds a causal model of the text part.
    """
    causal, multimodal = AutoModelForCausalLM._model_mapping, AutoModelForMultimodalLM._model_mapping
    if type(config) in causal:
        return bool(causal[type(config)].config_class is type(config))
    return bool(multimodal[type(config)]._tied_weights_keys)
