"""A 64-bit checksum of a segment's bytes, computed by the kernels that move the bytes.

The bytes are divided into units of four bytes (fewer if a head's size is not a multiple of four). Each unit is
multiplied by an odd 64-bit key, and the products are added modulo 2^64. The key depends on the unit's position in the
model: layer, plane, token, head, offset in the head. The checksum is therefore independent of TP sizes, page sizes
and order of work, and the checksums of two segments add up to the checksum of both together.

A change within one unit always changes the sum, because the key is odd. Two changes cancel with a probability of
about 2^-32. Bytes at a wrong position are detected, because each position has a different key. The checksum detects
damage but not forgery; encryption protects against forgery. Multiplication by keys and summation follow Carter and
Wegman (1979).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device

SUM_BYTES = 8
"""Size of a checksum."""
_UNIT_BYTES = 4
_PARTS = 256
"""Number of partial sums, which spread the atomic additions of a launch."""
_COLUMN, _TOKEN, _PLANE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_COLUMN_KEY, _TOKEN_KEY, _PLANE_KEY = tl.constexpr(_COLUMN), tl.constexpr(_TOKEN), tl.constexpr(_PLANE)


def _signed(key: int) -> int:
    """Returns the lower 64 bits as a number that torch's int64 holds."""
    return (key + (1 << 63)) % (1 << 64) - (1 << 63)


_SIGNED_COLUMN, _SIGNED_TOKEN, _SIGNED_PLANE = map(_signed, (_COLUMN, _TOKEN, _PLANE))
_PART_COUNT = tl.constexpr(_PARTS)
_LOW = 0xFFFFFFFF
_INT32_MAX = 2**31 - 1
_WORD_SHAPE = torch.Size((1,))
_CACHED_UNITS = 1 << 15
_KEPT_ROWS = 1 << 12
"""Largest number of rows whose keys are kept."""
_LOW_BITS = tl.constexpr(_LOW)
_EVEN = tl.constexpr(0xFFFFFFFFFFFFFFFE)


class Origin(NamedTuple):
    """Start of a segment. Layer and head are numbered within the whole model, not within a rank."""

    layer: int
    """Layer in the cache's numbering, as in `Segment.layers`."""
    token: int
    """Position in the prompt."""
    head: int
    """KV head in the model's numbering."""


class Summer:
    """Scratch memory for checksums on one stream of a device. Only work on that stream may use the scratch memory."""

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.zeros(_PARTS, dtype=torch.int64, device=device)
        """Partial sums, int64 `[_PARTS]`, zero between launches."""
        self._compiled: dict[tuple[bool, bool], Any] = {}
        """Compiled kernels. The key is Triton's specialization: whether a sum is subtracted, and whether the seed
        needs 64 bits."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # finishes the zeros before other streams add

    def finish(self, total: torch.Tensor, less: torch.Tensor | None, seed: int) -> None:
        """Launches the kernel that completes a checksum: sets `total` to the sum of all parts plus `seed`, minus
        `less`, and resets the parts to zero.
        """
        variant = (less is None, seed > _INT32_MAX)
        with on_device(self.parts):
            compiled = self._compiled.get(variant)
            if compiled is None:
                self._compiled[variant] = _finish_kernel[(1,)](
                    self.parts, total, less, seed, _PARTS, num_warps=8
                )
            else:  # a direct launch; Triton's launcher takes 17 us to look up a compiled kernel
                address = None if less is None else less.data_ptr()
                compiled[1, 1, 1](self.parts.data_ptr(), total.data_ptr(), address, seed, _PARTS)


@dataclass(slots=True, eq=False)  # not frozen: construction would take three times as long
class Check:
    """Requests the checksum of the bytes that a copy moves. Immutable by convention."""

    summer: Summer
    origin: Origin
    total: torch.Tensor
    """int64 `[1]`, on the copy's device or in pinned host memory: receives the checksum plus `seed`, minus `less`."""
    less: torch.Tensor | None = None
    """Checksum to subtract, int64 `[1]` on the copy's device; None: nothing."""
    seed: int = 0
    """Number that is added to the checksum; 0 to 2^63 - 1. With a different seed for each message, a receiver can
    distinguish the message from zeroed memory and from earlier messages."""

    def __post_init__(self) -> None:
        _check_word("total", self.total)
        if self.less is not None:
            _check_word("less", self.less)

    def sizes(self, planes: int, head_bytes: int) -> tuple[int, int, int]:
        """Returns the numbers, in the model's numbering, of the first plane, the first token and the first unit.

        The pool has `planes` planes per layer. Plane numbers count two planes for every layer, even if it has only
        one.
        """
        units = head_bytes // unit_bytes(head_bytes)
        return 2 * self.origin.layer, self.origin.token, self.origin.head * units

    def finish(self) -> None:
        """Launches the computation of `total`. The copy kernel must have been launched before, with the summer's
        parts."""
        self.summer.finish(self.total, self.less, self.seed)

    def sum_words(self, words: torch.Tensor, head_bytes: int) -> None:
        """Sets `total` to the checksum of rows, in plain torch.

        `words`: the rows, contiguous `[layers, planes, tokens, words of a row]`.
        """
        layers, planes, tokens, _ = words.shape
        unit = unit_bytes(head_bytes)
        first_plane, first_token, first_unit = self.sizes(planes, head_bytes)
        units = _units(words.flatten(0, 2).view(torch.uint8), unit)
        places = _row_places(layers * planes, 2 // planes, tokens, words.device)
        row = _mixed(places + _signed(first_token * _TOKEN + first_plane * _PLANE)) & ~1
        column = _columns(first_unit, units.shape[1], words.device)
        found = _sum(units, (1 << 8 * unit) - 1, row, column) + self.seed
        self.total.copy_(found if self.less is None else found - self.less)


NO_SIZES = (0, 0, 0)
"""Placeholder for `Check.sizes` in launches without a checksum."""


def unit_bytes(head_bytes: int) -> int:
    """Returns the size of a unit, which has one key, in bytes. Both sides of a transfer have the same units, because
    their heads have the same size."""
    return min(_UNIT_BYTES, head_bytes & -head_bytes)


@triton.jit
def row_keys(plane, token):  # type: ignore[no-untyped-def]
    """Returns an even key for the row of each token, `[n]`, in `plane`."""
    key = token.to(tl.uint64) * _TOKEN_KEY + plane.to(tl.uint64) * _PLANE_KEY
    return (key ^ (key >> 32)) & _EVEN


@triton.jit
def unit_keys(unit):  # type: ignore[no-untyped-def]
    """Returns an odd key for each unit number, `[n]`. XOR with a row's even key leaves the key odd."""
    key = unit.to(tl.uint64) * _COLUMN_KEY
    return (key ^ (key >> 32)) | 1


@triton.jit  # type: ignore[untyped-decorator]
def words_sum(words, rows, word, first_unit, UNIT_BYTES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Returns the checksum of a tile of words `[tokens, words]`, int64 scalar; masked words must be 0.

    `rows` is the checksum key of each token's row, `word` is each column's index in its row. A word has the size of
    two units, one unit, or a part of a unit.
    """
    WORD_BYTES: tl.constexpr = words.dtype.primitive_bitwidth // 8  # noqa: N806
    if WORD_BYTES > UNIT_BYTES:
        bits = words.to(tl.uint64, bitcast=True)
        low = unit_keys(first_unit + 2 * word)
        high = unit_keys(first_unit + 2 * word + 1)
        terms = (bits & _LOW_BITS) * (rows[:, None] ^ low[None, :])
        terms += (bits >> 32) * (rows[:, None] ^ high[None, :])
    else:
        PIECES: tl.constexpr = UNIT_BYTES // WORD_BYTES  # noqa: N806
        MASK: tl.constexpr = (1 << (8 * WORD_BYTES)) - 1  # noqa: N806
        shift = (word % PIECES * (8 * WORD_BYTES)).to(tl.uint64)
        bits = (words.to(tl.int64) & MASK).to(tl.uint64) << shift[None, :]
        terms = bits * (rows[:, None] ^ unit_keys(first_unit + word // PIECES)[None, :])
    return tl.sum(terms.to(tl.int64, bitcast=True))


@triton.jit
def add_part(parts, part):  # type: ignore[no-untyped-def]
    """Adds a program's sum to one of the partial sums, selected by the program's number."""
    number = tl.program_id(0) + 7 * tl.program_id(1) + tl.program_id(2)
    tl.atomic_add(parts + number % _PART_COUNT, part, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def add_tile(  # type: ignore[no-untyped-def]
    parts,
    words,
    first_plane,
    first_token,
    first_unit,
    PLANE_STEP: tl.constexpr,  # noqa: N803
    UNIT_BYTES: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_WORDS: tl.constexpr,  # noqa: N803
):
    """Adds the checksum of this program's tile `[BLOCK_TOKENS, BLOCK_WORDS]` to the parts; for the tile, see
    `kernels.copy.layout.tile`."""
    plane = first_plane + tl.program_id(1).to(tl.int64) * PLANE_STEP
    token = first_token + tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    add_part(parts, words_sum(words, row_keys(plane, token), word, first_unit, UNIT_BYTES))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["seed"], do_not_specialize_on_alignment=["total", "less"]
)
def _finish_kernel(parts, total, less, seed, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = parts + tl.arange(0, PARTS)
    found = tl.sum(tl.load(place)) + seed
    if less is not None:
        found -= tl.load(less)
    tl.store(place, tl.zeros((PARTS,), tl.int64))
    tl.store(total, found)


def _check_word(name: str, word: torch.Tensor) -> None:
    if word.dtype is not torch.int64 or word.shape != _WORD_SHAPE:
        raise ValueError(f"{name} must be int64 [1]; got {word.dtype} {list(word.shape)}")


def _sum(units: torch.Tensor, mask: int, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Returns the checksum of units `[rows, units]` with the keys `row` and `column`, int64 `[1]`.

    Integers of torch wrap around on overflow, like those of the kernels. The sum is computed in parts that fit a
    core's cache, which is five times as fast.
    """
    step = max(1, _CACHED_UNITS // units.shape[1])
    if len(units) <= step:
        return _part_sum(units, mask, row, column)[None]
    parts = zip(torch.split(units, step), torch.split(row, step), strict=True)
    sums = [_part_sum(part, mask, key, column) for part, key in parts]
    return torch.stack(sums).sum(dim=0, keepdim=True)


def _part_sum(units: torch.Tensor, mask: int, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return units.long().bitwise_and_(mask).mul_(row[:, None] ^ column).sum()


def _row_places(planes: int, step: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Returns the keys, before they are mixed, of the rows of plane 0 and token 0 on, int64 `[planes * tokens]`.

    Plane numbers increase by `step`. Short results on a CPU are cached; see `_columns`.
    """
    kept = device.type == "cpu" and planes * tokens <= _KEPT_ROWS
    return (_kept_places if kept else _computed_places)(planes, step, tokens, device)


def _computed_places(planes: int, step: int, tokens: int, device: torch.device) -> torch.Tensor:
    plane = torch.arange(planes, device=device)[:, None] * _signed(step * _PLANE)
    return (plane + torch.arange(tokens, device=device) * _SIGNED_TOKEN).flatten()


_kept_places = functools.lru_cache(maxsize=64)(_computed_places)


def _columns(first_unit: int, units: int, device: torch.device) -> torch.Tensor:
    """Returns the keys of a row's units, int64 `[units]`.

    Short results on a CPU are cached, because a pool has few different rows. On a GPU, another stream could read
    cached keys before they are written.
    """
    kept = device.type == "cpu" and units <= _CACHED_UNITS
    return (_kept_columns if kept else _computed_columns)(first_unit, units, device)


def _computed_columns(first_unit: int, units: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(first_unit, first_unit + units, device=device)
    return _mixed(places * _SIGNED_COLUMN) | 1


_kept_columns = functools.lru_cache(maxsize=64)(_computed_columns)


def _units(rows: torch.Tensor, unit: int) -> torch.Tensor:
    """Returns a view of bytes `[rows, bytes]` as units `[rows, units]` of a signed type, or a copy if not aligned."""
    if unit == 1:
        return rows
    if rows.storage_offset() % unit:
        rows = rows.clone()  # `view` requires an aligned start
    return rows.view({4: torch.int32, 2: torch.int16}[unit])


def _mixed(key: torch.Tensor) -> torch.Tensor:
    return key ^ (key >> 32 & _LOW)
