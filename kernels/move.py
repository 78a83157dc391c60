"""Pool to pool: writes head slices of one KV pool straight into another, over whatever joins the two GPUs.

The destination may belong to another process (`transport.peer_memory`). It guards its pages with a *fence word* for
each of its requests: the number of the ticket that may be written, or one that no ticket has. The kernel reads it
on the device, in the same launch that writes: what was launched late, for a request that is over, writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from disagg.core.types import Span
from kernels.dispatch import backend
from kernels.launch import Launch, Tile
from kernels.layout import WORDS, alignment, check_pool, check_slots

# Each warp reads the fence word over the wire: of all tiles from 1 to 16 KiB a warp, the smallest within 1 % of what
# the kernel reaches without a fence (H200, NVLink: 368 GB/s of 371; 1 KiB a warp: 300).
_TILE = Tile(words=2048, warps=1)


@dataclass(frozen=True, slots=True)
class Place:
    """A rectangle of a pool: where rows are read, or where they are written."""

    pool: torch.Tensor
    """Contiguous `[layers, 2, slots, heads, head_dim]`."""
    slots: torch.Tensor
    """int32 or int64 `[tokens]`, each within the pool (not checked); on the device that runs the kernel."""
    layers: Span
    heads: Span
    """Both local to the pool."""

    @property
    def token_bytes(self) -> int:
        """Distance of two slots."""
        return self.pool.shape[3] * self.pool.shape[4] * self.pool.element_size()

    @property
    def plane_bytes(self) -> int:
        """Distance of two (layer, k|v) planes."""
        return self.pool.shape[2] * self.token_bytes

    @property
    def first_bytes(self) -> int:
        """Where a token's row begins within its slot."""
        return self.heads.start * self.pool.shape[4] * self.pool.element_size()

    @property
    def start(self) -> int:
        """Address of the first plane's first row."""
        return self.pool.data_ptr() + 2 * self.layers.start * self.plane_bytes + self.first_bytes

    def words(self, word_bytes: int, row_words: int) -> torch.Tensor:
        """View `[layers, 2, slots, row_words]`: the layers and heads only."""
        token_words, first = self.token_bytes // word_bytes, self.first_bytes // word_bytes
        shape = (self.pool.shape[0], 2, self.pool.shape[2], token_words)
        words = self.pool.view(-1).view(WORDS[word_bytes]).view(shape)
        return words[self.layers.start : self.layers.stop, :, :, first : first + row_words]


def move(source: Place, target: Place, fence: torch.Tensor, ticket: int) -> None:
    """Writes `source` to `target` if `fence`, int64 `[1]`, holds `ticket` at that time; else does nothing.

    Both places have as many layers, heads and tokens, of the same element size and head_dim. On CUDA: one launch
    on the current stream of the source's device, no synchronization; the caller keeps all tensors alive until an
    event recorded after this call has completed. Raises ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    prepare_move(source, target, fence, ticket)()


def prepare_move(source: Place, target: Place, fence: torch.Tensor, ticket: int) -> Callable[[], None]:
    """`move` to be called later, with all that can be done before already done. Raises as it does."""
    row_bytes = _check(source, target, fence)
    if not row_bytes:
        return lambda: None
    if backend(source.pool.device) == "triton":
        return _launch(source, target, fence, ticket, row_bytes).run
    return partial(_move_torch, source, target, fence, ticket, row_bytes)


def move_reference(source: Place, target: Place, fence: torch.Tensor, ticket: int) -> None:
    """The same as `move`, in plain torch on any device; waits for the device."""
    row_bytes = _check(source, target, fence)
    if row_bytes:
        _move_torch(source, target, fence, ticket, row_bytes)


def _check(source: Place, target: Place, fence: torch.Tensor) -> int:
    """Bytes of a row; 0 when there is nothing to move."""
    for place in (source, target):
        check_pool(place.pool, place.layers, place.heads)
        check_slots(place.slots, place.pool)
    sizes = [
        (len(p.layers), len(p.heads), p.slots.shape[0], p.pool.shape[4], p.pool.element_size())
        for p in (source, target)
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"(layers, heads, tokens, head_dim, element bytes) differ: source {sizes[0]}, target {sizes[1]}"
        )
    if fence.dtype != torch.int64 or fence.shape != (1,) or fence.device != source.pool.device:
        raise ValueError(
            f"fence must be int64 [1] on {source.pool.device}; got {fence.dtype} {list(fence.shape)}"
        )
    layers, heads, tokens, head_dim, element_bytes = sizes[0]
    return heads * head_dim * element_bytes if layers and tokens else 0


def _word_bytes(source: Place, target: Place, row_bytes: int) -> int:
    """Alignment of every row on both sides, in bytes, at most 16."""
    quantities = [row_bytes]
    for place in (source, target):
        offset = int(place.pool.storage_offset()) * place.pool.element_size()  # for `Tensor.view(dtype)`
        quantities += [place.token_bytes, place.first_bytes, place.pool.data_ptr(), offset]
    return alignment(*quantities)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "source_plane_words", "target_plane_words", "ticket"],
    do_not_specialize_on_alignment=["source_slots", "target_slots", "fence"],
)
def _move_kernel(  # type: ignore[no-untyped-def]
    # tensors
    source,
    source_slots,
    target,
    target_slots,
    fence,
    # sizes
    tokens,
    source_plane_words,
    target_plane_words,
    ticket,
    # meta
    SOURCE_TOKEN_WORDS: tl.constexpr,  # noqa: N803
    TARGET_TOKEN_WORDS: tl.constexpr,  # noqa: N803
    ROW_WORDS: tl.constexpr,  # noqa: N803
    VECTOR_WORDS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_WORDS: tl.constexpr,  # noqa: N803
):
    # int64 before any product: a pool is far larger than 2^31 words.
    plane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    inside = token < tokens
    from_slot = tl.load(source_slots + token, mask=inside, other=0).to(tl.int64)
    to_slot = tl.load(target_slots + token, mask=inside, other=0).to(tl.int64)
    # The compiler cannot know the alignment of a looked-up row and would emit scalar accesses.
    from_row = tl.multiple_of(plane * source_plane_words + from_slot * SOURCE_TOKEN_WORDS, VECTOR_WORDS)
    to_row = tl.multiple_of(plane * target_plane_words + to_slot * TARGET_TOKEN_WORDS, VECTOR_WORDS)
    mask = inside[:, None] & (word < ROW_WORDS)[None, :]
    words = tl.load(source + from_row[:, None] + word[None, :], mask=mask, eviction_policy="evict_first")
    # Volatile: read where it lies, on the other GPU, at this moment.
    allowed = tl.where(tl.load(fence, volatile=True) == ticket, tokens, 0)
    mask = (token < allowed)[:, None] & (word < ROW_WORDS)[None, :]
    tl.store(target + to_row[:, None] + word[None, :], words, mask=mask, cache_modifier=".cs")


def _launch(source: Place, target: Place, fence: torch.Tensor, ticket: int, row_bytes: int) -> Launch:
    aligned = _word_bytes(source, target, row_bytes)
    word_bytes = min(aligned, 8)
    row_words = row_bytes // word_bytes
    return Launch(
        _move_kernel,
        source.pool.device,
        tensors=lambda: (
            source.words(word_bytes, row_words),
            source.slots,
            target.words(word_bytes, row_words),
            target.slots,
            fence,
        ),
        addresses=(
            source.start,
            source.slots.data_ptr(),
            target.start,
            target.slots.data_ptr(),
            fence.data_ptr(),
        ),
        types=(word_bytes, source.slots.dtype, target.slots.dtype),
        planes=2 * len(source.layers),
        tokens=source.slots.shape[0],
        row_words=row_words,
        sizes=(
            source.slots.shape[0],
            source.plane_bytes // word_bytes,
            target.plane_bytes // word_bytes,
            ticket,
        ),
        tile=_TILE,
        constants=(
            source.token_bytes // word_bytes,
            target.token_bytes // word_bytes,
            row_words,
            aligned // word_bytes,
        ),
    )


def _move_torch(source: Place, target: Place, fence: torch.Tensor, ticket: int, row_bytes: int) -> None:
    if int(fence[0]) != ticket:
        return
    word_bytes = min(_word_bytes(source, target, row_bytes), 8)
    row_words = row_bytes // word_bytes
    rows = source.words(word_bytes, row_words).index_select(2, source.slots)
    target.words(word_bytes, row_words).index_copy_(2, target.slots.long(), rows)
