"""Copies whole KV pages between a pool and blocks of host memory; a block holds one page of all layers contiguously.

In the pool a page is one run of bytes in each plane of each layer. In a block these runs follow each other, layer by
layer: the *page-first* layout of SGLang's hierarchical cache. A block is therefore one contiguous range for storage
and for other hosts, and a kernel copies any range of layers of many pages in one launch, directly from or to pinned
host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from disagg.core.types import Span
from kernels.copy.launch import launcher
from kernels.copy.rows import WORDS, Rows, alignment, rows_of
from kernels.dispatch import backend


class Blocks(NamedTuple):
    """Blocks of host memory, and the part of each block that belongs to one pool."""

    memory: torch.Tensor
    """uint8 `[blocks, block_bytes]`, contiguous; pinned if the pool is on a GPU, else on the pool's device."""
    offset_bytes: int
    """First byte of the pool's part within a block."""


@dataclass(frozen=True, slots=True)
class _BlockCopy:
    """Validated arguments."""

    pool: torch.Tensor
    pages: torch.Tensor
    blocks: Blocks
    places: torch.Tensor
    rows: Rows
    """Rows of single slots of the copied layers."""
    page_bytes: int
    first_bytes: int
    """First byte of the copied layers within a block."""
    aligned: int
    """Alignment in bytes of the start of every run, on both sides; at most 16."""

    @property
    def word_bytes(self) -> int:
        """Size of the words in which runs are moved."""
        return min(self.aligned, 8)

    def pool_words(self, layers: Span) -> torch.Tensor:
        """Returns a view `[planes, words of a plane]` of the copied layers of the pool."""
        words = self.pool[layers.start : layers.stop].view(-1).view(WORDS[self.word_bytes])
        return words.view(self.rows.planes, -1)

    def block_words(self) -> torch.Tensor:
        """Returns a view `[blocks, words of a block]`."""
        return self.blocks.memory.view(WORDS[self.word_bytes])


def pages_to_blocks(
    pool: torch.Tensor,
    pages: torch.Tensor,
    blocks: Blocks,
    places: torch.Tensor,
    page_size: int,
    layers: Span,
) -> None:
    """Copies `layers` of page `pages[i]` of `pool` to block `places[i]`, for all `i` in parallel.

    - pool: `[layers, planes, slots, heads, head_dim]`, contiguous, any dtype. Page `p` has the slots `p * page_size
      .. (p + 1) * page_size`.
    - pages, places: both int32 or both int64 `[copies]`, contiguous, on the pool's device; the values are not
      checked. No place may repeat.
    - blocks: the pool's part of a block is `[layers, planes, page_size, heads, head_dim]`, of all layers.
    - layers: layers to copy, local to the pool.

    On CUDA: one launch on the current stream, no synchronization; the kernel accesses pinned memory directly. The
    caller keeps all tensors alive until an event recorded after this call has completed. Raises ValueError
    (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    _copy(pool, pages, blocks, places, page_size, layers, to_blocks=True, reference=False)


def blocks_to_pages(
    pool: torch.Tensor,
    pages: torch.Tensor,
    blocks: Blocks,
    places: torch.Tensor,
    page_size: int,
    layers: Span,
) -> None:
    """Copies `layers` of block `places[i]` to page `pages[i]` of `pool`; see `pages_to_blocks`.

    No page may repeat.
    """
    _copy(pool, pages, blocks, places, page_size, layers, to_blocks=False, reference=False)


def pages_to_blocks_reference(
    pool: torch.Tensor,
    pages: torch.Tensor,
    blocks: Blocks,
    places: torch.Tensor,
    page_size: int,
    layers: Span,
) -> None:
    """Computes `pages_to_blocks` in plain torch; pool and blocks must be on one device."""
    _copy(pool, pages, blocks, places, page_size, layers, to_blocks=True, reference=True)


def blocks_to_pages_reference(
    pool: torch.Tensor,
    pages: torch.Tensor,
    blocks: Blocks,
    places: torch.Tensor,
    page_size: int,
    layers: Span,
) -> None:
    """Computes `blocks_to_pages` in plain torch; pool and blocks must be on one device."""
    _copy(pool, pages, blocks, places, page_size, layers, to_blocks=False, reference=True)


def _copy(
    pool: torch.Tensor,
    pages: torch.Tensor,
    blocks: Blocks,
    places: torch.Tensor,
    page_size: int,
    layers: Span,
    *,
    to_blocks: bool,
    reference: bool,
) -> None:
    plan = _plan(pool, pages, blocks, places, page_size, layers)
    if plan is None:
        return
    if not reference and backend(pool.device) == "triton":
        _launch(plan, layers, to_blocks)
    else:
        _copy_torch(plan, layers, to_blocks)


def _plan(
    pool: torch.Tensor,
    pages: torch.Tensor,
    blocks: Blocks,
    places: torch.Tensor,
    page_size: int,
    layers: Span,
) -> _BlockCopy | None:
    """Checks the arguments; returns None when there is nothing to copy."""
    all_layers, heads = (pool.shape[0], pool.shape[3]) if pool.dim() == 5 else (0, 0)
    rows = rows_of(pool, layers, Span(0, heads))
    if not 1 <= page_size <= pool.shape[2]:
        raise ValueError(f"page_size must be 1 to the pool's {pool.shape[2]} slots; got {page_size}")
    for name, numbers in (("pages", pages), ("places", places)):
        kinds = numbers.dtype in (torch.int32, torch.int64) and numbers.dtype == pages.dtype
        if numbers.shape != (pages.numel(),) or not kinds or not numbers.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 or int64 [copies], as many and of the same type on both sides; "
                f"got {numbers.dtype} {list(numbers.shape)}"
            )
        if numbers.device != pool.device:
            raise ValueError(f"{name} must be on the pool's device {pool.device}; got {numbers.device}")
    page_bytes = page_size * rows.token_bytes
    _check_blocks(blocks, pool, all_layers * pool.shape[1] * page_bytes)
    if not (rows.planes and page_bytes and pages.shape[0]):
        return None
    first_bytes = blocks.offset_bytes + layers.start * pool.shape[1] * page_bytes
    memory = blocks.memory
    aligned = alignment(
        page_bytes,
        rows.plane_bytes,
        rows.start,
        int(pool.storage_offset()) * pool.element_size(),
        first_bytes,
        memory.shape[1],
        memory.data_ptr(),
        int(memory.storage_offset()),
    )
    return _BlockCopy(pool, pages, blocks, places, rows, page_bytes, first_bytes, aligned)


def _check_blocks(blocks: Blocks, pool: torch.Tensor, part_bytes: int) -> None:
    memory, end = blocks.memory, blocks.offset_bytes + part_bytes
    if memory.dim() != 2 or memory.dtype != torch.uint8 or not memory.is_contiguous():
        raise ValueError(
            f"blocks must be contiguous uint8 [blocks, bytes]; got {memory.dtype} {list(memory.shape)}"
        )
    if blocks.offset_bytes < 0 or end > memory.shape[1]:
        raise ValueError(
            f"the pool's part of a block has bytes {blocks.offset_bytes}..{end}; a block has {memory.shape[1]}"
        )
    if memory.device != pool.device and not memory.is_pinned():
        raise ValueError(
            f"blocks must be pinned host memory or on the pool's device {pool.device}; got {memory.device}"
        )


def _launch(plan: _BlockCopy, layers: Span, to_blocks: bool) -> None:
    rows, word_bytes, copies = plan.rows, plan.word_bytes, plan.pages.shape[0]
    page_words, memory = plan.page_bytes // word_bytes, plan.blocks.memory
    constants = (page_words, plan.aligned // word_bytes, int(to_blocks))
    types = (word_bytes, plan.pages.dtype)
    first = memory.data_ptr() + plan.first_bytes
    launcher(block_kernel, plan.pool.device, types, rows.planes, page_words, constants).run(
        copies,
        (rows.start, plan.pages.data_ptr(), first, plan.places.data_ptr()),
        (copies, rows.plane_bytes // word_bytes, memory.shape[1] // word_bytes),
        lambda: (
            plan.pool_words(layers),
            plan.pages,
            plan.block_words().view(-1)[plan.first_bytes // word_bytes :],
            plan.places,
        ),
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["copies", "plane_words", "block_words"],
    do_not_specialize_on_alignment=["pages", "places"],
)
def block_kernel(  # type: ignore[no-untyped-def]
    # tensors
    pool,
    pages,
    blocks,
    places,
    # sizes
    copies,
    plane_words,
    block_words,
    # meta
    PAGE_WORDS: tl.constexpr,  # noqa: N803
    VECTOR_WORDS: tl.constexpr,  # noqa: N803
    TO_BLOCKS: tl.constexpr,  # noqa: N803
    BLOCK_COPIES: tl.constexpr,  # noqa: N803
    BLOCK_WORDS: tl.constexpr,  # noqa: N803
):
    # int64 before any product: pools and host memory are far larger than 2^31 words.
    plane = tl.program_id(1).to(tl.int64)
    copy = tl.program_id(0).to(tl.int64) * BLOCK_COPIES + tl.arange(0, BLOCK_COPIES)
    word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    inside = copy < copies
    page = tl.load(pages + copy, mask=inside, other=0).to(tl.int64)
    place = tl.load(places + copy, mask=inside, other=0).to(tl.int64)
    # The compiler cannot infer the alignment of an indirect page and would emit scalar accesses.
    in_pool = tl.multiple_of(plane * plane_words + page * PAGE_WORDS, VECTOR_WORDS)
    in_block = tl.multiple_of(place * block_words + plane * PAGE_WORDS, VECTOR_WORDS)
    mask = inside[:, None] & (word < PAGE_WORDS)[None, :]
    pool_at = pool + in_pool[:, None] + word[None, :]
    block_at = blocks + in_block[:, None] + word[None, :]
    # Every byte is used once, so caching does not help on either side.
    if TO_BLOCKS:
        words = tl.load(pool_at, mask=mask, eviction_policy="evict_first")
        tl.store(block_at, words, mask=mask, cache_modifier=".cs")
    else:
        words = tl.load(block_at, mask=mask, eviction_policy="evict_first")
        tl.store(pool_at, words, mask=mask, cache_modifier=".cs")


def _copy_torch(plan: _BlockCopy, layers: Span, to_blocks: bool) -> None:
    word_bytes, planes = plan.word_bytes, plan.rows.planes
    page_words, first = plan.page_bytes // word_bytes, plan.first_bytes // word_bytes
    whole_pages = plan.rows.plane_bytes // plan.page_bytes
    pages = plan.pool_words(layers)[:, : whole_pages * page_words].view(planes, whole_pages, page_words)
    blocks = plan.block_words()[:, first : first + planes * page_words].view(-1, planes, page_words)
    if to_blocks:
        blocks.index_copy_(0, plan.places.long(), pages.index_select(1, plan.pages).transpose(0, 1))
    else:
        pages.index_copy_(1, plan.pages.long(), blocks.index_select(0, plan.places).transpose(0, 1))
