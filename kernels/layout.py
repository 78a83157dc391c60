"""What the copy kernels share: argument checks, the choice of word, the tile.

A pool is one contiguous tensor `[layers, 2, slots, heads, head_dim]` (the second axis is K, V). A segment in
staging is contiguous bytes `[layer, k|v, token, head, head_dim]`. The heads of one token stand side by side
in both, so a copy is made of *rows*: for each (layer, k|v) *plane* and each token, `len(heads) * head_dim`
elements that are contiguous on both sides. Rows are moved as raw words, whatever the element type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from disagg.core.types import Span
from kernels.launch import VECTOR_BYTES, Launch

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Copy:
    """One validated copy: where the rows lie in pool and staging, in words."""

    pool: torch.Tensor
    """The whole pool, `[layers, 2, slots, heads, head_dim]`."""
    staged: torch.Tensor
    """uint8 `[bytes of the segment]`."""
    slots: torch.Tensor
    """int32 or int64 `[tokens]`."""
    layers: Span
    planes: int
    """Number of (layer, k|v) pairs."""
    tokens: int
    word_bytes: int
    first_words: int
    """Where a token's row begins within its slot."""
    row_words: int
    """Length of a row."""
    token_words: int
    """Distance of two slots of the pool."""
    plane_words: int
    """Distance of two planes of the pool."""
    vector_words: int
    """Every row starts at a multiple of this many words (2 when 16-byte accesses are possible)."""

    @property
    def pool_start(self) -> int:
        """Address of the first plane's first row."""
        words = 2 * self.layers.start * self.plane_words + self.first_words
        return self.pool.data_ptr() + words * self.word_bytes

    def pool_words(self) -> torch.Tensor:
        """View `[layers, 2, slots, row_words]` of the pool: the copied layers and heads only."""
        shape = (self.pool.shape[0], 2, self.pool.shape[2], self.token_words)
        words = self.pool.view(-1).view(WORDS[self.word_bytes]).view(shape)
        rows = slice(self.first_words, self.first_words + self.row_words)
        return words[self.layers.start : self.layers.stop, :, :, rows]

    def staged_words(self) -> torch.Tensor:
        """View `[layers, 2, tokens, row_words]` of staging."""
        return self.staged.view(WORDS[self.word_bytes]).view(-1, 2, self.tokens, self.row_words)

    def launch(self, kernel: Any) -> None:
        """Runs `kernel(pool, slots, staged, tokens, plane_words, <constexprs of tile>)`; see `Launch`."""
        Launch(
            kernel,
            self.pool.device,
            tensors=lambda: (self.pool_words(), self.slots, self.staged_words()),
            addresses=(self.pool_start, self.slots.data_ptr(), self.staged.data_ptr()),
            types=(self.word_bytes, self.slots.dtype),
            planes=self.planes,
            tokens=self.tokens,
            row_words=self.row_words,
            sizes=(self.tokens, self.plane_words),
            constants=(self.token_words, self.row_words, self.vector_words),
        ).run()


def segment_bytes(pool: torch.Tensor, tokens: int, layers: Span, heads: Span) -> int:
    """Bytes of a segment of `tokens` tokens, `layers` and `heads` of `pool`."""
    return 2 * len(layers) * tokens * len(heads) * pool.shape[4] * pool.element_size()


def plan_copy(
    pool: torch.Tensor, slots: torch.Tensor, layers: Span, heads: Span, staged: torch.Tensor, name: str
) -> Copy | None:
    """Checks the arguments of a copy and views its memory as words; None when there is nothing to copy.

    `name` is what the caller calls the staging tensor. Slots are trusted: reading them back would stall the
    device. Raises ValueError.
    """
    check_pool(pool, layers, heads)
    check_slots(slots, pool)
    expected = segment_bytes(pool, slots.shape[0], layers, heads)
    _check_staged(staged, pool, expected, name)
    if expected == 0:
        return None
    head_bytes = pool.shape[4] * pool.element_size()
    row_bytes, token_bytes = len(heads) * head_bytes, pool.shape[3] * head_bytes
    first_bytes = heads.start * head_bytes
    aligned = alignment(
        row_bytes,
        token_bytes,
        first_bytes,
        pool.data_ptr(),
        int(pool.storage_offset()) * pool.element_size(),  # `Tensor.view(dtype)` demands it as well
        staged.data_ptr(),
        int(staged.storage_offset()),
    )
    word_bytes = min(aligned, 8)
    token_words = token_bytes // word_bytes
    return Copy(
        pool=pool,
        staged=staged,
        slots=slots,
        layers=layers,
        planes=2 * len(layers),
        tokens=slots.shape[0],
        word_bytes=word_bytes,
        first_words=first_bytes // word_bytes,
        row_words=row_bytes // word_bytes,
        token_words=token_words,
        plane_words=pool.shape[2] * token_words,
        vector_words=aligned // word_bytes,
    )


def alignment(*quantities: int) -> int:
    """Largest power of two, at most 16, that divides all the quantities (bytes, addresses)."""
    merged = VECTOR_BYTES
    for quantity in quantities:
        merged |= quantity
    return merged & -merged


def check_pool(pool: torch.Tensor, layers: Span, heads: Span) -> None:
    if pool.dim() != 5 or pool.shape[1] != 2 or not pool.is_contiguous():
        raise ValueError(
            "pool must be contiguous [layers, 2, slots, heads, head_dim]; "
            f"got {list(pool.shape)}, strides {list(pool.stride())}"
        )
    for axis, what, span in ((0, "layers", layers), (3, "heads", heads)):
        if not Span(0, pool.shape[axis]).covers(span):
            raise ValueError(
                f"{what} [{span.start}, {span.stop}) is outside the pool's {pool.shape[axis]} {what}; "
                "pass indices local to the pool"
            )


def check_slots(slots: torch.Tensor, pool: torch.Tensor) -> None:
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(
            f"slots must be contiguous int32 or int64 [tokens]; got {slots.dtype} {list(slots.shape)}"
        )
    if slots.device != pool.device:
        raise ValueError(f"slots must be on the pool's device {pool.device}; got {slots.device}")


def _check_staged(staged: torch.Tensor, pool: torch.Tensor, expected: int, name: str) -> None:
    if staged.dim() != 1 or staged.dtype != torch.uint8 or not staged.is_contiguous():
        raise ValueError(f"{name} must be contiguous uint8 [bytes]; got {staged.dtype} {list(staged.shape)}")
    if staged.device != pool.device:
        raise ValueError(f"{name} must be on the pool's device {pool.device}; got {staged.device}")
    if staged.shape[0] != expected:
        raise ValueError(f"{name} must have exactly the segment's {expected} bytes; got {staged.shape[0]}")


@triton.jit  # type: ignore[untyped-decorator]
def tile(  # type: ignore[no-untyped-def]
    slots,
    tokens,
    plane_words,
    TOKEN_WORDS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    ROW_WORDS: tl.constexpr,  # noqa: N803
    VECTOR_WORDS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_WORDS: tl.constexpr,  # noqa: N803
):
    """Offsets of one tile `[BLOCK_TOKENS, BLOCK_WORDS]` in pool and staging, int64, and its mask.

    Each token's slot is looked up once per tile, not once per element.
    """
    # int64 before any product: a pool is far larger than 2^31 words.
    plane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int64)
    # The compiler cannot know the alignment of a looked-up row and would emit scalar accesses.
    pool_row = tl.multiple_of(plane * plane_words + slot * TOKEN_WORDS, VECTOR_WORDS)
    staged_row = tl.multiple_of((plane * tokens + token) * ROW_WORDS, VECTOR_WORDS)
    mask = (token < tokens)[:, None] & (word < ROW_WORDS)[None, :]
    return pool_row[:, None] + word[None, :], staged_row[:, None] + word[None, :], mask
