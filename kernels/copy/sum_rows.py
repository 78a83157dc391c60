"""Computes the checksum of bytes in a pool, for comparison with the checksum from the kernel that wrote the bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.copy.checksum import Check, add_tile, unit_bytes
from kernels.copy.launch import SUMMED_TILE, launcher
from kernels.copy.rows import PoolSlice, Rows, check_slots, rows_of, view_words, word_bytes
from kernels.dispatch import backend


def sum_rows(place: PoolSlice, check: Check) -> None:
    """Sets `check.total` to the checksum of the bytes of `place`. Without any bytes, `check.total` stays unchanged.

    On CUDA: two launches on the current stream, no synchronization. The caller keeps pool, slots and the check's
    words alive until an event recorded after this call has completed. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    rows = _checked(place)
    if not (rows.planes and rows.row_bytes and place.slots.shape[0]):
        return
    if backend(place.tensor.device) == "triton":
        _launch(place, rows, check)
    else:
        _sum_torch(place, rows, check)


def sum_rows_reference(place: PoolSlice, check: Check) -> None:
    """Computes `sum_rows` in plain torch, on any device."""
    rows = _checked(place)
    if rows.planes and rows.row_bytes and place.slots.shape[0]:
        _sum_torch(place, rows, check)


def _checked(place: PoolSlice) -> Rows:
    check_slots(place.slots, place.tensor)
    return rows_of(place.tensor, place.layers, place.heads, gaps=True)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "plane_words", "first_plane", "first_token", "first_unit"],
    do_not_specialize_on_alignment=["slots"],
)
def _sum_kernel(  # type: ignore[no-untyped-def]
    # tensors
    pool,
    slots,
    parts,
    # sizes
    tokens,
    plane_words,
    first_plane,
    first_token,
    first_unit,
    # meta
    TOKEN_WORDS: tl.constexpr,  # noqa: N803
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
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int64)
    # The compiler cannot infer the alignment of an indirect row and would emit scalar accesses.
    row = tl.multiple_of(plane * plane_words + slot * TOKEN_WORDS, VECTOR_WORDS)
    mask = (token < tokens)[:, None] & (word < ROW_WORDS)[None, :]
    # The words stay in the cache, because the step that adds the request reads them next.
    words = tl.load(pool + row[:, None] + word[None, :], mask=mask, other=0)
    add_tile(
        parts, words, first_plane, first_token, first_unit, PLANE_STEP, UNIT_BYTES, BLOCK_TOKENS, BLOCK_WORDS
    )


def _launch(place: PoolSlice, rows: Rows, check: Check) -> None:
    head_bytes = place.head_bytes
    word = word_bytes(rows.aligned, check, head_bytes)
    row_words, planes, tokens = rows.row_bytes // word, place.tensor.shape[1], place.slots.shape[0]
    constants = (
        rows.token_bytes // word,
        row_words,
        rows.aligned // word,
        2 // planes,
        unit_bytes(head_bytes),
    )
    types = (word, place.slots.dtype)
    parts = check.summer.parts
    launcher(_sum_kernel, place.tensor.device, types, rows.planes, row_words, constants, SUMMED_TILE).run(
        tokens,
        (rows.start, place.slots.data_ptr(), parts.data_ptr()),
        (tokens, rows.plane_bytes // word, *check.sizes(planes, head_bytes)),
        lambda: (view_words(place.tensor, rows, place.layers, word), place.slots, parts),
    )
    check.finish()


def _sum_torch(place: PoolSlice, rows: Rows, check: Check) -> None:
    words = view_words(place.tensor, rows, place.layers, min(rows.aligned, 8))
    check.sum_words(words.index_select(2, place.slots), place.head_bytes)
