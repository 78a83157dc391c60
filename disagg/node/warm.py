"""Warm-up before a rank serves: compiles kernels, loads libraries, grows memory pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from disagg.core.types import SamplingParams, Shard, Span, quantized_row_bytes
from disagg.kv.pages import TRASH_PAGE
from disagg.kv.transfer_pools import CopyPools
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.sampling.batch import Sampler
from disagg.model.sampling.penalties import SamplingRow, history_of
from disagg.node.sums import Sums
from kernels.copy.gather import gather
from kernels.copy.layer_pool import LayerPool, Pool, one_tensor
from kernels.copy.layout import segment_bytes
from kernels.copy.quantize import gather_quantized
from kernels.copy.rows import PoolSlice
from kernels.copy.scatter import scatter
from kernels.copy.sum_rows import sum_rows
from staging.routes import Route

if TYPE_CHECKING:
    from disagg.model.runner import (
        ModelRunner,
    )  # imports transformers, which a rank without a model need not load

TOKENS = 8


def warm_model(runner: ModelRunner, chunk_tokens: int, batch: int) -> None:
    """Runs prompt chunks and a decode batch on the trash page. Collective over the group's ranks.

    Chunks have 1, 2, 4, ... up to `chunk_tokens` tokens, because attention kernels have variants for different
    numbers of queries. The decode batch has `batch` requests of one token.
    """
    tokens = min(chunk_tokens, runner.req_to_token.max_tokens)
    row = runner.req_to_token.alloc()
    runner.req_to_token.set_slots(row, 0, torch.zeros(tokens, dtype=torch.int32))
    sizes = {min(1 << power, tokens) for power in range(tokens.bit_length() + 1)}
    for size in sorted(sizes, reverse=True):  # the largest first: memory pools grow once
        runner.forward(StepBatch((SequenceSlice(row, 0, (0,) * size),)))
    runner.forward(StepBatch((SequenceSlice(row, 0, (0,)),) * batch))
    runner.req_to_token.free(row)
    torch.cuda.synchronize(runner.device)


def warm_page_copies(runner: ModelRunner) -> None:
    """Compiles the page copy kernel, on the trash page, for all alignments of its two page lists.

    `Launcher` compiles a variant for each combination of the two lists' 16-byte alignment. With n dependent copies,
    launch i reads elements i and n + i of one uploaded list. Lists of n = 2 and n = 3 copies thus cover all four
    combinations.
    """
    for count in (2, 3):
        runner.copy_pages([(TRASH_PAGE, TRASH_PAGE)] * count)
    torch.cuda.synchronize(runner.device)


def warm_sampling(vocab_tokens: int, device: torch.device) -> None:
    """Compiles the sampling kernels, which depend on the size of the vocabulary but not on the number of rows."""
    params = SamplingParams(temperature=1.0, seed=0, repetition_penalty=2.0)
    logits = torch.zeros(1, vocab_tokens, device=device)
    Sampler(()).step(logits, [SamplingRow(params, (), history_of((0,), params))]).result()


def warm_copies(
    routes: tuple[Route, ...],
    shard: Shard,
    pool: CopyPools,
    sums: Sums | None,
    quantized: torch.dtype | None = None,
) -> None:
    """Compiles gather and scatter for each row width of the routes. With `quantized`, compiles only the quantizing
    gather for KV.

    If `sums` is given, the checksum kernels are compiled too. The launches use the trash page and scratch memory,
    because the ring may be in use. Gather and scatter run with slots aligned and unaligned to 16 bytes, which Triton
    compiles separately.
    """
    if pool.device.type != "cuda":
        return
    for number, (part, buffer) in enumerate(zip(shard.all_parts, pool.buffers, strict=True)):
        own = {r.heads.shift(-part.heads.start) for r in routes if part.layers.covers(r.layers)}
        _warm_copies(own, buffer, sums, quantized if number < len(shard.parts) else None)
    torch.cuda.synchronize(pool.device)


def _warm_copies(rows: set[Span], pool: Pool, sums: Sums | None, quantized: torch.dtype | None) -> None:
    slots = torch.zeros(TOKENS, dtype=torch.int32, device=pool.device)
    layer = Span(0, 1)
    word = torch.zeros(1, dtype=torch.int64, device=pool.device)
    check = sums.any_check(word) if sums is not None else None
    minus = sums.any_check(word, less=word) if sums is not None else None
    for heads in rows:
        if quantized is not None:
            nbytes = len(heads) * quantized_row_bytes(pool.shape[4])  # of one token in one layer
            scratch = torch.empty(nbytes, dtype=torch.uint8, device=pool.device)
            gather_quantized(one_tensor(pool), slots[:1], layer, heads, quantized, scratch, check)
            continue
        nbytes = segment_bytes(pool, 1, layer, heads)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=pool.device)
        for first in (0, 1):
            gather(pool, slots[first : first + 1], layer, heads, scratch, check)
            scatter(scratch, pool, slots[first : first + 1], layer, heads, minus)
            if check is not None and not isinstance(pool, LayerPool):
                sum_rows(PoolSlice(pool, slots[first : first + 1], layer, heads), check)
