"""What `disagg.vllm` reads from vLLM's objects, and its imports of vLLM: all that may differ between versions.

Written for the interface of vLLM 0.26 (`KVConnectorBase_V1`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.core.errors import ConfigError
from disagg.core.types import Span

BASE_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_COMPUTED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Final statuses of a request whose prompt is computed."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine of vLLM, as the connector needs to know it."""

    engine_id: str
    produces: bool
    consumes: bool
    tp_size: int
    dp_rank: int
    kv_heads: int
    """KV heads of the whole model; 1 for a latent cache (MLA)."""
    blocks: int
    """Blocks of the KV cache."""
    block_size: int
    """Tokens in a block of the block tables."""
    fingerprint: str
    """Names of the model and of the cache's element type, which both engines must have."""
    async_scheduling: bool
    """Whether vLLM schedules a step before the previous one has ended."""
    extra: dict[str, Any]
    """`kv_connector_extra_config`."""
    whole_blocks: bool = False
    """Whether only the attention kernels know the order of elements in a block, as on a CPU."""

    @property
    def page_size(self) -> int:
        """Positions of the data path in a block: a block that is moved as a whole is one position."""
        return 1 if self.whole_blocks else self.block_size

    def positions(self, tokens: Span) -> Span:
        """Returns the positions of the data path that hold `tokens`."""
        size = self.block_size // self.page_size
        return Span(tokens.start // size, -(-tokens.stop // size))


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """One request's part of a step."""

    request_id: str
    blocks: list[int]
    replaces: bool
    """Whether `blocks` are all blocks of the request; otherwise they follow the earlier ones."""
    computed: int
    """Tokens computed before the step."""
    tokens: int
    """Tokens that the step computes."""


def base_class() -> type:
    """Imports vLLM and returns the base class of connectors."""
    found: type = importlib.import_module(BASE_MODULE).KVConnectorBase_V1
    return found


def tensor_parallel_rank() -> int:
    """Returns this worker's rank in its tensor-parallel group."""
    return int(importlib.import_module("vllm.distributed.parallel_state").get_tensor_model_parallel_rank())


def is_scheduler(role: Any) -> bool:
    """Returns whether a `KVConnectorRole` is that of the scheduler."""
    return str(role.name) == "SCHEDULER"


def facts_of(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Returns the facts of an engine. Raises ConfigError for an engine that the connector does not support."""
    transfer, parallel, model = (
        vllm_config.kv_transfer_config,
        vllm_config.parallel_config,
        vllm_config.model_config,
    )
    if parallel.pipeline_parallel_size != 1:
        raise ConfigError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; DisaggConnector supports 1 only"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"the model has {len(groups)} KV cache groups; DisaggConnector supports one: start vLLM with "
            "--disable-hybrid-kv-cache-manager, or use a model whose layers are all alike"
        )
    latent = bool(getattr(model, "use_mla", False))
    dtype = vllm_config.cache_config.cache_dtype
    return EngineFacts(
        engine_id=str(transfer.engine_id),
        produces=bool(transfer.is_kv_producer),
        consumes=bool(transfer.is_kv_consumer),
        tp_size=parallel.tensor_parallel_size,
        dp_rank=getattr(parallel, "data_parallel_index", 0),
        kv_heads=1 if latent else model.get_total_num_kv_heads(),
        blocks=kv_cache_config.num_blocks,
        block_size=groups[0].kv_cache_spec.block_size,
        fingerprint=f"{model.model} {model.dtype if dtype == 'auto' else dtype}",
        async_scheduling=bool(getattr(vllm_config.scheduler_config, "async_scheduling", False)),
        extra=dict(transfer.kv_connector_extra_config or {}),
        whole_blocks=vllm_config.device_config.device_type == "cpu",
    )


def scheduled(output: Any) -> Iterator[ScheduledTokens]:
    """Yields each request of a `SchedulerOutput`."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        blocks = one_group(new.block_ids)
        yield ScheduledTokens(new.req_id, blocks, True, new.num_computed_tokens, counts[new.req_id])
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        blocks = one_group(cached.new_block_ids[index] or ())
        resumed = request_id in cached.resumed_req_ids
        yield ScheduledTokens(
            request_id, blocks, resumed, cached.num_computed_tokens[index], counts[request_id]
        )


def block_ids_of(blocks: Any) -> list[int]:
    """Returns all block ids of a request's `KVCacheBlocks`, shared ones included."""
    return one_group(blocks.get_block_ids())


def one_group(block_ids: Sequence[Any]) -> list[int]:
    """Returns the block ids of the only KV cache group; vLLM passes a list, or a tuple of lists."""
    if isinstance(block_ids, tuple):
        return list(block_ids[0]) if block_ids else []
    return list(block_ids)


def prompt_is_computed(request: Any) -> bool:
    """Returns whether a finished request has its whole prompt in the KV cache."""
    return request.status.name in _COMPUTED


def answers_one_token(request: Any) -> bool:
    """Returns whether the request ends with the step that computes its prompt."""
    return bool(request.max_tokens == 1)
