"""A head slice as NIXL descriptors: address, length and device of each contiguous piece. Integers only.

NIXL moves a list of contiguous pieces to a list of pieces with the same lengths. In a pool `[layers, 2, slots, heads,
head_dim]` a token's slice is contiguous. The next token's slice follows directly only if the slice covers all heads
of the pool. In this case a page is one piece; otherwise each token is a piece. SGLang's NIXL connector creates the
same pieces. When the groups' sizes differ, vLLM's connector needs a page's tokens of one head to be adjacent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.core.types import Shard

Array = npt.NDArray[np.int64]
"""An int64 array of slots, units or addresses. Docstrings give the shape."""
Descriptors = npt.NDArray[np.uint64]
"""`[descriptors, 3]`: address, bytes, device."""

DEVICE = 0
"""Device index in descriptors; each process sees only one device."""


@dataclass(frozen=True)
class PoolMemory:
    """Location of a rank's pool, for its peer: `[layers, sides, slots, heads, head_bytes]` at `address`."""

    address: int
    slots: int
    head_bytes: int
    sides: int
    """Number of planes of a layer (`KVLayout.planes`)."""
    shard: Shard
    """The layers and heads that the pool holds."""

    @property
    def row_bytes(self) -> int:
        """Bytes from one token to the next one in a plane of the pool."""
        return len(self.shard.heads) * self.head_bytes

    def planes(self, part: Shard) -> Array:
        """Returns `[layers * sides]`: the address of slot 0 of `part`'s heads, in each plane of each layer."""
        first_head = part.heads.start - self.shard.heads.start
        layers = np.arange(part.layers.start, part.layers.stop) - self.shard.layers.start
        planes = (layers[:, None] * self.sides + np.arange(self.sides)).ravel()
        return self.address + planes * (self.slots * self.row_bytes) + first_head * self.head_bytes


def is_whole(memories: tuple[PoolMemory, PoolMemory], part: Shard) -> bool:
    """Returns whether consecutive tokens of the part are contiguous in both pools."""
    return all(memory.shard.heads == part.heads for memory in memories)


def run_starts(slots: tuple[Array, Array]) -> Array:
    """Returns `[runs]`: the first index of each run of tokens that are adjacent in both pools. `slots`:
    `[tokens]` each."""
    breaks = (np.diff(slots[0]) != 1) | (np.diff(slots[1]) != 1)
    return np.concatenate([[0], np.flatnonzero(breaks) + 1])


def built(
    memories: tuple[PoolMemory, PoolMemory], part: Shard, slots: tuple[Array, Array]
) -> tuple[Descriptors, Descriptors]:
    """Returns one request's descriptors for source and destination, built for this request only.

    A piece is a run of adjacent tokens if the part is contiguous in both pools (`is_whole`), else one token. `slots`
    are the slots of the request's tokens, `[tokens]` for each side. Each result has the shape `[planes * pieces, 3]`,
    plane by plane.
    """
    tokens = len(slots[0])
    starts = run_starts(slots) if is_whole(memories, part) else np.arange(tokens)
    lengths = np.diff(starts, append=tokens) * (len(part.heads) * memories[0].head_bytes)
    source, destination = (
        _rows(memory.planes(part), side[starts] * memory.row_bytes, lengths)
        for memory, side in zip(memories, slots, strict=True)
    )
    return source, destination


def unit_tokens(
    memories: tuple[PoolMemory, PoolMemory], part: Shard, page_sizes: tuple[int, int], tokens: int
) -> int:
    """Returns the number of tokens of one piece in lists prepared for all requests.

    If consecutive tokens are contiguous in both pools, a piece has the largest number of tokens that divides both
    page sizes and the length of the request. Otherwise a piece is one token.
    """
    return math.gcd(*page_sizes, tokens) if is_whole(memories, part) else 1


def prepared(memory: PoolMemory, part: Shard, unit: int) -> Descriptors:
    """Returns descriptors of all pieces of a pool, `[planes * slots // unit, 3]`, from which `chosen` selects."""
    offsets = np.arange(memory.slots // unit) * (unit * memory.row_bytes)
    lengths = np.full(len(offsets), unit * len(part.heads) * memory.head_bytes)
    return _rows(memory.planes(part), offsets, lengths)


def chosen(memory: PoolMemory, part: Shard, slots: Array, unit: int) -> npt.NDArray[np.int32]:
    """Returns the indices in `prepared` of a request's pieces, `[planes * tokens // unit]`. `slots`: `[tokens]`."""
    planes = np.arange(memory.sides * len(part.layers)) * (memory.slots // unit)
    return (planes[:, None] + slots[::unit] // unit).astype(np.int32).ravel()


def _rows(planes: Array, offsets: Array, lengths: Array) -> Descriptors:
    found = np.empty((len(planes), len(offsets), 3), dtype=np.uint64)
    found[..., 0] = planes[:, None] + offsets
    found[..., 1] = lengths
    found[..., 2] = DEVICE
    return found.reshape(-1, 3)
