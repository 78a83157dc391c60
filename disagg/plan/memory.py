"""Plans the memory budget of a group's ranks from the checkpoint's configuration alone; needs no GPU.

A running rank measures the memory that its steps need (`disagg.node.sizing`); this module estimates that memory.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from disagg.core.config.groups import GPU_REQUESTS
from disagg.core.config.read import Config, GroupConfig, Role
from disagg.core.errors import UnsupportedModelError
from disagg.core.types import KVLayout
from disagg.model.collective.base import ThreadCollective
from disagg.model.load.build import weights_bytes
from disagg.model.load.source import ModelSource, make_source
from disagg.model.recurrent.state import cached_states, state_rows
from disagg.model.spec.layer_types import setting
from disagg.model.spec.model_spec import ModelSpec, rank_token_bytes
from disagg.model.spec.quantization import quantization_of
from disagg.node.assemble import CACHED_STATES_SHARE, resolve_dtype, resolve_kv_dtype, wanted_states
from disagg.node.host_memory import AVAILABLE_SHARE, POOL_MULTIPLE, REPEATED_SHARE
from disagg.node.prefix_caching import configured_host_cache, repeats_pool
from disagg.node.sizing import (
    LIBRARY_BYTES,
    SAMPLER_COPIES,
    MemoryBudget,
    describe,
    transfer_bytes_of,
)
from disagg.plan.states import with_state
from disagg.plan.transfer import STATES_REASON, describe_bytes
from kernels.layers.expert_quantized import CONVERTED_BYTES

_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
    max_requests: int
    request_state_bytes: int
    """Size of the recurrent state of one request on each rank; 0 without recurrent layers."""
    cached_states: int
    """Largest number of recurrent states in the prefix cache."""
    host_cache: str
    """Size of the prefix cache's second tier, as a text; empty without one."""
    limited_by_states: bool = False
    """Whether `max_requests` is automatic, and lower because of the memory of recurrent states."""


class PlannedModel(NamedTuple):
    """Specs of the configured model on GPUs, for the prefill groups and for the decode groups."""

    prefill: ModelSpec
    decode: ModelSpec
    unknown_state: str
    """Reason why the size of the recurrent state is unknown and counted as 0; empty if the size is known."""


def planned_model(config: Config) -> PlannedModel:
    """Returns the model's specs with the KV layout of each role, and with the recurrent state of a request.

    KV is transferred in the layout of the decode groups.
    """
    source = make_source(config)
    dtype = resolve_dtype(config.model.dtype, source, torch.device("cuda"))
    first, then = (resolve_kv_dtype(config, group, dtype) for group in (config.prefill, config.decode))
    prefill, unknown = _with_state(source, source.spec(first), dtype)
    layout = msgspec.structs.replace(source.spec(then).layout, states=prefill.layout.states)
    return PlannedModel(prefill, msgspec.structs.replace(prefill, layout=layout), unknown)


def model_layouts(config: Config) -> tuple[KVLayout, KVLayout]:
    """Returns the KV layout of the prefill groups and of the decode groups; see `planned_model`."""
    model = planned_model(config)
    return model.prefill.layout, model.decode.layout


def _with_state(source: ModelSource, spec: ModelSpec, dtype: torch.dtype) -> tuple[ModelSpec, str]:
    """Returns the spec with the state of a request, and the reason why the state is unknown (empty if known)."""
    try:
        return with_state(source, spec, dtype), ""
    except UnsupportedModelError as exc:
        return spec, str(exc)


def plan_memory(config: Config, gpu_memory_bytes: int) -> list[PlannedMemory]:
    """Returns the memory plan of each kind of group, with one GPU of `gpu_memory_bytes` per rank.

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
            _with_state(source, source.spec(resolve_kv_dtype(config, group, dtype)), dtype)[0],
            dtype,
            gpu_memory_bytes,
        )
        for role, group in config.kinds.items()
    ]


def memory_lines(groups: list[PlannedMemory]) -> list[str]:
    """Returns one line of text for each kind of group, and further lines for its recurrent states and for the second
    tier of its prefix cache, if it has them."""
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
        if group.request_state_bytes:
            lines.append(_states_line(group))
        if group.host_cache:
            lines.append(f"{group.role}, prefix cache in host memory: {group.host_cache}")
    return lines


def _states_line(group: PlannedMemory) -> str:
    cached = f" + {group.cached_states:,} cached ({group.role}.cached_states)" if group.cached_states else ""
    limited = f", automatic: {STATES_REASON}" if group.limited_by_states else ""
    return (
        f"{group.role}, recurrent states: {describe_bytes(group.budget.state_bytes)} on each rank = "
        f"{group.max_requests:,} requests ({group.role}.max_requests{limited}){cached} + 1 for padding, "
        f"{describe_bytes(group.request_state_bytes)} each"
    )


def _group(
    config: Config,
    group: GroupConfig,
    role: Role,
    source: ModelSource,
    spec: ModelSpec,
    dtype: torch.dtype,
    gpu_memory_bytes: int,
) -> PlannedMemory:
    group = group.sized("cuda", requests=False)
    ranks = group.ranks
    token_bytes = rank_token_bytes(spec.layout, ranks)
    transfer = config.transfer.sized(gpu_memory_bytes)
    limit_bytes = gpu_memory_bytes if group.pool_tokens else int(gpu_memory_bytes * group.mem_fraction)
    weights = max(
        weights_bytes(source, spec, one, dtype)
        for one in ThreadCollective.group(ranks)  # used for shard sizes only: no reduction runs
    )
    state_bytes = spec.layout.state_bytes_of(ranks)
    rows = state_rows(GPU_REQUESTS, state_bytes, limit_bytes - weights) if state_bytes else GPU_REQUESTS
    automatic, group = not group.max_requests, group.with_requests(rows)
    cached = cached_states(
        spec,
        state_bytes,
        wanted_states(config, group, spec, "cuda", group.max_requests),
        int(gpu_memory_bytes * CACHED_STATES_SHARE),
    )
    budget = MemoryBudget(
        limit_bytes=limit_bytes,
        weights_bytes=weights,
        work_bytes=_work_bytes(source.config, spec, group, dtype),
        transfer_bytes=transfer_bytes_of(transfer, role),
        state_bytes=(group.max_requests + 1 + cached) * state_bytes,
        library_bytes=LIBRARY_BYTES[0],
    )
    tokens = group.pool_tokens or budget.pool_tokens(token_bytes, group.page_size)
    limit = group.context_limit(spec.context_tokens)
    longest = min(limit, tokens) if tokens else limit
    return PlannedMemory(
        role,
        ranks,
        budget,
        token_bytes,
        tokens,
        longest,
        group.max_requests,
        state_bytes,
        cached,
        _host_cache(config, group, spec, tokens * token_bytes + budget.state_bytes),
        automatic and rows < GPU_REQUESTS,
    )


def _host_cache(config: Config, group: GroupConfig, spec: ModelSpec, pool_bytes: int) -> str:
    """Returns the size of the second tier of a rank with a pool of `pool_bytes` as a text; empty without one."""
    size = configured_host_cache(group, spec, config.model.deterministic, on_gpu=True)
    if not pool_bytes or (size is not None and not size.nbytes):
        return ""
    setting = f"{group.role}.host_cache_bytes"
    if size is not None:
        return f"{describe_bytes(size.nbytes)} on each rank ({setting})"
    least = (
        ""
        if not repeats_pool(group)
        else f"none if that is less than {describe_bytes(pool_bytes // REPEATED_SHARE)}, "
    )
    return (
        f"each rank's share of 1/{AVAILABLE_SHARE} of the host's available memory, {least}at most "
        f"{describe_bytes(POOL_MULTIPLE * pool_bytes)} ({setting})"
    )


def _work_bytes(model: object, spec: ModelSpec, group: GroupConfig, dtype: torch.dtype) -> int:
    """Estimates the activation bytes of a step: vectors of hidden and MLP size for each token and for each of its
    experts, and the logits.

    Of quantized weights, a step also holds the largest one as floats, or some experts.
    """
    rows = max(1, group.decode_batch)
    tokens = group.chunk_tokens + group.decode_batch
    hidden = int(setting(model, "hidden_size") or 0)
    inner = int(setting(model, "intermediate_size") or 4 * hidden)
    of_expert = 3 * int(setting(model, "moe_intermediate_size") or inner) + hidden
    chosen = int(setting(model, "num_experts_per_tok") or 0) * of_expert
    vectors = tokens * (8 * hidden + max(3 * inner, chosen)) * dtype.itemsize
    converted = _converted_bytes(model, 2 * hidden * dtype.itemsize // group.ranks, inner)
    return vectors + converted + (SAMPLER_COPIES + 1) * rows * spec.vocab_size * 4


def _converted_bytes(model: object, inner_bytes: int, inner: int) -> int:
    """Estimates the bytes of quantized weights that a step holds as floats at a time.

    `inner_bytes`: bytes of the first product's weights for an inner element. `inner`: inner elements of an MLP.
    """
    form = quantization_of(model)
    if form is None:
        return 0
    linear = 0 if form.storage == "mxfp4" else inner_bytes * inner
    if not setting(model, "num_experts_per_tok"):
        return linear
    expert = inner_bytes * int(setting(model, "moe_intermediate_size") or inner)
    count = max(int(setting(model, name) or 0) for name in _NUMBERS_OF_EXPERTS)
    return max(linear, expert, min(CONVERTED_BYTES, count * expert))
