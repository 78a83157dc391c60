"""What the gather and the scatter kernel share: argument checks, the choice of word, the tile, the launch.

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

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_VECTOR_BYTES = 16  # widest access of one thread
_TILE_WORDS = 2048  # 16 KiB of 8-byte words: enough bytes in flight per program to hide memory latency
_MAX_BLOCK_WORDS = 256
_WARPS = 4


@dataclass(frozen=True, slots=True)
class Copy:
    """One validated copy: the same memory seen as words, and where the rows lie in it."""

    pool: torch.Tensor
    """Pool words `[layers, 2, slots, row_words]`: the copied layers and heads only, so not contiguous."""
    staged: torch.Tensor
    """Staging words `[layers, 2, tokens, row_words]`, contiguous."""
    slots: torch.Tensor
    """int32 or int64 `[tokens]`."""
    token_words: int
    """Distance of two slots of the pool."""
    plane_words: int
    """Distance of two planes of the pool."""
    vector_words: int
    """Every row starts at a multiple of this many words (2 when 16-byte accesses are possible)."""

    @property
    def row_words(self) -> int:
        """Words of one row."""
        return self.staged.shape[3]

    @property
    def planes(self) -> int:
        """Number of (layer, k|v) pairs."""
        return 2 * self.staged.shape[0]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.staged.shape[2]


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
    _check_pool(pool, layers, heads)
    _check_slots(slots, pool)
    expected = segment_bytes(pool, slots.shape[0], layers, heads)
    _check_staged(staged, pool, expected, name)
    if expected == 0:
        return None
    head_bytes = pool.shape[4] * pool.element_size()
    row_bytes, token_bytes = len(heads) * head_bytes, pool.shape[3] * head_bytes
    first_bytes = heads.start * head_bytes
    aligned = _alignment(
        row_bytes,
        token_bytes,
        first_bytes,
        pool.data_ptr(),
        int(pool.storage_offset()) * pool.element_size(),  # `Tensor.view(dtype)` demands it as well
        staged.data_ptr(),
        int(staged.storage_offset()),
    )
    word_bytes = min(aligned, 8)
    word = _WORDS[word_bytes]
    token_words, row_words, first = (n // word_bytes for n in (token_bytes, row_bytes, first_bytes))
    pool_words = pool.view(-1).view(word).view(pool.shape[0], 2, pool.shape[2], token_words)
    return Copy(
        pool=pool_words[layers.start : layers.stop, :, :, first : first + row_words],
        staged=staged.view(word).view(len(layers), 2, slots.shape[0], row_words),
        slots=slots,
        token_words=token_words,
        plane_words=pool.shape[2] * token_words,
        vector_words=aligned // word_bytes,
    )


def _alignment(*quantities: int) -> int:
    """Largest power of two, at most 16, that divides all the quantities (bytes, addresses)."""
    merged = _VECTOR_BYTES
    for quantity in quantities:
        merged |= quantity
    return merged & -merged


def _check_pool(pool: torch.Tensor, layers: Span, heads: Span) -> None:
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


def _check_slots(slots: torch.Tensor, pool: torch.Tensor) -> None:
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


def launch(kernel: Any, copy: Copy) -> None:
    """Runs a copy kernel for all planes in one launch, on the current stream; never waits for it.

    `kernel(pool, slots, staged, tokens, plane_words, <constexprs of tile>)`. What differs from call to call
    (tokens, layers, heads' start) is no constexpr, so that only a new row width compiles anew.
    """
    block_words = min(triton.next_power_of_2(copy.row_words), _MAX_BLOCK_WORDS)
    block_tokens = _TILE_WORDS // block_words
    grid = (
        triton.cdiv(copy.tokens, block_tokens),
        copy.planes,
        triton.cdiv(copy.row_words, block_words),
    )
    arguments = (copy.pool, copy.slots, copy.staged, copy.tokens, copy.plane_words)
    constants = (copy.token_words, copy.row_words, copy.vector_words, block_tokens, block_words)
    if copy.pool.device.type != "cuda":  # the interpreter
        kernel[grid](*arguments, *constants)
        return
    with torch.cuda.device(copy.pool.device):  # Triton launches on the current device's current stream
        # There is no arithmetic to fuse; newer Triton warns when this option is left to its default.
        kernel[grid](*arguments, *constants, num_warps=_WARPS, enable_fp_fusion=False)
