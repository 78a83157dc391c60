"""Copies whole pages within a KV pool (K and V of every layer) in one launch, for copy-on-write.

The slots of a page are consecutive, so in each plane of a layer a page is one run of bytes, for any element type and
number of heads. Runs are moved as raw words, as wide as their alignment allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from disagg.core.types import Span
from kernels.copy.launch import launcher
from kernels.copy.rows import WORDS, Rows, alignment, check_pages, rows_of
from kernels.dispatch import backend


@dataclass(frozen=True, slots=True)
class _Plan:
    """A validated copy of pages."""

    buffer: torch.Tensor
    sources: torch.Tensor
    destinations: torch.Tensor
    rows: Rows
    """Addresses and strides of single slots."""
    page_bytes: int
    aligned: int
    """Alignment in bytes of every page in every plane; at most 16."""

    @property
    def word_bytes(self) -> int:
        """Size of the words in which pages are moved, in bytes."""
        return min(self.aligned, 8)

    def words(self) -> torch.Tensor:
        """Returns a view `[planes, words of a plane]` of the pool."""
        return self.buffer.view(-1).view(WORDS[self.word_bytes]).view(self.rows.planes, -1)


def copy_pages(
    buffer: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, page_size: int
) -> None:
    """Copies all slots of page `sources[i]` of `buffer` to page `destinations[i]`, for all `i` in parallel.

    - buffer: `[layers, planes, slots, heads, head_dim]`, contiguous, any dtype. Page `p` has the slots `p * page_size
      .. (p + 1) * page_size`; slots after the last whole page belong to no page.
    - sources, destinations: both int32 or both int64 `[copies]`, contiguous, on the buffer's device; pages of the
      pool (not checked). A source may have several destinations. A destination must be neither repeated nor a source,
      because the copies are unordered (not checked; `disagg.model.page_copies` guarantees it).
    - page_size: slots of a page.

    On CUDA: one launch on the current stream, no synchronization; may be captured into a graph after one run outside
    of it. The caller keeps the tensors alive until an event recorded after this call has completed. Raises ValueError
    (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    plan = _plan(buffer, sources, destinations, page_size)
    if plan is None:
        return
    if backend(buffer.device) == "triton":
        _launch(plan)
    else:
        _copy_torch(plan)


def copy_pages_reference(
    buffer: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, page_size: int
) -> None:
    """Computes `copy_pages` in plain torch, on any device."""
    plan = _plan(buffer, sources, destinations, page_size)
    if plan is not None:
        _copy_torch(plan)


def _plan(
    buffer: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, page_size: int
) -> _Plan | None:
    """Checks the arguments; returns None when there is nothing to copy."""
    layers, heads = (buffer.shape[0], buffer.shape[3]) if buffer.dim() == 5 else (0, 0)
    rows = rows_of(buffer, Span(0, layers), Span(0, heads))
    check_pages(buffer, page_size, sources=sources, destinations=destinations)
    page_bytes = page_size * rows.token_bytes
    if not (rows.planes and page_bytes and sources.shape[0]):
        return None
    offset_bytes = (
        int(buffer.storage_offset()) * buffer.element_size()
    )  # `Tensor.view(dtype)` requires an aligned offset
    aligned = alignment(page_bytes, rows.plane_bytes, rows.start, offset_bytes)
    return _Plan(buffer, sources, destinations, rows, page_bytes, aligned)


def _launch(plan: _Plan) -> None:
    rows, word_bytes, copies = plan.rows, plan.word_bytes, plan.sources.shape[0]
    page_words = plan.page_bytes // word_bytes
    constants = (page_words, plan.aligned // word_bytes)
    types = (word_bytes, plan.sources.dtype)
    launcher(copy_kernel, plan.buffer.device, types, rows.planes, page_words, constants).run(
        copies,
        (rows.start, plan.sources.data_ptr(), plan.destinations.data_ptr()),
        (copies, rows.plane_bytes // word_bytes),
        lambda: (plan.words(), plan.sources, plan.destinations),
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["copies", "plane_words"],
    do_not_specialize_on_alignment=["sources", "destinations"],
)
def copy_kernel(  # type: ignore[no-untyped-def]
    # tensors
    pool,
    sources,
    destinations,
    # sizes
    copies,
    plane_words,
    # meta
    PAGE_WORDS: tl.constexpr,  # noqa: N803
    VECTOR_WORDS: tl.constexpr,  # noqa: N803
    BLOCK_COPIES: tl.constexpr,  # noqa: N803
    BLOCK_WORDS: tl.constexpr,  # noqa: N803
):
    # int64 before any product: a pool is far larger than 2^31 words.
    plane = tl.program_id(1).to(tl.int64)
    copy = tl.program_id(0).to(tl.int64) * BLOCK_COPIES + tl.arange(0, BLOCK_COPIES)
    word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    inside = copy < copies
    source = tl.load(sources + copy, mask=inside, other=0).to(tl.int64)
    destination = tl.load(destinations + copy, mask=inside, other=0).to(tl.int64)
    # The compiler cannot infer the alignment of an indirect page and would emit scalar accesses.
    source = tl.multiple_of(plane * plane_words + source * PAGE_WORDS, VECTOR_WORDS)
    destination = tl.multiple_of(plane * plane_words + destination * PAGE_WORDS, VECTOR_WORDS)
    mask = inside[:, None] & (word < PAGE_WORDS)[None, :]
    # Unlike gather and scatter, keep both sides in the cache: the next step reads them.
    words = tl.load(pool + source[:, None] + word[None, :], mask=mask)
    tl.store(pool + destination[:, None] + word[None, :], words, mask=mask)


def _copy_torch(plan: _Plan) -> None:
    page_words = plan.page_bytes // plan.word_bytes
    whole_pages = plan.rows.plane_bytes // plan.page_bytes
    pages = plan.words()[:, : whole_pages * page_words].view(-1, whole_pages, page_words)
    pages.index_copy_(1, plan.destinations.long(), pages.index_select(1, plan.sources))
