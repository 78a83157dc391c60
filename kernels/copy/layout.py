"""Shared parts of the copy kernels: argument checks, word size, tile.

A pool is one contiguous tensor `[layers, planes, slots, heads, head_dim]`. A layer's planes are K and V, or
one plane with both (quantized, with scales), or keys only. A segment in staging is contiguous bytes `[layer,
plane, token, head, head_dim]`.

The heads of one token are adjacent in both, so a copy consists of *rows*. A row has the `len(heads) * head_dim`
elements of one plane and token, which are contiguous on both sides. Rows are moved as raw words, for any element
type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from disagg.core.types import Span
from kernels.copy.checksum import NO_SIZES, Check, unit_bytes
from kernels.copy.launch import SUMMED_TILE, Tile, launcher
from kernels.copy.layer_pool import Pool
from kernels.copy.rows import (
    WORDS,
    Rows,
    alignment,
    check_slots,
    check_staged,
    rows_of,
    view_words,
    word_bytes,
)


@dataclass(frozen=True, slots=True)
class Copy:
    """A validated copy between rows of a pool and a range of staging memory."""

    pool: torch.Tensor
    """The whole pool, `[layers, planes, slots, heads, head_dim]`."""
    staged: torch.Tensor
    """Staging memory of the segment, uint8 `[bytes of the segment]`."""
    slots: torch.Tensor
    """Slots of the tokens in the pool, int32 or int64 `[tokens]`."""
    layers: Span
    rows: Rows
    aligned: int
    """Alignment in bytes of every row, in the pool and in staging; at most 16."""
    check: Check | None = None

    @property
    def word_bytes(self) -> int:
        """Size of the words in which rows are moved, in bytes."""
        return word_bytes(self.aligned, self.check, self.head_bytes)

    @property
    def head_bytes(self) -> int:
        """Size of one head of a token in a plane, in bytes."""
        return self.pool.shape[4] * self.pool.element_size()

    @property
    def vector_words(self) -> int:
        """Alignment of every row in words; 2 if 16-byte accesses are possible."""
        return self.aligned // self.word_bytes

    def pool_words(self) -> torch.Tensor:
        """Returns a view `[layers, planes, slots, row_words]` of the pool: the copied layers and heads only."""
        return view_words(self.pool, self.rows, self.layers, self.word_bytes)

    def staged_words(self) -> torch.Tensor:
        """Returns a view `[layers, planes, tokens, row_words]` of staging."""
        return self.staged.view(WORDS[self.word_bytes]).view(
            -1, self.pool.shape[1], self.slots.shape[0], self.rows.row_bytes // self.word_bytes
        )

    def launch(self, kernel: Any) -> None:
        """Runs `kernel(pool, slots, staged, parts, <sizes>, <constexprs>)`; see `Launcher` and
        `kernels.copy.gather`.

        `parts` is None without a check.
        """
        rows, word, tokens, check = self.rows, self.word_bytes, self.slots.shape[0], self.check
        row_words, planes = rows.row_bytes // word, self.pool.shape[1]
        unit = unit_bytes(self.head_bytes)
        constants = (rows.token_bytes // word, row_words, self.vector_words, 2 // planes, unit)
        parts = None if check is None else check.summer.parts
        launcher(
            kernel,
            self.pool.device,
            (word, self.slots.dtype, check is None),
            rows.planes,
            row_words,
            constants,
            Tile() if check is None else SUMMED_TILE,
        ).run(
            tokens,
            (
                rows.start,
                self.slots.data_ptr(),
                self.staged.data_ptr(),
                None if parts is None else parts.data_ptr(),
            ),
            (
                tokens,
                rows.plane_bytes // word,
                *(NO_SIZES if check is None else check.sizes(planes, self.head_bytes)),
            ),
            lambda: (self.pool_words(), self.slots, self.staged_words(), parts),
        )
        if check is not None:
            check.finish()

    def sum_staged(self) -> None:
        """Computes the check's sum from the bytes in staging, in plain torch."""
        if self.check is not None:
            self.check.sum_words(self.staged_words(), self.head_bytes)


def segment_bytes(pool: Pool, tokens: int, layers: Span, heads: Span) -> int:
    """Returns the bytes of a segment of `tokens` tokens, `layers` and `heads` of `pool`."""
    return pool.shape[1] * len(layers) * tokens * len(heads) * pool.shape[4] * pool.element_size()


def plan_copy(
    pool: torch.Tensor,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    staged: torch.Tensor,
    name: str,
    check: Check | None = None,
) -> Copy | None:
    """Checks the arguments of a copy; returns None when there is nothing to copy.

    `name` is the caller's name of the staging tensor, for errors. Values of slots are not checked, because reading
    them would wait for the device. Raises ValueError.
    """
    rows = rows_of(pool, layers, heads, gaps=True)
    check_slots(slots, pool)
    expected = rows.planes * slots.shape[0] * rows.row_bytes
    check_staged(staged, pool, expected, name)
    if expected == 0:
        return None
    aligned = alignment(rows.aligned, staged.data_ptr(), int(staged.storage_offset()))
    return Copy(pool, staged, slots, layers, rows, aligned, check)


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
    """Returns the offsets of one tile `[BLOCK_TOKENS, BLOCK_WORDS]` in pool and staging, int64, and its mask.

    Each token's slot is loaded once per tile, not once per element.
    """
    # int64 before any product: a pool is far larger than 2^31 words.
    plane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int64)
    # The compiler cannot infer the alignment of an indirect row and would emit scalar accesses.
    pool_row = tl.multiple_of(plane * plane_words + slot * TOKEN_WORDS, VECTOR_WORDS)
    staged_row = tl.multiple_of((plane * tokens + token) * ROW_WORDS, VECTOR_WORDS)
    mask = (token < tokens)[:, None] & (word < ROW_WORDS)[None, :]
    return pool_row[:, None] + word[None, :], staged_row[:, None] + word[None, :], mask
