"""Tiny configurations of multimodal models whose text part is served alone, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf
from architectures import SIZES

HIDDEN = SIZES["hidden_size"]
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": HIDDEN}
_AXES = {"type": "mrope", "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TEXT = {**SIZES, "rope_parameters": _AXES}
_WHISPER = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
_INTERN = {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]}


def _llava(config: Any, text: Any, vision: Any) -> Callable[[], Any]:
    return lambda: config(text_config=text(**SIZES), vision_config=vision)


MULTIMODAL: dict[str, Callable[[], Any]] = {
    "aya_vision": _llava(hf.AyaVisionConfig, hf.Cohere2Config, hf.SiglipVisionConfig(**_VISION)),
    "cohere2_vision": _llava(hf.Cohere2VisionConfig, hf.Cohere2Config, hf.SiglipVisionConfig(**_VISION)),
    "idefics3": _llava(hf.Idefics3Config, hf.LlamaConfig, _VISION),
    "internvl": _llava(hf.InternVLConfig, hf.Qwen2Config, hf.InternVLVisionConfig(**_INTERN)),
    "lfm2_vl": _llava(hf.Lfm2VlConfig, hf.Lfm2Config, hf.Siglip2VisionConfig(**_VISION)),
    "llava": _llava(hf.LlavaConfig, hf.LlamaConfig, hf.CLIPVisionConfig(**_VISION)),
    "llava_next": _llava(hf.LlavaNextConfig, hf.MistralConfig, hf.CLIPVisionConfig(**_VISION)),
    "llava_onevision": _llava(hf.LlavaOnevisionConfig, hf.Qwen2Config, hf.SiglipVisionConfig(**_VISION)),
    "mistral3": _llava(hf.Mistral3Config, hf.MistralConfig, hf.PixtralVisionConfig(**_VISION)),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=_TEXT, vision_config={**_TOWER, "fullatt_block_indexes": [0]}
    ),
    "qwen2_audio": lambda: hf.Qwen2AudioConfig(text_config=hf.Qwen2Config(**SIZES), audio_config=_WHISPER),
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config=_TEXT, vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": HIDDEN}
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config=_TEXT, vision_config={**_TOWER, "deepstack_visual_indexes": [0]}
    ),
    "smolvlm": _llava(hf.SmolVLMConfig, hf.LlamaConfig, _VISION),
    "voxtral": lambda: hf.VoxtralConfig(
        text_config=hf.LlamaConfig(**SIZES), audio_config={**_VISION, "intermediate_size": 64}
    ),
}
