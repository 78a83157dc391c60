"""Compares fused modules of one model type with transformers' own, on inputs of a tiny model's forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from disagg.coverage.checkpoint import draw_weights
from disagg.coverage.tiny_config import VOCAB_SIZE, tiny_config
from disagg.model.adapters import adapter_of
from disagg.model.attention.indexed import PagedIndexer, no_mask
from disagg.model.attention.paged import ATTENTION_NAME
from disagg.model.layers.class_names import class_name
from disagg.model.load.composite import text_part
from kernels.attention.common import AttentionParams

TOKENS = 12


@dataclass
class Attention:
    """An attention context whose output depends on queries, keys and values; keeps its calls."""

    calls: list[Any] = field(default_factory=list)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionContext.attend`; a token sees its own key only."""
        self.calls.append((layer, q, k, v, *vars(params).values()))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return v * (q * k).sum(-1, keepdim=True).tanh()


@dataclass(frozen=True)
class Call:
    """A module's call in the model as transformers made it."""

    module: nn.Module
    args: tuple[Any, ...]
    named: dict[str, Any]
    output: Any
    attended: list[Any]

    def repeats(self) -> bool:
        """Whether the module, called so again, gives the same output and calls the attention alike."""
        again = Attention()
        named = self.named | ({"paged_context": again} if self.named.get("paged_context") else {})
        output = self.module(*self.args, **named)
        return same(self.output, output) and same(self.attended, again.calls)


@contextmanager
def sigmoid_of_any_layout() -> Iterator[None]:
    """`torch.sigmoid` copies strided inputs first, so that its bits depend on values only.

    The CPU's vectorized loop and the scalar loop over its remainder differ in the last bit. Where the remainder
    begins depends on strides and on the vector width: a head of 16 floats is one remainder with AVX-512, none with
    AVX2. Models compute the sigmoid of a contiguous copy, fused modules that of a strided view.
    """
    sigmoid = torch.sigmoid
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "sigmoid", lambda x: sigmoid(x.contiguous()))
        yield


def tiny_model(model_type: str, dtype: torch.dtype, **settings: Any) -> Any:
    """A tiny model of the type, with random weights; with the paged attention, where that needs no adapter."""
    config = text_part(tiny_config(model_type))
    for name, value in settings.items():
        setattr(config, name, value)
    attention = ATTENTION_NAME if adapter_of(config) is None else "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    draw_weights(model, 0)
    return model.eval()


def forward(model: Any, keep: torch.Tensor | int = 0) -> torch.Tensor:
    """Logits of some tokens."""
    ids = (torch.arange(TOKENS) * 7 % VOCAB_SIZE)[None]
    positions = torch.arange(TOKENS)[None]
    logits: torch.Tensor = model(
        input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, paged_context=Attention()
    ).logits
    return logits


def own_calls(model: Any) -> list[Call]:
    """The calls of all of transformers' modules in one forward of `model`."""
    calls: list[Call] = []
    begun: dict[nn.Module, int] = {}
    """Attention's calls before the module's."""

    def begin(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
        context = named.get("paged_context")
        begun[module] = len(context.calls) if context else 0

    def keep(module: nn.Module, args: Any, named: dict[str, Any], output: Any) -> None:
        context = named.get("paged_context")
        attended = context.calls[begun[module] :] if context else []
        calls.append(Call(module, _copied(args), _copied(named), _copied(output), attended))

    handles = []
    for module in model.modules():
        if class_name(module):
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(keep, with_kwargs=True))
    for module in model.modules():
        if isinstance(getattr(module, "indexer", None), nn.Module):
            module.indexer.forward = PagedIndexer(module.indexer, 0)
            handles.append(module.register_forward_pre_hook(no_mask, with_kwargs=True))
    forward(model)
    for handle in handles:
        handle.remove()
    return calls


def _copied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.clone()
    if isinstance(x, tuple):
        return tuple(_copied(each) for each in x)
    return {name: _copied(each) for name, each in x.items()} if type(x) is dict else x


def same(a: Any, b: Any) -> bool:
    """Whether two values, or all in two tuples, are the same, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
