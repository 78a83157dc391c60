"""Builds a rank's model: creates it on the meta device, reduces it to the rank's part, then loads the weights.

A rank therefore never needs more memory, on host or device, than for its own part and one whole parameter.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from disagg.core.errors import UnsupportedModelError, first_line
from disagg.core.ports import Collective
from disagg.model.adapters import adapter_of
from disagg.model.adapters.base import StepInputs
from disagg.model.attention.paged import ATTENTION_NAME
from disagg.model.experts.split import ExpertsSplit, split_experts
from disagg.model.layers.quantized import QuantizedModule
from disagg.model.load.initialize import initialize, is_set
from disagg.model.load.quantized_experts import QuantizedExpertLayers, replace_experts
from disagg.model.load.quantized_layers import QuantizedLayers, quantized_misfit, replace_layers
from disagg.model.load.source import ModelSource
from disagg.model.load.weights import WeightSource
from disagg.model.recurrent.split import RecurrentSplit, split_recurrent
from disagg.model.spec.layer_types import recurrent_layers
from disagg.model.spec.model_spec import ModelSpec
from disagg.model.split.sharder import Sharding, shard_model
from disagg.model.tensor_parallel import Cut

log = structlog.get_logger(__name__)

_DRAWS = (
    nn.init.kaiming_uniform_,
    nn.init.uniform_,
    nn.init.normal_,
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
)
_BUILD_LOCK = threading.Lock()  # transformers changes the process's default dtype while it builds a model


class _Parts(NamedTuple):
    """The parts of a model, each reduced to the rank's part."""

    sharding: Sharding
    recurrent: RecurrentSplit
    experts: ExpertsSplit
    quantized: QuantizedLayers
    quantized_experts: QuantizedExpertLayers
    cuts: dict[str, Cut]
    """The slice of each split parameter, of all parts of the model."""


class _WithoutDraws(TorchFunctionMode):
    """Skips the random initialization of modules, which has no effect on the meta device but takes time there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


class BuiltModel(NamedTuple):
    """A rank's part of a model."""

    model: Any
    sharding: Sharding
    split: RecurrentSplit
    """The rank's part of the recurrent layers."""


def build_model(
    source: ModelSource, spec: ModelSpec, collective: Collective, device: torch.device, dtype: torch.dtype
) -> BuiltModel:
    """Returns the rank's part of the model on `device`, in eval mode without gradients, its sharding, and that of its
    recurrent layers.

    Raises UnsupportedModelError when the model cannot use the paged attention or the ranks cannot share its heads,
    and ConfigError when weights are missing.
    """
    with _BUILD_LOCK:
        model = _empty_model(source, spec, dtype)
        shapes = _stored_shapes(model)
        parts = _shard(model, source, spec, collective, shapes)
        _materialize(model, device)
        initialize(model, source.seed, device, shapes, parts.cuts)
        quantized = parts.quantized.weights | parts.quantized_experts.weights
        plain = {name: shape for name, shape in shapes.items() if name not in quantized}
        weights = source.weights(set(plain), model)
        _fill(model, weights, plain, parts.cuts)
        parts.quantized.fill(model, weights, device)
        if parts.quantized_experts.parts:
            parts.quantized_experts.fill(model, source.stored_weights(), device)
        parts.recurrent.finish()
        parts.experts.finish()
        model.tie_weights()
    if collective.rank == 0:
        for part, why in parts.sharding.whole.items():
            log.info("held_whole_by_every_rank", model=spec.architecture, part=part, why=why)
    return BuiltModel(model.eval(), parts.sharding, parts.recurrent)


def weights_bytes(source: ModelSource, spec: ModelSpec, collective: Collective, dtype: torch.dtype) -> int:
    """Returns the size in bytes of the rank's part of the model, without reading weights. Tied parameters count once.

    Raises the same errors as `build_model`.
    """
    with _BUILD_LOCK:
        model = _empty_model(source, spec, dtype)
        _shard(model, source, spec, collective, _stored_shapes(model)).recurrent.finish()
        model.tie_weights()
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def empty_model(source: ModelSource, spec: ModelSpec, dtype: torch.dtype) -> Any:
    """Returns the whole model on the meta device, which has shapes but no memory. Raises UnsupportedModelError."""
    with _BUILD_LOCK:
        return _empty_model(source, spec, dtype).eval()


def _shard(
    model: Any,
    source: ModelSource,
    spec: ModelSpec,
    collective: Collective,
    shapes: dict[str, tuple[int, ...]],
) -> _Parts:
    """Reduces a model on the meta device to the rank's part, and replaces the linear layers and experts that are
    quantized in the source. Small parameters stay whole until `recurrent.finish`."""
    names, form = source.quantized_names(model), source.quantization
    recurrent = split_recurrent(model, collective)
    misfit = quantized_misfit(form, names.linear)
    experts = split_experts(model, collective, form if names.experts else None, misfit)
    sharding = shard_model(model, spec, collective, recurrent.names | experts.names, misfit)
    sharding.whole.update(experts.whole)
    if recurrent.whole and collective.size > 1:
        sharding.whole["recurrent layers"] = recurrent.whole
    cuts = {**sharding.cuts, **recurrent.cuts, **experts.cuts}
    quantized = replace_layers(model, form, names.linear, shapes, cuts)
    return _Parts(
        sharding,
        recurrent,
        experts,
        quantized,
        replace_experts(model, form, names.experts, shapes, cuts),
        cuts,
    )


def _empty_model(source: ModelSource, spec: ModelSpec, dtype: torch.dtype) -> Any:
    config = copy.deepcopy(source.config)
    config.use_cache = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the model is built of plain layers, which are replaced afterwards
    adapter = adapter_of(config)
    if adapter is not None and (why := adapter.refused(config)):
        raise UnsupportedModelError(f"{spec.architecture} is not supported: it has {why}")
    implementation = ATTENTION_NAME if adapter is None else "eager"
    try:
        with torch.device("meta"), _WithoutDraws():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    except MemoryError:
        raise
    except Exception as exc:  # values that no model has: negative or missing sizes
        raise UnsupportedModelError(f"{spec.architecture} is not supported: {_why_not_built(exc)}") from exc
    if adapter is not None:
        model.config._attn_implementation = ATTENTION_NAME  # this implementation needs no mask
        if adapter.plan:
            model.config.base_model_tp_plan = dict(adapter.plan)
        adapter.adapt(model, StepInputs(model))
        return model
    stateful = getattr(model, "_is_stateful", False)
    if stateful and not getattr(config, "layer_types", None):
        raise UnsupportedModelError(
            f"{spec.architecture} is not supported: it keeps state, but its configuration has no layer types"
        )
    # Hybrid models do not set this flag; the runner checks their attention calls.
    hybrid = stateful or recurrent_layers(config)
    if not (getattr(model, "_supports_attention_backend", False) or hybrid):
        raise UnsupportedModelError(f"{spec.architecture} is not supported: its attention cannot be replaced")
    return model


def _why_not_built(exc: Exception) -> str:
    if exc.args == (ATTENTION_NAME,):  # the model has its own table of attention functions
        return "its attention cannot be replaced"
    return f"transformers cannot build it: {first_line(exc)}"


def _stored_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Returns the full shape, by name, of each tensor that a checkpoint holds: parameters and persistent buffers.

    Tied parameters occur once, under the name of the parameter to which the others are tied.
    """
    stored = model.state_dict(keep_vars=True)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        is_copy = name in tied and stored.get(tied[name]) is tensor
        if name in stored and not is_copy:
            names.setdefault(id(tensor), name)
    return {name: tuple(stored[name].shape) for name in names.values()}


def _materialize(model: Any, device: torch.device) -> None:
    """Allocates every parameter and buffer, and fills floats with NaN, to detect elements that never get a value.

    Quantized weights stay on the meta device until they are read.
    """
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            quantized = isinstance(module, QuantizedModule) and name != "bias"
            if parameter is not None and not quantized:
                module._parameters[name] = nn.Parameter(_poisoned(parameter, device), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = _poisoned(buffer, device)


def _poisoned(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty(like.shape, dtype=like.dtype, device=device)
    return empty.fill_(float("nan")) if like.is_floating_point() else empty.zero_()


def _fill(
    model: Any, weights: WeightSource, shapes: dict[str, tuple[int, ...]], cuts: dict[str, Cut]
) -> None:
    for name, shape in shapes.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        empty = getattr(module, leaf)
        part = weights.load(name, shape, empty.dtype, empty.device, cuts.get(name))
        if part is not None and leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(part, requires_grad=False)
        elif part is not None:
            module._buffers[leaf] = part
        elif not bool(torch.isfinite(empty).all()):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported: neither weights nor initialization set its {name}"
            )
    for name, buffer in model.named_buffers():
        if not is_set(buffer):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported: its buffer {name} is not initialized"
            )
