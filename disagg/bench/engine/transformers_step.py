"""The decode step of transformers for the same model, batch and context, as a comparison for `disagg bench decode`.

transformers joins each layer's KV with the new token's in each step, and computes recurrent layers in plain torch
unless the packages of their fast kernels are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from disagg.bench.common.measure import seconds_of
from disagg.core.errors import ConfigError
from disagg.model.load.named import named_config

FAST_KERNELS = ("causal_conv1d", "mamba_ssm", "fla")
"""Packages from which transformers takes fast kernels of recurrent layers."""
_PROMPT_TOKENS = 2
"""Tokens that are computed to create the cache and its recurrent states; other KV is noise."""


@dataclass(frozen=True)
class PeerSteps:
    """Decode steps of transformers."""

    seconds: tuple[float, ...]
    """The time of each step."""
    fast_kernels: tuple[str, ...]
    """Packages of `FAST_KERNELS` that a step called, with their versions."""


def require_plain(name: str) -> None:
    """Raises `ConfigError` for a model that transformers cannot make with random weights."""
    if ":" in name:
        raise ConfigError(f"--peer transformers takes no quantized shape, but --random-init is {name}")


def transformers_steps(
    name: str, dtype: torch.dtype, device: torch.device, batch: int, context_tokens: int, repeats: int
) -> PeerSteps:
    """Measures decode steps of transformers, each for one token of `batch` requests.

    The context of the first step has `context_tokens` tokens, and grows by one with each step. `name`: a model name
    of `disagg.model.load.named`.
    """
    model = random_model(name, dtype, device)
    with torch.inference_mode():
        cache = filled_cache(model, batch, context_tokens - 1, device)
        tokens = torch.arange(batch, device=device)[:, None] % 256

        def step() -> object:
            return model(tokens, past_key_values=cache, use_cache=True)

        seconds = seconds_of(step, device, repeats)
        return PeerSteps(seconds, fast_kernels(step))


def fast_kernels(step: Callable[[], object]) -> tuple[str, ...]:
    """Returns the packages of `FAST_KERNELS` whose functions `step` calls, with their versions, by running it once.

    An installed package is no proof: if an import fails, transformers silently computes in plain torch.
    """
    called: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            called.add(str(frame.f_globals.get("__name__")).partition(".")[0])

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(previous)
    found = [package for package in FAST_KERNELS if package in called]
    return tuple(
        f"{package} {getattr(sys.modules.get(package), '__version__', '')}".strip() for package in found
    )


def random_model(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns transformers' model of the named shape, with random weights."""
    from transformers import AutoModelForCausalLM

    with device:
        return AutoModelForCausalLM.from_config(named_config(name), dtype=dtype).eval()


def filled_cache(model: Any, batch: int, tokens: int, device: torch.device) -> Any:
    """Returns a cache with recurrent states of a short prompt, and with KV of `tokens` tokens, mostly noise."""
    prompt = torch.arange(_PROMPT_TOKENS, device=device).expand(batch, -1)
    cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    generator = torch.Generator(device).manual_seed(0)
    for index, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        more = tokens - _PROMPT_TOKENS
        if isinstance(keys, torch.Tensor) and more > 0:
            shape = (*keys.shape[:2], more, keys.shape[-1])
            noise = torch.empty(shape, dtype=keys.dtype, device=device).normal_(generator=generator)
            cache.update(noise, noise.clone(), index)
    return cache
