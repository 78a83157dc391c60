"""Computes the size of a model's recurrent state without weights and without a GPU, for `disagg plan`."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from disagg.core.errors import UnsupportedModelError, first_line
from disagg.kv.mamba_pool import state_classes
from disagg.model.attention.probe import ShapeProbe
from disagg.model.collective.base import SingleCollective
from disagg.model.load.build import empty_model
from disagg.model.load.source import ModelSource
from disagg.model.recurrent.heads import divided
from disagg.model.recurrent.registry import pack_recurrent
from disagg.model.recurrent.request_cache import StateCache, cache_argument, make_cache
from disagg.model.recurrent.split import split_recurrent
from disagg.model.recurrent.state import PoolLayers
from disagg.model.recurrent.step import PackedStates
from disagg.model.spec.layer_types import attention_layers, recurrent_layers
from disagg.model.spec.model_spec import ModelSpec

META = torch.device("meta")


def with_state(source: ModelSource, spec: ModelSpec, dtype: torch.dtype) -> ModelSpec:
    """Returns `spec` with the fields that a runner fills in: the recurrent state of a request, and `any_chunks`.

    Runs one token through the model on the meta device, which has shapes but no memory. Returns `spec` unchanged for
    a model without recurrent layers. Raises UnsupportedModelError if the model's code needs the values of tensors.
    """
    recurrent = recurrent_layers(source.config)
    if not recurrent:
        return spec
    model = empty_model(source, spec, dtype)
    cache = make_cache(model.config)
    try:
        _one_token(model, cache)
        cache.require(spec.architecture, recurrent)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError, UnsupportedModelError) as exc:
        raise UnsupportedModelError(
            f"{spec.architecture}: the size of its recurrent state is unknown without weights: {first_line(exc)}"
        ) from exc
    split = split_recurrent(model, SingleCollective())
    states = state_classes(divided(cache.forms(), split.shares))
    layout = msgspec.structs.replace(spec.layout, states=states)
    packed = pack_recurrent(model, [place for place, _ in cache.states()], PackedStates("torch", META))
    return msgspec.structs.replace(spec, layout=layout, any_chunks=packed)


def _one_token(model: Any, cache: StateCache) -> None:
    # Other implementations of experts select tokens by tensor values, which the meta device lacks, or need one dtype.
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    token = torch.zeros(1, 1, dtype=torch.int64, device=META)
    with torch.inference_mode():
        model(
            input_ids=token,
            position_ids=token,
            use_cache=True,
            logits_to_keep=1,
            paged_context=PoolLayers(ShapeProbe(), cache, attention_layers(model.config)),
            **{cache_argument(model): cache},
        )
