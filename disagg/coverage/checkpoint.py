"""Makes checkpoints of tiny models, with random weights whose greedy answers vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from disagg.model.load.composite import text_part

_SHARP = ("q", "k", "qk", "query", "key", "qkv", "wq", "wk", "wqkv", "attn")
"""Words in the names of query and key projections, which get larger weights so that attention selects few tokens."""
_SHARP_GAIN, _HEAD_GAIN, _TIED_GAIN = 2.0, 3.0, 0.3
_NOISE = 0.1


def save_checkpoint(config: PreTrainedConfig, directory: Path, seed: int) -> None:
    """Writes a checkpoint of `config` with float32 weights to `directory`; equal seeds give equal weights."""
    torch.manual_seed(seed)
    model = _new_model(config)
    draw_weights(model, seed)
    model.save_pretrained(directory)
    config.save_pretrained(directory)  # the whole configuration, even if only its text part was built


def _new_model(config: PreTrainedConfig) -> Any:
    """Builds the complete model; if a library for it is missing, builds only its text part."""
    if type(config) in AutoModelForMultimodalLM._model_mapping:
        try:
            return AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        except ImportError:
            config = text_part(config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def draw_weights(model: Any, seed: int) -> None:
    """Sets random weights in `model`. Matrices are scaled to preserve magnitudes from layer to layer.

    Other parameters (norms, decays, sinks) get noise and stay near their initial values. Embeddings that are tied to
    the output head are small; otherwise the likeliest next token would always be the last token.
    """
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    last = None if head is None else head.weight
    tied = last is not None and last is model.get_input_embeddings().weight
    drawn: set[int] = set()
    for name, parameter in sorted(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        if id(parameter) in drawn:
            continue
        drawn.add(id(parameter))
        if _is_matrix(owner, parameter):
            inputs = parameter.shape[0 if isinstance(owner, Conv1D) else -1]
            gain = _gain(name, owner) if parameter is not last else _TIED_GAIN if tied else _HEAD_GAIN
            parameter.data.normal_(0.0, gain / inputs**0.5, generator=generator)
        elif parameter.is_floating_point():
            parameter.data += _NOISE * torch.randn(parameter.shape, generator=generator)


def _is_matrix(owner: nn.Module, parameter: torch.Tensor) -> bool:
    if parameter.dim() < 2 or isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    return isinstance(owner, nn.Linear | nn.Embedding | Conv1D) or parameter.dim() == 3  # all experts


def _gain(name: str, owner: nn.Module) -> float:
    if isinstance(owner, nn.Embedding):
        return float(owner.embedding_dim**0.5)  # the elements then have a standard deviation of 1
    words = name.replace(".", "_").lower().split("_")
    return _SHARP_GAIN if any(word in _SHARP for word in words) else 1.0
