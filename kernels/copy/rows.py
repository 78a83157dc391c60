"""Addresses and strides of a rectangle of layers and heads in a pool. They are equal for all copies of the rectangle,
and therefore cached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from disagg.core.types import Span
from kernels.copy.checksum import Check, unit_bytes
from kernels.copy.launch import VECTOR_BYTES
from kernels.copy.layer_pool import Pool, one_tensor

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_KEPT = 4096
"""Largest number of cached rectangles. A rank needs one for each pool (including peers' pools), layer group and
route."""


_PLANES = (1, 2)
"""Planes of a layer: one with K and V or with keys only, or two with K and V."""


class PoolSlice(NamedTuple):
    """Layers, heads and slots of a pool that a copy reads or writes."""

    pool: Pool
    """The pool `[layers, planes, slots, heads, head_dim]`, contiguous or of separate layers; a plane is K, or V, or
    both."""
    slots: torch.Tensor
    """Slots of the tokens, int32 or int64 `[tokens]`, each within the pool (not checked); on the device that runs the
    kernel."""
    layers: Span
    heads: Span
    """KV heads of the rectangle. Layers and heads are local to the pool."""

    @property
    def tensor(self) -> torch.Tensor:
        """The pool as one contiguous tensor. Raises ValueError for separate layers."""
        return one_tensor(self.pool)

    @property
    def head_bytes(self) -> int:
        """Size of one head of a token in a plane, in bytes."""
        return self.pool.shape[4] * self.pool.element_size()


@dataclass(frozen=True, slots=True)
class Rows:
    """Position of a rectangle's rows in memory. A row has the contiguous elements of one plane and token. All fields
    but `planes` are bytes or addresses."""

    planes: int
    start: int
    """Address of the first plane's first row."""
    first_bytes: int
    """Offset of a token's row within its slot."""
    row_bytes: int
    """Length of a row; 0 without heads."""
    token_bytes: int
    """Distance between slots, in bytes."""
    plane_bytes: int
    """Distance between planes, in bytes."""
    aligned: int
    """Largest power of two, at most 16, that divides all fields above and the tensor's storage offset in bytes."""


def rows_of(pool: torch.Tensor, layers: Span, heads: Span, *, gaps: bool = False) -> Rows:
    """Returns the rows of `pool`, contiguous `[layers, planes, slots, heads, head_dim]`; `layers` and `heads`
    are local. With `gaps`, a pool of one plane may also be a view of the same part of each slot of a larger pool.

    Raises ValueError for a pool of another shape, and for layers and heads outside of the pool.
    """
    size = pool.element_size()
    offset_bytes = int(pool.storage_offset()) * size  # `Tensor.view(dtype)` requires an aligned offset
    strides = (0, 0)
    if not pool.is_contiguous():
        if not (gaps and _has_whole_slots(pool)):
            raise _shape_error(tuple(pool.shape), f", strides {list(pool.stride())}")
        strides = (pool.stride(0) * size, pool.stride(2) * size)
    return _rows(pool.data_ptr(), offset_bytes, pool.shape, size, layers, heads, strides)


def view_words(pool: torch.Tensor, rows: Rows, layers: Span, word_bytes: int) -> torch.Tensor:
    """Returns a view `[layers, planes, slots, words of a row]` of the pool with only the rectangle's layers
    and heads."""
    first, size = rows.first_bytes // pool.element_size(), pool.element_size()
    elements = pool[layers.start : layers.stop].flatten(3)[..., first : first + rows.row_bytes // size]
    return elements.view(torch.uint8).view(WORDS[word_bytes])


def alignment(*quantities: int) -> int:
    """Returns the largest power of two, at most 16, that divides all the quantities (bytes, addresses)."""
    merged = VECTOR_BYTES
    for quantity in quantities:
        merged |= quantity
    return merged & -merged


def check_slots(slots: torch.Tensor, pool: Pool) -> None:
    """Raises ValueError unless `slots` has the type and shape of slots and the pool's device. Values are not
    checked."""
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(
            f"slots must be contiguous int32 or int64 [tokens]; got {slots.dtype} {list(slots.shape)}"
        )
    if slots.device != pool.device:
        raise ValueError(f"slots must be on the pool's device {pool.device}; got {slots.device}")


def check_pages(pool: torch.Tensor, page_size: int, **lists: torch.Tensor) -> None:
    """Raises ValueError unless `page_size` fits the pool, and `lists` are integer tensors of one length and type.

    `lists`: the tensors, with the names used in errors. Values are not checked.
    """
    if not 1 <= page_size <= pool.shape[2]:
        raise ValueError(f"page_size must be 1 to the pool's {pool.shape[2]} slots; got {page_size}")
    first = next(iter(lists.values()))
    for name, numbers in lists.items():
        kinds = numbers.dtype in (torch.int32, torch.int64) and numbers.dtype == first.dtype
        if numbers.shape != (first.numel(),) or not kinds or not numbers.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 or int64 [copies], as many and of the same type on both sides; "
                f"got {numbers.dtype} {list(numbers.shape)}"
            )
        if numbers.device != pool.device:
            raise ValueError(f"{name} must be on the pool's device {pool.device}; got {numbers.device}")


def word_bytes(aligned: int, check: Check | None, head_bytes: int) -> int:
    """Returns the size of the words in which rows are moved, in bytes.

    With a check, a word has one unit if units have fewer than four bytes.
    """
    unit = unit_bytes(head_bytes)
    return min(aligned, 8 if check is None or unit == 4 else unit)


def check_staged(staged: torch.Tensor, pool: Pool, expected: int, name: str) -> None:
    """Raises ValueError unless `staged` is uint8 memory of `expected` bytes on the pool's device.

    `name`: the tensor's name in errors.
    """
    if staged.dim() != 1 or staged.dtype != torch.uint8 or not staged.is_contiguous():
        raise ValueError(f"{name} must be contiguous uint8 [bytes]; got {staged.dtype} {list(staged.shape)}")
    if staged.device != pool.device:
        raise ValueError(f"{name} must be on the pool's device {pool.device}; got {staged.device}")
    if staged.shape[0] != expected:
        raise ValueError(f"{name} must have exactly the segment's {expected} bytes; got {staged.shape[0]}")


@lru_cache(maxsize=_KEPT)
def _rows(
    address: int,
    offset_bytes: int,
    shape: tuple[int, ...],
    element_bytes: int,
    layers: Span,
    heads: Span,
    strides: tuple[int, int],
) -> Rows:
    """`strides`: distance between planes and between slots, in bytes; zeros for a contiguous pool."""
    if len(shape) != 5 or shape[1] not in _PLANES:
        raise _shape_error(shape)
    for axis, what, span in ((0, "layers", layers), (3, "heads", heads)):
        if not Span(0, shape[axis]).covers(span):
            raise ValueError(
                f"{what} [{span.start}, {span.stop}) is outside the pool's {shape[axis]} {what}; "
                "pass indices local to the pool"
            )
    head_bytes = shape[4] * element_bytes
    token_bytes, first_bytes = strides[1] or shape[3] * head_bytes, heads.start * head_bytes
    row_bytes, plane_bytes = len(heads) * head_bytes, strides[0] or shape[2] * token_bytes
    return Rows(
        planes=shape[1] * len(layers),
        start=address + shape[1] * layers.start * plane_bytes + first_bytes,
        first_bytes=first_bytes,
        row_bytes=row_bytes,
        token_bytes=token_bytes,
        plane_bytes=plane_bytes,
        aligned=alignment(row_bytes, token_bytes, plane_bytes, first_bytes, address, offset_bytes),
    )


def _has_whole_slots(pool: torch.Tensor) -> bool:
    """Returns whether the heads of each slot are adjacent, in a pool of one plane."""
    return pool.dim() == 5 and pool.shape[1] == 1 and pool[0, 0, 0].is_contiguous()


def _shape_error(shape: tuple[int, ...], more: str = "") -> ValueError:
    return ValueError(
        f"pool must be contiguous [layers, 1 or 2, slots, heads, head_dim]; got {list(shape)}{more}"
    )
