"""How large a rank's KV pool is: what `mem_fraction` of its GPU leaves beside everything else, measured.

The steps that need most memory are run on the trash page before there is a request, as vLLM does at start (Kwon et
al., 2023); what they took is set aside, and the pool gets the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from disagg.core.config import Config, GroupConfig, TransferConfig
from disagg.core.errors import ConfigError
from disagg.core.ports import Collective
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.chunks import PromptChunks
from disagg.node.device import memory_bytes

if TYPE_CHECKING:
    from disagg.model.runner import ModelRunner  # it brings transformers

WORK_MARGIN = 1.15
"""On the measured memory of steps: the allocator's blocks do not fit each other exactly."""
LIBRARY_BYTES = (512 << 20, 1536 << 20)
"""Least and most that CUDA's context and libraries are taken to need in one process. Where several processes share a
GPU nobody can see which of them uses what torch did not allocate."""
MAX_POOL_TOKENS = 1 << 24
"""No pool is made larger: of a real model's KV no GPU holds so much, and a toy's page list would only cost."""
SAMPLER_COPIES = 6
"""Of a step's logits, in float32: what choosing tokens takes at most (sorted values and indices, probabilities)."""

cuda: Any = torch.cuda  # its memory functions carry no types


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a rank's device memory is for, in bytes."""

    limit_bytes: int
    """What the rank may use in all."""
    weights_bytes: int
    work_bytes: int
    """Of the steps that need most, and of choosing their tokens."""
    transfer_bytes: int
    """The ring of a decode rank, the staging buffer of a prefill rank."""
    state_bytes: int
    """Recurrent state of as many requests as there may be."""
    library_bytes: int

    @property
    def kv_bytes(self) -> int:
        """What is left for the KV pool; negative when nothing is."""
        rest = self.work_bytes + self.transfer_bytes + self.state_bytes + self.library_bytes
        return self.limit_bytes - self.weights_bytes - rest

    def pool_tokens(self, token_bytes: int, page_size: int) -> int:
        """Whole pages in tokens, without the trash page; 0 when not even one fits beside it."""
        pages = min(self.kv_bytes // token_bytes, MAX_POOL_TOKENS) // page_size
        return max(0, pages - 1) * page_size


def fill_memory(runner: ModelRunner, config: Config, group: GroupConfig, role: str) -> MemoryBudget:
    """Gives the rank a KV pool of the memory that is left. All ranks of a group together, before any request.

    Raises `ConfigError` when too little is left for one longest request.
    """
    budget = measure(runner, config, group, role)
    token_bytes = runner.pool.nbytes // runner.pool.slots
    own_tokens = budget.pool_tokens(token_bytes, group.page_size)
    tokens = _least(own_tokens, runner.collective, runner.device)
    if tokens < runner.req_to_token.max_tokens:
        raise ConfigError(
            f"{role}: only {tokens} tokens of KV cache fit ({describe(budget)}), less than one request of "
            f"{runner.req_to_token.max_tokens} tokens: raise {role}.mem_fraction ({group.mem_fraction:g}) or "
            f"{role}.tp, or lower {role}.max_context_tokens"
        )
    try:
        runner.resize(tokens + group.page_size)
    except torch.OutOfMemoryError as exc:
        raise ConfigError(
            f"{role}: a KV pool of {tokens} tokens does not fit, because something else uses the GPU: stop it, or "
            f"lower {role}.mem_fraction ({group.mem_fraction:g}) or set {role}.pool_tokens"
        ) from exc
    return budget


def measure(runner: ModelRunner, config: Config, group: GroupConfig, role: str) -> MemoryBudget:
    """Runs the largest steps. All ranks of a group must do it together."""
    device, pool_bytes = runner.device, runner.pool.nbytes
    _run_largest(runner, group, role)  # libraries load and set their own memory aside
    cuda.synchronize(device)
    held_bytes = cuda.memory_allocated(device)
    cuda.reset_peak_memory_stats(device)
    _run_largest(runner, group, role)
    cuda.synchronize(device)
    work_bytes = cuda.max_memory_allocated(device) - held_bytes
    rows = 1 if role == "prefill" else group.max_batch
    if group.graphs and runner.recordable:
        work_bytes *= 2  # recorded steps have memory of their own
    work_bytes += SAMPLER_COPIES * rows * runner.spec.vocab_size * 4
    free_bytes, total_bytes = cuda.mem_get_info(device)
    outside_bytes = total_bytes - free_bytes - cuda.memory_reserved(device)
    transfer_bytes = transfer_bytes_of(config.transfer.sized(total_bytes), role)
    token_bytes = pool_bytes // runner.pool.slots
    return MemoryBudget(
        limit_bytes=int(total_bytes * group.mem_fraction),
        weights_bytes=held_bytes - pool_bytes,
        work_bytes=int(work_bytes * WORK_MARGIN),
        transfer_bytes=transfer_bytes,
        state_bytes=group.max_requests * runner.spec.state_tokens * token_bytes,
        library_bytes=min(max(outside_bytes, LIBRARY_BYTES[0]), LIBRARY_BYTES[1]),
    )


def transfer_bytes_of(transfer: TransferConfig, role: str) -> int:
    """What a rank of a group of `role` sets aside to send or receive."""
    return {"prefill": transfer.staging_bytes, "decode": transfer.ring_bytes}.get(role, 0)


def describe(budget: MemoryBudget) -> str:
    """In words: `123.0 GB for this rank: weights 16.1, steps 2.3, ...`."""
    parts = {
        "weights": budget.weights_bytes,
        "steps": budget.work_bytes,
        "transfer": budget.transfer_bytes,
        "recurrent state": budget.state_bytes,
        "CUDA": budget.library_bytes,
        "KV": max(0, budget.kv_bytes),
    }
    told = ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in parts.items() if nbytes)
    return f"{gigabytes(budget.limit_bytes)} for this rank: {told}"


def describe_pool(runner: ModelRunner) -> str:
    """In words: `KV 52.9 GB = 403,344 tokens`."""
    return f"KV {gigabytes(pool_bytes(runner))} = {runner.pool.slots - runner.page_size:,} tokens"


def pool_bytes(runner: ModelRunner) -> int:
    """The KV pool without its trash page."""
    pool = runner.pool
    return pool.nbytes // pool.slots * (pool.slots - runner.page_size)


def device_limit_bytes(device: torch.device, group: GroupConfig) -> int:
    """What a rank may use of its GPU; all of it where nobody asked for less. 0 of a CPU."""
    total_bytes = memory_bytes(device)
    return total_bytes if group.pool_tokens else int(total_bytes * group.mem_fraction)


def gigabytes(nbytes: int) -> str:
    """'16.1 GB', '1.2 MB'."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _run_largest(runner: ModelRunner, group: GroupConfig, role: str) -> None:
    """On the trash page: the last chunk of the longest prompt; but for a prefill rank, beside a full batch of the
    longest requests."""
    table = runner.req_to_token
    longest = table.max_tokens - runner.spec.state_tokens
    chunks = PromptChunks.of(runner.spec, group.chunk_tokens)
    sizes = [longest if chunks.whole else min(chunks.largest_tokens, longest)]
    if role != "prefill":
        sizes += [1] * min(group.max_batch, group.max_requests - 1)
    slices = []
    for tokens in sizes:
        # A recurrent state begins with its request's first token.
        start = longest - tokens if runner.states is None else 0
        slices.append(SequenceSlice(table.alloc(), start, (0,) * tokens))
    runner.forward(StepBatch(tuple(slices)))
    for one in slices:
        table.free(one.row)


def _least(tokens: int, collective: Collective, device: torch.device) -> int:
    """The smallest of the ranks' numbers: all of them use the same slots."""
    each = torch.zeros(collective.size, dtype=torch.int64, device=device)
    each[collective.rank] = tokens
    collective.all_reduce(each)
    return int(each.min())
