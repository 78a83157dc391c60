"""Computes the size of a rank's KV pool: `mem_fraction` of the GPU less the measured memory of everything else.

At start the rank runs the largest possible steps on the trash page, as vLLM does (Kwon et al., 2023). The peak memory
of these steps is reserved, and the pool gets the remaining memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from disagg.core.config.read import Config, DecodeConfig, GroupConfig, TransferConfig
from disagg.core.errors import ConfigError
from disagg.core.sampling import MAX_LOGPROBS
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.chunks import PromptChunks
from disagg.model.collective.base import least

if TYPE_CHECKING:
    from disagg.model.runner import ModelRunner  # imports transformers

WORK_MARGIN = 1.15
"""Factor by which the measured memory of steps is increased, for fragmentation in torch's allocator."""
LIBRARY_BYTES = (512 << 20, 1536 << 20)
"""Lower and upper bound of the memory of CUDA's context and libraries in one process. CUDA does not attribute memory
outside torch to one of several processes on a GPU."""
MAX_POOL_TOKENS = 1 << 24
"""Largest pool. No GPU has memory for this number of tokens of a real model; the limit bounds the page list of tiny
models."""
SAMPLER_COPIES = 6
"""Peak memory of sampling, as a number of float32 copies of the logits: counts, penalised logits,
log-probabilities."""

cuda: Any = torch.cuda  # its memory functions carry no types


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Use of a rank's device memory, in bytes."""

    limit_bytes: int
    """Memory that the rank may use."""
    weights_bytes: int
    work_bytes: int
    """Peak memory of the largest steps and of sampling."""
    transfer_bytes: int
    """Ring of a decode rank, or staging buffer of a prefill rank."""
    state_bytes: int
    """Pool of recurrent states."""
    library_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Memory left for the KV pool; negative if all other uses exceed the limit."""
        rest = self.work_bytes + self.transfer_bytes + self.state_bytes + self.library_bytes
        return self.limit_bytes - self.weights_bytes - rest

    def pool_tokens(self, token_bytes: int, page_size: int) -> int:
        """Returns the number of tokens in the pages that fit `kv_bytes`, without the trash page."""
        pages = min(self.kv_bytes // token_bytes, MAX_POOL_TOKENS) // page_size
        return max(0, pages - 1) * page_size


def fill_memory(runner: ModelRunner, config: Config, group: GroupConfig, role: str) -> MemoryBudget:
    """Resizes the rank's KV pool to the memory that is left.

    All ranks of the group call this function together, before any request.

    Raises `ConfigError` if the pool is smaller than one request of `max_context_tokens`. If `max_context_tokens` is
    automatic, the pool bounds the context and needs only one page.
    """
    budget = measure(runner, config, group, role)
    token_bytes = runner.pool.nbytes // runner.pool.slots
    own_tokens = budget.pool_tokens(token_bytes, group.page_size)
    tokens = least(runner.collective, runner.device, own_tokens)
    least_tokens = runner.req_to_token.max_tokens if group.max_context_tokens else group.page_size
    if tokens < least_tokens:
        states = f", {role}.max_requests or {role}.cached_states" if budget.state_bytes else ""
        raise ConfigError(
            f"{role}: only {tokens} tokens of KV cache fit ({describe(budget)}), less than one request of "
            f"{least_tokens} tokens: raise {role}.mem_fraction ({group.mem_fraction:g}) or "
            f"{role}.tp, or lower {role}.max_context_tokens{states}"
        )
    try:
        runner.resize(tokens + group.page_size)
    except torch.OutOfMemoryError as exc:
        raise ConfigError(
            f"{role}: a KV pool of {tokens} tokens does not fit, because another process uses the GPU: stop that "
            f"process, or lower {role}.mem_fraction ({group.mem_fraction:g}) or set {role}.pool_tokens"
        ) from exc
    return budget


def measure(runner: ModelRunner, config: Config, group: GroupConfig, role: str) -> MemoryBudget:
    """Measures the memory budget by running the largest steps. All ranks of the group call it together."""
    device, pool_bytes = runner.device, runner.pool.nbytes
    run_largest(runner, group)  # at the first run, libraries load and allocate their own memory
    cuda.synchronize(device)
    held_bytes = cuda.memory_allocated(device)
    cuda.reset_peak_memory_stats(device)
    run_largest(runner, group)
    cuda.synchronize(device)
    work_bytes = cuda.max_memory_allocated(device) - held_bytes
    rows = max(1, group.decode_batch)
    if group.graphs and runner.recordable:
        work_bytes *= 2  # recorded graphs have separate memory
    work_bytes += SAMPLER_COPIES * rows * runner.spec.vocab_size * 4
    free_bytes, total_bytes = cuda.mem_get_info(device)
    outside_bytes = total_bytes - free_bytes - cuda.memory_reserved(device)
    transfer_bytes = transfer_bytes_of(config.transfer.sized(total_bytes), role)
    state_bytes = runner.states.pool.statistics().nbytes if runner.states is not None else 0
    return MemoryBudget(
        limit_bytes=int(total_bytes * group.mem_fraction),
        weights_bytes=held_bytes - pool_bytes - state_bytes,
        work_bytes=int(work_bytes * WORK_MARGIN),
        transfer_bytes=transfer_bytes,
        state_bytes=state_bytes,
        library_bytes=min(max(outside_bytes, LIBRARY_BYTES[0]), LIBRARY_BYTES[1]),
    )


def transfer_bytes_of(transfer: TransferConfig, role: str) -> int:
    """Returns the size in bytes of the transfer buffer of a rank of `role`; 0 for colocated ranks."""
    return {"prefill": transfer.staging_bytes, "decode": transfer.ring_bytes}.get(role, 0)


def describe(budget: MemoryBudget) -> str:
    """Returns text like `123.0 GB for this rank: weights 16.1, steps 2.3, ...`."""
    parts = {
        "weights": budget.weights_bytes,
        "steps": budget.work_bytes,
        "transfer": budget.transfer_bytes,
        "states": budget.state_bytes,
        "CUDA": budget.library_bytes,
        "KV": max(0, budget.kv_bytes),
    }
    uses = ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in parts.items() if nbytes)
    return f"{gigabytes(budget.limit_bytes)} for this rank: {uses}"


def describe_pool(runner: ModelRunner) -> str:
    """Returns text like `KV 52.9 GB = 403,344 tokens, states 1.2 GB = 256 requests + 512 cached`."""
    found = f"KV {gigabytes(pool_bytes(runner))} = {pool_tokens(runner):,} tokens"
    if runner.states is None:
        return found
    requests = runner.req_to_token.rows
    cached = runner.states.pool.slots - 1 - requests
    and_cached = f" + {cached:,} cached" if cached else ""
    return f"{found}, states {gigabytes(state_bytes(runner))} = {requests:,} requests{and_cached}"


def pool_tokens(runner: ModelRunner) -> int:
    """Returns the number of tokens that fit the KV pool, without its trash page."""
    return runner.pool.slots - runner.page_size


def pool_bytes(runner: ModelRunner) -> int:
    """Returns the size of the KV pool in bytes, without its trash page."""
    pool = runner.pool
    return pool.nbytes // pool.slots * pool_tokens(runner)


def state_bytes(runner: ModelRunner) -> int:
    """Returns the size of the recurrent state pool in bytes, without its trash slot; 0 without recurrent layers."""
    if runner.states is None:
        return 0
    statistics = runner.states.pool.statistics()
    return statistics.nbytes - statistics.slot_bytes


def gigabytes(nbytes: int) -> str:
    """Returns text like `16.1 GB` or `1.2 MB`."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def run_largest(runner: ModelRunner, group: GroupConfig) -> None:
    """Runs the longest prompt's last chunk on the trash page, with a full decode batch if the group decodes.

    A group that computes new prompts also computes the chunk's log-probabilities, if the model can.
    """
    table = runner.req_to_token
    longest = table.max_tokens
    chunks = PromptChunks.of(runner.spec, group.chunk_tokens)
    sizes = [longest if chunks.whole else min(chunks.largest_tokens, longest)]
    sizes += [1] * min(group.decode_batch, group.max_requests - 1)
    slices = []
    for tokens in sizes:
        # With recurrent layers, the chunk must start at the request's first token.
        start = longest - tokens if runner.states is None else 0
        slices.append(SequenceSlice(table.alloc(), start, (0,) * tokens))
    if runner.spec.scores_prompts and not isinstance(group, DecodeConfig):
        targets = slices[0].tokens[1:]
        slices[0] = msgspec.structs.replace(slices[0], targets=targets, likeliest=MAX_LOGPROBS)
    runner.forward(StepBatch(tuple(slices)))
    for one in slices:
        table.free(one.row)
