"""Puts kernels of our own in the place of small operations of a model: norms, rotary embeddings, gated MLPs.

transformers itself is not changed, only modules of the one model. A part is replaced where it is recognised *and* its
own code agrees with the kernel on random numbers; whatever differs, if only by a rounding too many, stays as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from kernels.rms_norm import DTYPES, NORM_WEIGHTS, NormWeight, rms_norm
from kernels.rotary import misfit, rotary
from kernels.silu_mul import silu_mul

_ROTARY = "apply_rotary_pos_emb"
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_PROBE_ROWS = 16
_SAME = 0.99
"""Of all elements, as many must be the same to the last bit in 16 bits: sums in another order move a rounding now and
then, another place of the rounding moves a fifth of all."""


@dataclass
class Fused:
    """What was replaced in one model."""

    norms: int = 0
    mlps: int = 0
    rotaries: dict[Any, FusedRotary] = field(default_factory=dict)
    """By the function of the model that it stands for."""

    def summary(self) -> dict[str, int]:
        """Modules by kind. Of rotary embeddings it is known only after a step; until then there are none."""
        agreed = sum(rotary.layers for rotary in self.rotaries.values() if rotary.agreed)
        return {"norms": self.norms, "rotary": agreed, "mlps": self.mlps}


def fuse(model: Any) -> Fused:
    """Replaces what it recognises in `model`, whose weights are filled; before any step."""
    fused = Fused()
    kinds: dict[tuple[Any, ...], NormWeight | None] = {}
    forwards: dict[Any, FunctionType] = {}
    with torch.inference_mode():
        for module in model.modules():
            if not _is_plain(module):
                continue
            if _is_norm(module):
                fused.norms += _fuse_norm(module, kinds)
            elif _is_gated_mlp(module):
                fused.mlps += _fuse_mlp(module)
            elif _calls_rotary(module):
                _fuse_rotary(module, forwards, fused.rotaries)
    return fused


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a module of transformers that nobody has changed."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, "forward" in vars(module))
    return type(module).__module__.startswith("transformers.models.") and not any(hooks)


def _noise(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _agree(own: Any, ours: torch.Tensor) -> bool:
    if not isinstance(own, torch.Tensor) or own.shape != ours.shape or own.dtype != ours.dtype:
        return False
    near = 16 * torch.finfo(ours.dtype).eps
    close = torch.allclose(own.float(), ours.float(), rtol=near, atol=near * 1e-3)
    return close and (own.dtype == torch.float32 or float((own == ours).float().mean()) >= _SAME)


# --- norms


def _is_norm(module: Any) -> bool:
    weight, eps = module._parameters.get("weight"), _eps(module)
    alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    flat = isinstance(weight, torch.Tensor) and weight.dim() == 1 and weight.dtype in DTYPES
    return (
        alone and flat and isinstance(eps, float) and len(inspect.signature(module.forward).parameters) == 1
    )


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _fuse_norm(module: Any, kinds: dict[tuple[Any, ...], NormWeight | None]) -> bool:
    weight, eps = module.weight, _eps(module)
    kind = (type(module), weight.shape, weight.dtype, eps)
    if kind not in kinds:
        kinds[kind] = _norm_weight(module, eps)
    how, own = kinds[kind], module.forward
    if how is None:
        return False

    def forward(x: torch.Tensor) -> Any:
        if x.dtype != module.weight.dtype:
            return own(x)
        return rms_norm(x, module.weight, eps, how)

    module.forward = forward
    return True


def _norm_weight(module: Any, eps: float) -> NormWeight | None:
    """How `module` applies its weight; None when it is no RMSNorm. Some rows are so small that eps matters."""
    probe = copy.deepcopy(module)
    probe.weight.data.copy_(_noise(*module.weight.shape, like=module.weight, seed=1))
    x = _noise(1, _PROBE_ROWS, len(probe.weight), like=probe.weight) + 0.25
    x[:, ::2] *= eps**0.5
    own = probe(x)
    return next((how for how in NORM_WEIGHTS if _agree(own, rms_norm(x, probe.weight, eps, how))), None)


# --- rotary embeddings


class FusedRotary:
    """Stands in for a model's `apply_rotary_pos_emb`.

    Which shapes a model gives it is seen only when it is called: for each kind of arguments the first call, made
    before there is any request, compares both on random numbers. What does not agree is always done by `own`.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own
        self._agrees: dict[tuple[torch.dtype, torch.dtype, int, int], bool] = {}
        self.layers = 0
        """Attention layers that call it."""

    @property
    def agreed(self) -> bool:
        """Whether any call went to the kernel."""
        return any(self._agrees.values())

    def __call__(self, q: Any, k: Any, *more: Any, **named: Any) -> Any:
        """As `own`."""
        tensors = all(isinstance(one, torch.Tensor) for one in (q, k, *more))
        if len(more) == 2 and not named and tensors and not misfit(q, k, *more):
            cos, sin = more
            kind = (q.dtype, cos.dtype, q.shape[-1], cos.shape[-1])
            if kind not in self._agrees:
                self._agrees[kind] = self._compare(q, cos)
            if self._agrees[kind]:
                return rotary(q, k, cos, sin)
        return self._own(q, k, *more, **named)

    def _compare(self, q: torch.Tensor, cos: torch.Tensor) -> bool:
        dim, rotary_dim = q.shape[-1], cos.shape[-1]
        x, y = (_noise(1, heads, _PROBE_ROWS, dim, like=q, seed=heads) for heads in (3, 2))
        # As models make them, both halves alike: a function may read only one.
        angles = torch.linspace(0, 6, _PROBE_ROWS * rotary_dim // 2, device=q.device)
        angles = angles.view(1, _PROBE_ROWS, -1).repeat(1, 1, 2)
        turns = (angles.cos().to(cos.dtype), angles.sin().to(cos.dtype))
        own, ours = self._own(x, y, *turns), rotary(x, y, *turns)
        return len(own) == 2 and all(_agree(a, b) for a, b in zip(own, ours, strict=True))


def _calls_rotary(module: nn.Module) -> bool:
    forward = type(module).forward
    named = isinstance(forward, FunctionType) and _ROTARY in forward.__code__.co_names
    return named and isinstance(forward.__globals__.get(_ROTARY), FunctionType)


def _fuse_rotary(module: Any, forwards: dict[Any, FunctionType], rotaries: dict[Any, FusedRotary]) -> None:
    forward = type(module).forward
    if forward not in forwards:
        own = forward.__globals__[_ROTARY]
        rotaries.setdefault(own, FusedRotary(own))
        forwards[forward] = _with_global(forward, _ROTARY, rotaries[own])
    rotaries[forward.__globals__[_ROTARY]].layers += 1
    module.forward = MethodType(forwards[forward], module)


def _with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """A copy of `function` for which the global `name` is `value`."""
    copied = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


# --- gated MLPs


def _is_gated_mlp(module: Any) -> bool:
    if set(module._modules) != _MLP_PARTS or module._parameters or module._buffers:
        return False
    linear = all(isinstance(module._modules[part], nn.Linear) for part in _MLP_PARTS - {"act_fn"})
    return linear and len(inspect.signature(module.forward).parameters) == 1


def _fuse_mlp(module: Any) -> bool:
    if not _is_silu_mul(module):
        return False
    module.forward = MethodType(_gated, module)
    return True


def _gated(module: Any, x: torch.Tensor) -> Any:
    return module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))


class _Scale(nn.Module):
    """In the place of a projection, so that a probe multiplies no matrices and meets no other rank."""

    def __init__(self, factors: torch.Tensor) -> None:
        super().__init__()
        self._factors = factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._factors


def _is_silu_mul(module: Any) -> bool:
    like = module.gate_proj.weight
    if like.dtype not in DTYPES:
        return False
    probe = copy.copy(module)
    probe._modules = dict(module._modules)
    for seed, part in enumerate(sorted(_MLP_PARTS - {"act_fn"})):
        setattr(probe, part, _Scale(_noise(64, like=like, seed=seed)))
    x = _noise(1, _PROBE_ROWS, 64, like=like, seed=9)
    return _agree(probe(x), _gated(probe, x))
