"""Copies whole KV pages between a pool and blocks of host memory; a block holds one page of all layers contiguously.

In the pool a page is one run of bytes in each plane of each layer. In a block these runs follow each other, layer by
layer: the *page-first* layout of SGLang's hierarchical cache. A block is therefore one contiguous range for a storage
and for other hosts. One launch copies any range of layers of many pages, directly from or to pinned host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from disagg.core.types import Span
from kernels.copy.launch import Tile, launcher
from kernels.copy.rows import WORDS, Rows, alignment, check_pages, rows_of
from kernels.dispatch import backend

TILE = Tile(words=2048, warps=4)
"""Tile of a copy between pages and blocks."""
_MOST_PROGRAMS = 32
"""Largest number of programs of a copy from or to host memory. PCIe limits its speed, so more programs would mostly
wait, and would occupy multiprocessors that compute kernels need."""
_MOST_ON_DEVICE = 1024
"""Largest number of programs of a copy within a device."""


class Pages(NamedTuple):
    """Pages of a pool, and the layers that are copied."""

    pool: torch.Tensor
    """`[layers, planes, slots, heads, head_dim]`, contiguous, any dtype."""
    numbers: torch.Tensor
    """int32 or int64 `[copies]`, contiguous, on the pool's device; the values are not checked. Page `p` has the slots
    `p * size .. (p + 1) * size`."""
    size: int
    """Slots of a page."""
    layers: Span
    """Copied layers, local to the pool."""


class Blocks(NamedTuple):
    """Blocks of host memory, and the part of each block that belongs to one pool."""

    memory: torch.Tensor
    """uint8 `[blocks, block_bytes]`, contiguous; pinned if the pool is on a GPU, else on the pool's device."""
    numbers: torch.Tensor
    """Block number for each of `Pages.numbers`, with the same type and device; the values are not checked."""
    offset_bytes: int
    """Offset within a block of the pool's part, `[layers, planes, page_size, heads, head_dim]` with all layers."""


@dataclass(frozen=True, slots=True)
class _BlockCopy:
    """A validated copy between pages and blocks."""

    pages: Pages
    blocks: Blocks
    rows: Rows
    """Addresses and strides of single slots of the copied layers."""
    page_bytes: int
    first_bytes: int
    """First byte of the copied layers within a block."""
    aligned: int
    """Alignment in bytes of the start of every run, on both sides; at most 16."""

    @property
    def word_bytes(self) -> int:
        """Size of the words in which runs are moved, in bytes."""
        return min(self.aligned, 8)

    def pool_words(self) -> torch.Tensor:
        """Returns a view `[planes, words of a plane]` of the copied layers of the pool."""
        layers = self.pages.layers
        words = self.pages.pool[layers.start : layers.stop].view(-1).view(WORDS[self.word_bytes])
        return words.view(self.rows.planes, -1)

    def block_words(self) -> torch.Tensor:
        """Returns a view `[blocks, words of a block]`."""
        return self.blocks.memory.view(WORDS[self.word_bytes])


def pages_to_blocks(pages: Pages, blocks: Blocks) -> None:
    """Copies the layers of page `pages.numbers[i]` to block `blocks.numbers[i]`, for all `i` in parallel.

    No block may repeat. On CUDA: one launch on the current stream, no synchronization; the kernel accesses pinned
    memory directly. The caller keeps all tensors alive until an event recorded after this call has completed. Raises
    ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    _copy(pages, blocks, to_blocks=True)


def blocks_to_pages(pages: Pages, blocks: Blocks) -> None:
    """Copies the layers of block `blocks.numbers[i]` to page `pages.numbers[i]`; see `pages_to_blocks`.

    No page may repeat.
    """
    _copy(pages, blocks, to_blocks=False)


def pages_to_blocks_reference(pages: Pages, blocks: Blocks) -> None:
    """Computes `pages_to_blocks` in plain torch. Waits for the copy if pool and blocks are on different devices."""
    if (plan := _plan(pages, blocks)) is not None:
        _copy_torch(plan, to_blocks=True)


def blocks_to_pages_reference(pages: Pages, blocks: Blocks) -> None:
    """Computes `blocks_to_pages` in plain torch. Waits for the copy if pool and blocks are on different devices."""
    if (plan := _plan(pages, blocks)) is not None:
        _copy_torch(plan, to_blocks=False)


def _copy(pages: Pages, blocks: Blocks, *, to_blocks: bool) -> None:
    plan = _plan(pages, blocks)
    if plan is None:
        return
    copy = _launch if backend(pages.pool.device) == "triton" else _copy_torch
    copy(plan, to_blocks=to_blocks)


def _plan(pages: Pages, blocks: Blocks) -> _BlockCopy | None:
    """Checks the arguments; returns None when there is nothing to copy."""
    pool, memory, layers = pages.pool, blocks.memory, pages.layers
    all_layers, heads = (pool.shape[0], pool.shape[3]) if pool.dim() == 5 else (0, 0)
    rows = rows_of(pool, layers, Span(0, heads))
    check_pages(pool, pages.size, pages=pages.numbers, places=blocks.numbers)
    page_bytes = pages.size * rows.token_bytes
    _check_blocks(blocks, pool, all_layers * pool.shape[1] * page_bytes)
    if not (rows.planes and page_bytes and pages.numbers.shape[0]):
        return None
    first_bytes = blocks.offset_bytes + layers.start * pool.shape[1] * page_bytes
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
    return _BlockCopy(pages, blocks, rows, page_bytes, first_bytes, aligned)


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


def _launch(plan: _BlockCopy, *, to_blocks: bool) -> None:
    rows, word_bytes, memory = plan.rows, plan.word_bytes, plan.blocks.memory
    pages, places = plan.pages.numbers, plan.blocks.numbers
    page_words, copies = plan.page_bytes // word_bytes, pages.shape[0]
    constants = (page_words, plan.aligned // word_bytes, int(to_blocks))
    types = (word_bytes, pages.dtype)
    first = memory.data_ptr() + plan.first_bytes
    device = plan.pages.pool.device
    most = _MOST_PROGRAMS if memory.device != device else _MOST_ON_DEVICE
    run = launcher(block_kernel, device, types, rows.planes, page_words, constants, TILE, most).run
    run(
        copies,
        (rows.start, pages.data_ptr(), first, places.data_ptr()),
        (copies, rows.planes, rows.plane_bytes // word_bytes, memory.shape[1] // word_bytes),
        lambda: (
            plan.pool_words(),
            pages,
            plan.block_words().view(-1)[plan.first_bytes // word_bytes :],
            places,
        ),
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["copies", "planes", "plane_words", "block_words"],
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
    planes,
    plane_words,
    block_words,
    # meta
    PAGE_WORDS: tl.constexpr,  # noqa: N803
    VECTOR_WORDS: tl.constexpr,  # noqa: N803
    TO_BLOCKS: tl.constexpr,  # noqa: N803
    BLOCK_COPIES: tl.constexpr,  # noqa: N803
    BLOCK_WORDS: tl.constexpr,  # noqa: N803
):
    WORD_TILES: tl.constexpr = (PAGE_WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS  # noqa: N806
    page_tiles = planes * WORD_TILES
    tiles = tl.cdiv(copies, BLOCK_COPIES) * page_tiles
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # Consecutive tiles are adjacent in a block. int64 before any product: pools and host memory are far larger
        # than 2^31 words.
        copy = (tile // page_tiles).to(tl.int64) * BLOCK_COPIES + tl.arange(0, BLOCK_COPIES)
        plane = (tile % page_tiles // WORD_TILES).to(tl.int64)
        word = (tile % WORD_TILES) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
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


def _copy_torch(plan: _BlockCopy, *, to_blocks: bool) -> None:
    word_bytes, planes = plan.word_bytes, plan.rows.planes
    page_words, first = plan.page_bytes // word_bytes, plan.first_bytes // word_bytes
    whole_pages = plan.rows.plane_bytes // plan.page_bytes
    pages = plan.pool_words()[:, : whole_pages * page_words].view(planes, whole_pages, page_words)
    blocks = plan.block_words()[:, first : first + planes * page_words].view(-1, planes, page_words)
    page, place = plan.pages.numbers.long(), plan.blocks.numbers.long().to(blocks.device)
    if to_blocks:
        blocks.index_copy_(0, place, pages.index_select(1, page).transpose(0, 1).to(blocks.device))
    else:
        pages.index_copy_(1, page, blocks.index_select(0, place).transpose(0, 1).to(pages.device))
