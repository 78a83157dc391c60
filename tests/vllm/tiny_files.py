"""Writes a tiny model as a checkpoint that vLLM reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from disagg.model.load.tiny import _draw_weights, byte_tokenizer


def save_tiny(config: PreTrainedConfig, path: Path, **read_by_vllm: Any) -> None:
    """Draws the weights and writes model and tokenizer to the new folder `path`. `read_by_vllm`: further fields of
    the configuration, which transformers does not know."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, 0)
    path.mkdir(parents=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    for name, value in read_by_vllm.items():
        setattr(model.config, name, value)
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
