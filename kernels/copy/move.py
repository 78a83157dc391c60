"""Copy from pool to pool: writes head slices of one KV pool directly into another, over the link between the GPUs.

The destination may belong to another process (`transport.peer_memory`). The destination guards its pages with a
*fence word* for each request: the number of the ticket whose pages may be written, or a number that no ticket has.
The kernel itself reads the fence word, on the device. Therefore a late launch for an ended request writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl

from kernels.copy.checksum import NO_SIZES, Check, add_tile, unit_bytes
from kernels.copy.launch import Launcher, Tile, launcher
from kernels.copy.rows import PoolSlice, Rows, check_slots, rows_of, view_words, word_bytes
from kernels.dispatch import backend

# Each warp reads the fence word over the link. Of all tiles from 1 to 16 KiB per warp, this is the smallest tile
# within 1 % of the rate without a fence (H200, NVLink: 368 of 371 GB/s; with 1 KiB per warp 300 GB/s).
_TILE = Tile(words=2048, warps=1)
# With a checksum, 2048 words need more registers: 351 GB/s for one head over NVLink, against 359 with 1024.
_SUMMED_TILE = Tile(words=1024, warps=1)
_KEPT = 4096
"""Largest number of cached launchers; see `kernels.copy.rows`."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A validated move."""

    source: PoolSlice
    target: PoolSlice
    fence: torch.Tensor
    ticket: int
    rows: tuple[Rows, Rows]
    """Rows of source and target."""
    check: Check | None

    @property
    def word_bytes(self) -> int:
        """Size of the words in which rows are moved, in bytes."""
        return word_bytes(self.aligned, self.check, self.source.head_bytes)

    @property
    def aligned(self) -> int:
        return min(rows.aligned for rows in self.rows)

    def words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views `[layers, planes, slots, row_words]` of source and target."""
        source, target = (
            view_words(place.tensor, rows, place.layers, self.word_bytes)
            for place, rows in zip((self.source, self.target), self.rows, strict=True)
        )
        return source, target


def move(
    source: PoolSlice, target: PoolSlice, fence: torch.Tensor, ticket: int, check: Check | None = None
) -> None:
    """Writes `source` to `target` if `fence`, int64 `[1]`, equals `ticket` at execution; else writes nothing.

    Both slices have the same numbers of layers, heads and tokens, element size and head_dim. With `check`, the
    checksum of the bytes read is computed too (`kernels.copy.checksum`). Without any bytes, `check.total` stays
    unchanged.

    On CUDA: one launch on the current stream of the source's device, two with `check`, no synchronization. The caller
    keeps all tensors alive until an event recorded after this call has completed. Raises ValueError (arguments) and
    ConfigError (`DISAGG_KERNELS`).
    """
    prepare_move(source, target, fence, ticket, check)()


def prepare_move(
    source: PoolSlice, target: PoolSlice, fence: torch.Tensor, ticket: int, check: Check | None = None
) -> Callable[[], None]:
    """Returns a function that runs `move` with all preparation already done. Raises as `move` does."""
    planned = _plan(source, target, fence, ticket, check)
    if planned is None:
        return lambda: None
    if backend(source.tensor.device) == "triton":
        return _prepared(planned)
    return partial(_move_torch, planned)


def move_reference(
    source: PoolSlice, target: PoolSlice, fence: torch.Tensor, ticket: int, check: Check | None = None
) -> None:
    """Computes `move` in plain torch, on any device. Waits for the device to read the fence word."""
    planned = _plan(source, target, fence, ticket, check)
    if planned is not None:
        _move_torch(planned)


def check_fence(fence: torch.Tensor, device: torch.device) -> None:
    """Raises ValueError unless `fence` is a fence word that `device` can read."""
    if fence.dtype != torch.int64 or fence.shape != (1,) or fence.device != device:
        raise ValueError(f"fence must be int64 [1] on {device}; got {fence.dtype} {list(fence.shape)}")


def _plan(
    source: PoolSlice, target: PoolSlice, fence: torch.Tensor, ticket: int, check: Check | None
) -> _Move | None:
    """Checks the arguments; returns None when there is nothing to move."""
    here, mine = _measure(source)
    there, theirs = _measure(target)
    if mine != theirs:
        raise ValueError(
            f"(layers, planes of each, heads, tokens, head_dim, element bytes) differ: source {mine}, "
            f"target {theirs}"
        )
    check_fence(fence, source.pool.device)
    if not (here.planes and here.row_bytes and source.slots.shape[0]):
        return None
    return _Move(source, target, fence, ticket, (here, there), check)


def _measure(place: PoolSlice) -> tuple[Rows, tuple[int, ...]]:
    """Checks a slice; returns its rows and its sizes, which must be equal on both sides."""
    tensor, slots = place.tensor, place.slots
    rows = rows_of(tensor, place.layers, place.heads, gaps=True)
    check_slots(slots, tensor)
    _, planes, _, _, head_dim = tensor.shape
    heads = len(place.heads)
    return rows, (len(place.layers), planes, heads, slots.shape[0], head_dim, tensor.element_size())


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens",
        "source_plane_words",
        "target_plane_words",
        "ticket",
        "first_plane",
        "first_token",
        "first_unit",
    ],
    do_not_specialize_on_alignment=["source_slots", "target_slots", "fence"],
)
def _move_kernel(  # type: ignore[no-untyped-def]
    # tensors
    source,
    source_slots,
    target,
    target_slots,
    fence,
    parts,
    # sizes
    tokens,
    source_plane_words,
    target_plane_words,
    ticket,
    first_plane,
    first_token,
    first_unit,
    # meta
    SOURCE_TOKEN_WORDS: tl.constexpr,  # noqa: N803
    TARGET_TOKEN_WORDS: tl.constexpr,  # noqa: N803
    ROW_WORDS: tl.constexpr,  # noqa: N803
    VECTOR_WORDS: tl.constexpr,  # noqa: N803
    PLANE_STEP: tl.constexpr,  # noqa: N803
    UNIT_BYTES: tl.constexpr,  # noqa: N803
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
    # The compiler cannot infer the alignment of an indirect row and would emit scalar accesses.
    from_row = tl.multiple_of(plane * source_plane_words + from_slot * SOURCE_TOKEN_WORDS, VECTOR_WORDS)
    to_row = tl.multiple_of(plane * target_plane_words + to_slot * TARGET_TOKEN_WORDS, VECTOR_WORDS)
    mask = inside[:, None] & (word < ROW_WORDS)[None, :]
    words = tl.load(
        source + from_row[:, None] + word[None, :], mask=mask, other=0, eviction_policy="evict_first"
    )
    # Volatile: reads the current value from the other GPU's memory.
    allowed = tl.where(tl.load(fence, volatile=True) == ticket, tokens, 0)
    mask = (token < allowed)[:, None] & (word < ROW_WORDS)[None, :]
    tl.store(target + to_row[:, None] + word[None, :], words, mask=mask, cache_modifier=".cs")
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


def _prepared(planned: _Move) -> Callable[[], None]:
    source, target, check = planned.source, planned.target, planned.check
    here, there = planned.rows
    from_slots, to_slots, head_bytes, planes = (
        source.slots,
        target.slots,
        source.head_bytes,
        source.pool.shape[1],
    )
    tokens, word = from_slots.shape[0], planned.word_bytes
    parts = None if check is None else check.summer.parts
    addresses = (
        here.start,
        from_slots.data_ptr(),
        there.start,
        to_slots.data_ptr(),
        planned.fence.data_ptr(),
        None if parts is None else parts.data_ptr(),
    )
    sizes = (
        tokens,
        here.plane_bytes // word,
        there.plane_bytes // word,
        planned.ticket,
        *(NO_SIZES if check is None else check.sizes(planes, head_bytes)),
    )

    def tensors() -> tuple[torch.Tensor | None, ...]:
        mine, theirs = planned.words()
        return mine, from_slots, theirs, to_slots, planned.fence, parts

    types = (word, from_slots.dtype, to_slots.dtype, check is None)
    found = _launcher(from_slots.device, types, here, there, planes, head_bytes, planned.aligned)
    launch = found.prepare(tokens, addresses, sizes, tensors)
    if check is None:
        return launch

    def run() -> None:
        launch()
        check.finish()

    return run


@lru_cache(maxsize=_KEPT)
def _launcher(
    device: torch.device,
    types: tuple[object, ...],
    here: Rows,
    there: Rows,
    planes: int,
    head_bytes: int,
    aligned: int,
) -> Launcher:
    """Returns the launcher for rectangles `here` and `there`. Cached, because all chunks of a link share a few."""
    word, *_, unchecked = types
    assert isinstance(word, int), "the first type is the size of a word"
    row_words = here.row_bytes // word
    constants = (
        here.token_bytes // word,
        there.token_bytes // word,
        row_words,
        aligned // word,
        2 // planes,
        unit_bytes(head_bytes),
    )
    tile = _TILE if unchecked else _SUMMED_TILE
    return launcher(_move_kernel, device, types, here.planes, row_words, constants, tile)


def _move_torch(planned: _Move) -> None:
    mine, theirs = planned.words()
    moved = mine.index_select(2, planned.source.slots)
    if int(planned.fence[0]) == planned.ticket:
        theirs.index_copy_(2, planned.target.slots.long(), moved)
    if planned.check is not None:
        planned.check.sum_words(moved, planned.source.head_bytes)
