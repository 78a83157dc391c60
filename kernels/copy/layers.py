"""Copy between a pool of separate layers and staging: gather and scatter for `kernels.copy.layer_pool`.

A segment in staging has the same bytes as one of a contiguous pool, so the two kinds of pool can exchange KV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from disagg.core.types import Span
from kernels.copy.checksum import NO_SIZES, Check, add_tile, unit_bytes
from kernels.copy.launch import SUMMED_TILE, Tile, launcher
from kernels.copy.layer_pool import LayerPool
from kernels.copy.rows import WORDS, alignment, check_slots, check_staged, word_bytes
from kernels.dispatch import backend


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "first_plane", "first_token", "first_unit"],
    do_not_specialize_on_alignment=["table", "slots"],
)
def copy_layers_kernel(  # type: ignore[no-untyped-def]
    # tensors
    first,
    table,
    slots,
    staged,
    parts,
    # sizes
    tokens,
    first_plane,
    first_token,
    first_unit,
    # meta
    TO_POOL: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    BLOCK_STRIDE: tl.constexpr,  # noqa: N803
    TOKEN_STRIDE: tl.constexpr,  # noqa: N803
    HEAD_STRIDE: tl.constexpr,  # noqa: N803
    HEAD_WORDS: tl.constexpr,  # noqa: N803
    ROW_WORDS: tl.constexpr,  # noqa: N803
    VECTOR_WORDS: tl.constexpr,  # noqa: N803
    PLANE_STEP: tl.constexpr,  # noqa: N803
    UNIT_BYTES: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_WORDS: tl.constexpr,  # noqa: N803
):
    WORD_BYTES: tl.constexpr = first.dtype.element_ty.primitive_bitwidth // 8  # noqa: N806
    # int64 before any product: a pool is far larger than 2^31 words.
    plane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int64)
    at = tl.load(table + plane) // WORD_BYTES + slot // BLOCK_SIZE * BLOCK_STRIDE
    row = tl.multiple_of(at + slot % BLOCK_SIZE * TOKEN_STRIDE, VECTOR_WORDS)
    column = word // HEAD_WORDS * HEAD_STRIDE + word % HEAD_WORDS
    if HEAD_STRIDE == HEAD_WORDS:  # heads are adjacent: wide accesses may cross them
        column = word
    staged_row = tl.multiple_of((plane * tokens + token) * ROW_WORDS, VECTOR_WORDS)
    mask = (token < tokens)[:, None] & (word < ROW_WORDS)[None, :]
    pool_at = first + (row[:, None] + column.to(tl.int64)[None, :])
    staged_at = staged + (staged_row[:, None] + word[None, :])
    # Every byte is used once, so caching does not help on either side.
    if TO_POOL:
        words = tl.load(staged_at, mask=mask, other=0, eviction_policy="evict_first")
        tl.store(pool_at, words, mask=mask, cache_modifier=".cs")
    else:
        words = tl.load(pool_at, mask=mask, other=0, eviction_policy="evict_first")
        tl.store(staged_at, words, mask=mask, cache_modifier=".cs")
    if parts is not None:
        add_tile(
            parts,
            words,
            first_plane,
            first_token,
            first_unit,
            PLANE_STEP,
            UNIT_BYTES,
            BLOCK_TOKENS,
            BLOCK_WORDS,
        )


def gather_layers(
    pool: LayerPool,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    out: torch.Tensor,
    check: Check | None = None,
) -> None:
    """Writes the segment (`layers`, `slots`, `heads`) of `pool` to `out`; see `kernels.copy.gather.gather`."""
    copy = _plan(pool, slots, layers, heads, out, "out", check)
    if copy is None:
        return
    if backend(pool.device) == "triton":
        copy.launch(to_pool=False)
    else:
        copy.gather_torch()


def scatter_layers(
    staged: torch.Tensor,
    pool: LayerPool,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    check: Check | None = None,
) -> None:
    """Writes the segment `staged` to (`layers`, `slots`, `heads`) of `pool`; see `kernels.copy.scatter.scatter`."""
    copy = _plan(pool, slots, layers, heads, staged, "staged", check)
    if copy is None:
        return
    if backend(pool.device) == "triton":
        copy.launch(to_pool=True)
    else:
        copy.scatter_torch()


@dataclass(frozen=True, slots=True, eq=False)
class _LayersCopy:
    """A validated copy between heads of separate layers and a range of staging memory."""

    pool: LayerPool
    staged: torch.Tensor
    slots: torch.Tensor
    layers: Span
    heads: Span
    aligned: int
    """Alignment in bytes of every head, in the pool and in staging; at most 16."""
    check: Check | None

    @property
    def head_bytes(self) -> int:
        return self.pool.shape[4] * self.pool.element_size()

    @property
    def word_bytes(self) -> int:
        return word_bytes(self.aligned, self.check, self.head_bytes)

    @property
    def numbers(self) -> Span:
        """Indices of the copied planes in `LayerPool.planes`."""
        planes = self.pool.shape[1]
        return Span(self.layers.start * planes, self.layers.stop * planes)

    def plane_words(self, number: int) -> torch.Tensor:
        """Returns a view `[blocks, block_size, heads, words of a head]` of the copied heads of a plane."""
        heads = self.pool.planes[number][:, :, self.heads.start : self.heads.stop]
        return heads.view(WORDS[self.word_bytes])

    def staged_words(self) -> torch.Tensor:
        """Returns a view `[planes of all layers, tokens, heads, words of a head]` of staging."""
        shape = (len(self.numbers), self.slots.shape[0], len(self.heads), -1)
        return self.staged.view(WORDS[self.word_bytes]).view(shape)

    def gather_torch(self) -> None:
        blocks, tokens = self._places()
        for staged, number in zip(self.staged_words(), self.numbers, strict=True):
            staged.copy_(self.plane_words(number)[blocks, tokens])
        self._sum_staged()

    def scatter_torch(self) -> None:
        blocks, tokens = self._places()
        for staged, number in zip(self.staged_words(), self.numbers, strict=True):
            self.plane_words(number)[blocks, tokens] = staged
        self._sum_staged()

    def launch(self, *, to_pool: bool) -> None:
        """Launches the kernel on the current stream of the pool's device."""
        pool, word, check, planes = self.pool, self.word_bytes, self.check, self.pool.shape[1]
        parts = None if check is None else check.summer.parts
        head_words, tokens = self.head_bytes // word, self.slots.shape[0]
        strides = tuple(stride // word for stride in pool.strides)
        row_words = len(self.heads) * head_words
        sizes = (to_pool, pool.block_size, *strides, head_words, row_words, self.aligned // word)
        table = pool.table[self.numbers.start : self.numbers.stop]
        start = pool.planes[0].data_ptr() + self.heads.start * pool.strides.head
        launcher(
            copy_layers_kernel,
            pool.device,
            (word, self.slots.dtype, check is None),
            len(self.numbers),
            row_words,
            (*sizes, 2 // planes, unit_bytes(self.head_bytes)),
            Tile() if check is None else SUMMED_TILE,
        ).run(
            tokens,
            (
                start,
                table.data_ptr(),
                self.slots.data_ptr(),
                self.staged.data_ptr(),
                None if parts is None else parts.data_ptr(),
            ),
            (tokens, *(NO_SIZES if check is None else check.sizes(planes, self.head_bytes))),
            lambda: (self.plane_words(0), table, self.slots, self.staged_words(), parts),
        )
        if check is not None:
            check.finish()

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.slots.long()
        return slots // self.pool.block_size, slots % self.pool.block_size

    def _sum_staged(self) -> None:
        if self.check is not None:
            planes, tokens = self.pool.shape[1], self.slots.shape[0]
            words = self.staged.view(WORDS[self.word_bytes]).view(-1, planes, tokens, self._row_words)
            self.check.sum_words(words, self.head_bytes)

    @property
    def _row_words(self) -> int:
        return len(self.heads) * self.head_bytes // self.word_bytes


def _plan(
    pool: LayerPool,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    staged: torch.Tensor,
    name: str,
    check: Check | None,
) -> _LayersCopy | None:
    """Checks the arguments; returns None when there is nothing to copy. Raises ValueError."""
    check_slots(slots, pool)
    for axis, what, span in ((0, "layers", layers), (3, "heads", heads)):
        if not Span(0, pool.shape[axis]).covers(span):
            raise ValueError(
                f"{what} [{span.start}, {span.stop}) is outside the pool's {pool.shape[axis]} {what}; "
                "pass indices local to the pool"
            )
    head_bytes = pool.shape[4] * pool.element_size()
    expected = len(layers) * pool.shape[1] * slots.shape[0] * len(heads) * head_bytes
    check_staged(staged, pool, expected, name)
    if expected == 0:
        return None
    aligned = alignment(pool.aligned, staged.data_ptr(), int(staged.storage_offset()))
    return _LayersCopy(pool, staged, slots, layers, heads, aligned, check)
