"""Makes what one rank needs inside its own process: device, collective, model, control channel, transport."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from disagg.core.config import Config, GroupConfig
from disagg.core.errors import ConfigError
from disagg.core.ports import Collective
from disagg.model.runner import ModelRunner
from disagg.model.source import ModelSource

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Rendezvous(NamedTuple):
    """How the ranks of a group, all on one host, meet."""

    directory: str
    """A private folder of rank 0; empty for a group of one rank."""
    backend: str
    """`shared` or `nccl`, see `GroupPlacement.backend`."""


def resolve_device(name: str) -> torch.device:
    """The rank's device: `cpu`, or the first GPU that this process sees. Raises `ConfigError`."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, but this process sees no GPU: check the driver, or use --device cpu"
        )
    return torch.device("cuda", 0)


def resolve_dtype(name: str, source: ModelSource, device: torch.device) -> torch.dtype:
    """The type of weights and activations: as asked; `auto` is float32 on a CPU and the checkpoint's own on a GPU."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = getattr(source.config, "dtype", None)
    return next((dtype for dtype in _DTYPES.values() if dtype == own), torch.bfloat16)


def resolve_kv_dtype(config: Config, group: GroupConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of a group's KV in a model of `dtype`; see `ModelConfig.kv_dtype` and `GroupConfig.kv_dtype`."""
    name = config.kv_dtype_of(group)
    found: torch.dtype = dtype if name == "auto" else getattr(torch, name)
    return found


def make_source(config: Config) -> ModelSource:
    """The model that `config.model` names. Raises `ConfigError`."""
    model = config.model
    if model.path:
        return ModelSource.from_directory(model.path)
    if model.random_init:
        return ModelSource.random_init(model.random_init, model.seed)
    raise ConfigError("no model: give --model DIR or --random-init NAME")


def make_collective(rank: int, size: int, rendezvous: Rendezvous, deterministic: bool = False) -> Collective:
    """The group's collective; returns when all ranks have come. `deterministic`: see `ModelConfig`.

    Raises `PeerLostError` when they have not in time.
    """
    directory = Path(rendezvous.directory)
    if size == 1:
        from disagg.model.collective import SingleCollective

        return SingleCollective()
    if rendezvous.backend == "shared":
        from disagg.model.shared_collective import SharedCollective

        return SharedCollective(rank=rank, size=size, directory=directory)
    from disagg.model.nccl_collective import NcclCollective

    return NcclCollective(rank=rank, size=size, directory=directory, deterministic=deterministic)


def make_runner(
    config: Config, group: GroupConfig, source: ModelSource, collective: Collective, device: torch.device
) -> ModelRunner:
    """The rank's model and KV pool, of `initial_pool_tokens` and one page more: the trash page.

    Raises `ConfigError` where KV would be quantized on its way and the model has a recurrent state, whose bytes go
    the same way.
    """
    dtype = resolve_dtype(config.model.dtype, source, device)
    context_tokens = source.spec(dtype).context_tokens
    runner = ModelRunner(
        source,
        collective=collective,
        device=device,
        dtype=dtype,
        pool_tokens=group.initial_pool_tokens + group.page_size,
        page_size=group.page_size,
        rows=group.max_requests,
        max_tokens=min(group.max_context_tokens, context_tokens),
        kv_dtype=resolve_kv_dtype(config, group, dtype),
        attention=config.model.attention,
        fused=config.model.fused,
        deterministic=config.model.deterministic,
    )
    kv_dtypes = {resolve_kv_dtype(config, kind, dtype) for kind in config.kinds.values()}
    if runner.states is not None and len(kv_dtypes) > 1:
        raise ConfigError(
            "prefill.kv_dtype and decode.kv_dtype differ, but the model has a recurrent state, which moves as KV "
            "does and cannot be quantized: set both the same"
        )
    return runner
