"""Factories for the parts of one rank's process: device, collective, model source and model runner."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from disagg.core.config.groups import GPU_REQUESTS
from disagg.core.config.read import Config, DecodeConfig, GroupConfig
from disagg.core.errors import ConfigError
from disagg.core.ports import Collective
from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.model.runner_options import RunnerOptions
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.device import device_limit_bytes, memory_bytes
from disagg.node.rank_records import Rendezvous

CACHED_STATES_SHARE = 0.1
"""Largest share of a GPU's memory that cached recurrent states may use."""
DECODE_REQUESTS_PER_CACHED_STATE = 8
"""A decode group caches one recurrent state for this many of its `max_requests`, unless `cached_states` is set. It
needs few of them, because few requests are preempted."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Returns the rank's device: `cpu`, or the first visible GPU. Raises `ConfigError` if `cuda` finds no GPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, but this process sees no GPU: check the driver, or use --device cpu"
        )
    return torch.device("cuda", 0)


def resolve_dtype(name: str, source: ModelSource, device: torch.device) -> torch.dtype:
    """Returns the dtype of weights and activations. `auto`: float32 on a CPU, the checkpoint's dtype on a GPU."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = getattr(source.config, "dtype", None)
    return next((dtype for dtype in _DTYPES.values() if dtype == own), torch.bfloat16)


def resolve_kv_dtype(config: Config, group: GroupConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a group's KV; `auto` is the model's `dtype`. See `ModelConfig.kv_dtype`."""
    name = config.kv_dtype_of(group)
    kv_dtype: torch.dtype = dtype if name == "auto" else getattr(torch, name)
    return kv_dtype


def make_collective(rank: int, size: int, rendezvous: Rendezvous, deterministic: bool = False) -> Collective:
    """Returns the group's collective once all ranks have joined. `deterministic`: see `ModelConfig`.

    Raises `PeerLostError` if a rank does not join in time.
    """
    directory = Path(rendezvous.directory)
    if size == 1:
        from disagg.model.collective.base import SingleCollective

        return SingleCollective()
    if rendezvous.backend == "shared":
        from disagg.model.collective.shared import SharedCollective

        return SharedCollective(rank=rank, size=size, directory=directory)
    from disagg.model.collective.nccl import NcclCollective

    return NcclCollective(rank=rank, size=size, directory=directory, deterministic=deterministic)


def make_runner(
    config: Config, group: GroupConfig, source: ModelSource, collective: Collective, device: torch.device
) -> ModelRunner:
    """Returns the rank's model with a KV pool of `initial_pool_tokens` and one trash page."""
    dtype = resolve_dtype(config.model.dtype, source, device)
    spec = source.spec(dtype)
    rows = group.max_requests or GPU_REQUESTS
    return ModelRunner(
        source,
        RunnerOptions(
            dtype=dtype,
            pool_tokens=group.initial_pool_tokens + group.page_size,
            page_size=group.page_size,
            rows=rows,
            max_tokens=group.context_limit(spec.context_tokens),
            kv_dtype=resolve_kv_dtype(config, group, dtype),
            attention=config.model.attention,
            fused=config.model.fused,
            deterministic=config.model.deterministic,
            section=group.role,
            memory_bytes=0 if group.max_requests else device_limit_bytes(device, group),
            cached_states=partial(wanted_states, config, group, spec, device.type),
            cached_states_bytes=int(memory_bytes(device) * CACHED_STATES_SHARE) or None,
            recurrent_kernels=config.model.recurrent_kernels,
        ),
        collective=collective,
        device=device,
    )


def wanted_states(
    config: Config, group: GroupConfig, spec: ModelSpec, device_type: str, max_requests: int
) -> int:
    """Returns the limit of recurrent states that the group caches, if `max_requests` is the number of its requests.

    A decode group caches states for the recomputation of preempted requests. It caches none where requests are not
    preempted, because the model has no KV, or where it has no prefix cache.
    """
    decodes = isinstance(group, DecodeConfig)
    if not group.prefix_cache or (decodes and (config.model.deterministic or not spec.has_attention)):
        return 0
    if group.cached_states is not None:
        return group.cached_states
    if decodes:
        return max_requests // DECODE_REQUESTS_PER_CACHED_STATE
    return (4 if device_type == "cuda" else 2) * max_requests
