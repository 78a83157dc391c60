"""Runs once, before a rank serves, what is slow the first time: kernels compile, libraries load, pools grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from disagg.core.types import Shard, Span, code_row_bytes
from disagg.kv.pages import TRASH_PAGE
from disagg.kv.pool import KVPool, MHATokenToKVPool
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.node.sums import Sums
from kernels.gather import gather
from kernels.layout import segment_bytes
from kernels.quantize import gather_codes
from kernels.rows import Place
from kernels.scatter import scatter
from kernels.sum_rows import sum_rows
from staging.routes import Route

if TYPE_CHECKING:
    from disagg.model.runner import ModelRunner  # it brings transformers, which a rank without a model spares

TOKENS = 8


def warm_model(runner: ModelRunner, chunk_tokens: int, batch: int) -> None:
    """Prompt chunks and batches of single tokens, all on the trash page. All ranks of a group must do it together.

    Chunks of 1, 2, 4, ... tokens up to `chunk_tokens`: the attention kernels compile apart by how many queries there
    are. And `batch` single tokens together.
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
    """Compiles the kernel that copies pages, on the trash page.

    `Launcher` tells apart whether each of the two lists of pages begins at a 16-byte boundary. Of n copies that
    depend on each other the i-th launch reads places i and n + i of one upload: 2 and 3 make all four cases.
    """
    for count in (2, 3):
        runner.copy_pages([(TRASH_PAGE, TRASH_PAGE)] * count)
    torch.cuda.synchronize(runner.device)


def warm_copies(
    routes: tuple[Route, ...],
    shard: Shard,
    pool: KVPool,
    sums: Sums | None,
    codes: torch.dtype | None = None,
) -> None:
    """Compiles gather and scatter for every width of row that the routes have, on the trash page's first slot; with
    `codes` the gather that quantizes to them instead. With `sums` those that compute checksums, and the kernel that
    sums up what was written to the pool.

    The other side is memory of its own: the ring may be in use already.
    Twice, with slots that begin at a 16-byte boundary and beside one: Triton compiles these apart.
    """
    if pool.device.type != "cuda":
        return
    for part, of_class in zip(shard.parts, pool.parts, strict=True):
        own = {r.heads.shift(-part.heads.start) for r in routes if part.layers.covers(r.layers)}
        _warm_copies(own, of_class, sums, codes)
    torch.cuda.synchronize(pool.device)


def _warm_copies(
    rows: set[Span], pool: MHATokenToKVPool, sums: Sums | None, codes: torch.dtype | None
) -> None:
    slots = torch.zeros(TOKENS, dtype=torch.int32, device=pool.buffer.device)
    layer = Span(0, 1)
    word = torch.zeros(1, dtype=torch.int64, device=pool.buffer.device)
    check = sums.any_check(word) if sums is not None else None
    minus = sums.any_check(word, less=word) if sums is not None else None
    for heads in rows:
        if codes is not None:
            nbytes = len(heads) * code_row_bytes(pool.head_dim)  # of one token in one layer
            scratch = torch.empty(nbytes, dtype=torch.uint8, device=pool.buffer.device)
            gather_codes(pool.buffer, slots[:1], layer, heads, codes, scratch, check)
            continue
        nbytes = segment_bytes(pool.buffer, 1, layer, heads)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=pool.buffer.device)
        for first in (0, 1):
            gather(pool.buffer, slots[first : first + 1], layer, heads, scratch, check)
            scatter(scratch, pool.buffer, slots[first : first + 1], layer, heads, minus)
            if check is not None:
                sum_rows(Place(pool.buffer, slots[first : first + 1], layer, heads), check)
