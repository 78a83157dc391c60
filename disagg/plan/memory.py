"""Memory budget of a group's ranks, from a checkpoint's configuration alone; needs no GPU.

A running rank measures the memory that a step needs (`disagg.node.sizing`). This module estimates that memory.
"""

from __future__ import annotations

import msgspec
import torch

from disagg.core.config.read import Config, GroupConfig, Role
from disagg.core.types import KVLayout
from disagg.model.collective.base import ThreadCollective
from disagg.model.load.build import weights_bytes
from disagg.model.load.source import ModelSource
from disagg.model.spec.layer_types import setting
from disagg.model.spec.model_spec import ModelSpec, rank_token_bytes
from disagg.node.assemble import make_source, resolve_dtype, resolve_kv_dtype
from disagg.node.sizing import LIBRARY_BYTES, SAMPLER_COPIES, MemoryBudget, describe, transfer_bytes_of


class PlannedMemory(msgspec.Struct, frozen=True):
    """The memory plan of one kind of group."""

    role: Role
    ranks: int
    budget: MemoryBudget
    """Budget of the rank with the largest weights."""
    token_bytes: int
    """KV bytes of one token on the rank with the largest weights."""
    pool_tokens: int
    max_context_tokens: int


def model_layouts(config: Config) -> tuple[KVLayout, KVLayout]:
    """Returns the KV layouts of the configured model on GPUs, first of the prefill groups, then of the decode groups.

    KV crosses the wire in the layout of the decode groups.
    """
    source = make_source(config)
    dtype = resolve_dtype(config.model.dtype, source, torch.device("cuda"))
    first, then = (resolve_kv_dtype(config, group, dtype) for group in (config.prefill, config.decode))
    return source.spec(first).layout, source.spec(then).layout


def plan_memory(config: Config, gpu_memory_bytes: int) -> list[PlannedMemory]:
    """Plans the memory of each kind of group, with one GPU of `gpu_memory_bytes` per rank.

    Raises `ConfigError`, `UnsupportedModelError`.
    """
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


def memory_lines(groups: list[PlannedMemory]) -> list[str]:
    """Returns one line of text for each kind of group."""
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
) -> PlannedMemory:
    group = group.sized("cuda")
    ranks = group.ranks
    token_bytes = rank_token_bytes(spec.layout, ranks)
    transfer = config.transfer.sized(gpu_memory_bytes)
    budget = MemoryBudget(
        limit_bytes=int(gpu_memory_bytes * group.mem_fraction),
        weights_bytes=max(
            weights_bytes(source, spec, one, dtype)
            for one in ThreadCollective.group(ranks)  # nothing is reduced
        ),
        work_bytes=_work_bytes(source.config, spec, group, dtype),
        transfer_bytes=transfer_bytes_of(transfer, role),
        state_bytes=0,
        library_bytes=LIBRARY_BYTES[0],
    )
    tokens = group.pool_tokens or budget.pool_tokens(token_bytes, group.page_size)
    limit = group.context_limit(spec.context_tokens)
    longest = min(limit, tokens) if tokens else limit
    return PlannedMemory(role, ranks, budget, token_bytes, tokens, longest)


def _work_bytes(model: object, spec: ModelSpec, group: GroupConfig, dtype: torch.dtype) -> int:
    """Estimates the activations of a step: vectors of hidden and MLP size per token, and the logits."""
    rows = max(1, group.decode_batch)
    tokens = group.chunk_tokens + group.decode_batch
    hidden = int(setting(model, "hidden_size") or 0)
    inner = int(setting(model, "intermediate_size") or 4 * hidden)
    vectors = tokens * (8 * hidden + 3 * inner) * dtype.itemsize
    return vectors + (SAMPLER_COPIES + 1) * rows * spec.vocab_size * 4
