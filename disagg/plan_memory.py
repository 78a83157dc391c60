"""What a group's ranks would use their GPUs' memory for, from a checkpoint's configuration alone: no GPU is needed.

A running rank measures what its steps take (`disagg.node.sizing`); here that part is estimated.
"""

from __future__ import annotations

import msgspec
import torch

from disagg.core.config import Config, GroupConfig, Role
from disagg.core.types import KVLayout
from disagg.model.build import weights_bytes
from disagg.model.collective import ThreadCollective
from disagg.model.layers import setting
from disagg.model.source import ModelSource
from disagg.model.spec import ModelSpec, rank_token_bytes
from disagg.node.assemble import make_source, resolve_dtype, resolve_kv_dtype
from disagg.node.sizing import LIBRARY_BYTES, SAMPLER_COPIES, MemoryBudget, describe, transfer_bytes_of


class GroupMemory(msgspec.Struct, frozen=True):
    """The answer for one kind of group."""

    role: Role
    ranks: int
    budget: MemoryBudget
    """Of the rank that has most to hold."""
    token_bytes: int
    """KV of one token on that rank."""
    pool_tokens: int
    max_context_tokens: int


def model_layouts(config: Config) -> tuple[KVLayout, KVLayout]:
    """The KV cache of the model that `config.model` names, as it would be on GPUs: that of the prefill groups, and
    that of the decode groups, which is also what crosses the wire."""
    source = make_source(config)
    dtype = resolve_dtype(config.model.dtype, source, torch.device("cuda"))
    first, then = (resolve_kv_dtype(config, group, dtype) for group in (config.prefill, config.decode))
    return source.spec(first).layout, source.spec(then).layout


def plan_memory(config: Config, gpu_memory_bytes: int) -> list[GroupMemory]:
    """Ranks of each kind with a GPU of `gpu_memory_bytes` each. Raises `ConfigError`, `UnsupportedModelError`."""
    source = make_source(config)
    dtype = resolve_dtype(config.model.dtype, source, torch.device("cuda"))
    return [
        _group(
            config,
            group,
            role,
            source,
            source.spec(resolve_kv_dtype(config, group, dtype)),
            dtype,
            gpu_memory_bytes,
        )
        for role, group in config.kinds.items()
    ]


def memory_lines(groups: list[GroupMemory]) -> list[str]:
    """A line for each kind of group."""
    lines = []
    for group in groups:
        requests = group.pool_tokens // group.max_context_tokens
        ranks = f"{group.ranks} ranks, each" if group.ranks > 1 else "1 rank:"
        lines.append(
            f"{group.role}, {ranks} {describe(group.budget)} = {group.pool_tokens:,} tokens of "
            f"{group.token_bytes / 1024:g} KiB, {requests} requests of {group.max_context_tokens:,} tokens"
            if group.pool_tokens
            else f"{group.role}, {ranks} {describe(group.budget)}: no room for a KV cache; use more ranks"
        )
    return lines


def _group(
    config: Config,
    group: GroupConfig,
    role: Role,
    source: ModelSource,
    spec: ModelSpec,
    dtype: torch.dtype,
    gpu_memory_bytes: int,
) -> GroupMemory:
    ranks = group.ranks
    token_bytes = rank_token_bytes(spec.layout, ranks)
    transfer = config.transfer.sized(gpu_memory_bytes)
    budget = MemoryBudget(
        limit_bytes=int(gpu_memory_bytes * group.mem_fraction),
        weights_bytes=max(
            weights_bytes(source, spec, one, dtype)
            for one in ThreadCollective.group(ranks)  # nothing is reduced
        ),
        work_bytes=_work_bytes(source.config, spec, group, role, dtype),
        transfer_bytes=transfer_bytes_of(transfer, role),
        state_bytes=0,
        library_bytes=LIBRARY_BYTES[0],
    )
    tokens = group.pool_tokens or budget.pool_tokens(token_bytes, group.page_size)
    longest = min(group.max_context_tokens, spec.context_tokens)
    return GroupMemory(role, ranks, budget, token_bytes, tokens, longest)


def _work_bytes(model: object, spec: ModelSpec, group: GroupConfig, role: Role, dtype: torch.dtype) -> int:
    """Estimated: some vectors of the hidden and of the MLP's size for each token of a step, and its logits."""
    rows = 1 if role == "prefill" else group.max_batch
    tokens = group.chunk_tokens + (0 if role == "prefill" else group.max_batch)
    hidden = int(setting(model, "hidden_size") or 0)
    inner = int(setting(model, "intermediate_size") or 4 * hidden)
    vectors = tokens * (8 * hidden + 3 * inner) * dtype.itemsize
    return vectors + (SAMPLER_COPIES + 1) * rows * spec.vocab_size * 4
