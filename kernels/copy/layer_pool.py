"""A KV pool of separate tensors, one for each layer or plane, as other engines allocate it."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch

from kernels.copy.launch import VECTOR_BYTES

Layer = Sequence[torch.Tensor]
"""The planes of one layer: K and V, or one plane; each a view `[blocks, block_size, heads, head_dim]`."""


class PlaneStrides(NamedTuple):
    """Distances within a plane, in bytes."""

    block: int
    token: int
    head: int


class LayerPool:
    """KV of a pool whose layers are separate tensors, addressed by slot like one contiguous pool.

    Slot `s` is token `s % block_size` of block `s // block_size`. Each plane is a view `[blocks, block_size, heads,
    head_dim]` with any strides, so NHD, HND, and K and V together or apart are all possible. The memory belongs to
    the caller, which keeps it alive and at its place as long as the pool is used.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        """Raises ValueError unless all planes have one shape, dtype, device and strides, with adjacent elements."""
        if not layers or not layers[0]:
            raise ValueError("a pool needs at least one layer with at least one plane")
        self.layers = tuple(tuple(layer) for layer in layers)
        """Planes of each layer."""
        self.planes = tuple(plane for layer in self.layers for plane in layer)
        """Planes of all layers, layer by layer."""
        first = self.planes[0]
        for number, layer in enumerate(self.layers):
            _check_layer(number, layer, first, len(self.layers[0]))
        self.blocks, self.block_size, heads, head_dim = first.shape
        self.shape = (len(layers), len(self.layers[0]), self.blocks * self.block_size, heads, head_dim)
        """Shape of the equivalent contiguous pool: `[layers, planes, slots, heads, head_dim]`."""
        self.dtype, self.device = first.dtype, first.device
        size = first.element_size()
        self.strides = PlaneStrides(*(stride * size for stride in first.stride()[:3]))
        starts = [plane.data_ptr() for plane in self.planes]
        offsets = [int(plane.storage_offset()) * size for plane in self.planes]
        self.aligned = gcd(VECTOR_BYTES, *starts, *offsets, *self.strides, head_dim * size)
        """Largest power of two, at most 16, that divides the position of every head in memory."""
        self.table = torch.tensor([start - starts[0] for start in starts], device=self.device)
        """Distance of each plane from the first one in bytes, int64 `[layers * planes]`."""

    def element_size(self) -> int:
        """Returns the bytes of an element."""
        return self.dtype.itemsize


Pool = torch.Tensor | LayerPool
"""A pool that gather and scatter accept."""


def one_tensor(pool: Pool) -> torch.Tensor:
    """Returns a pool that is one tensor. Raises ValueError for separate layers."""
    if isinstance(pool, LayerPool):
        raise ValueError(
            "this copy needs a pool of one contiguous tensor; a pool of separate layers only supports gather and "
            "scatter (set transport.peer_memory to false, and the same element type on both sides)"
        )
    return pool


def _check_layer(number: int, layer: Layer, first: torch.Tensor, planes: int) -> None:
    if len(layer) != planes or planes > 2:
        raise ValueError(f"layer {number} has {len(layer)} planes; all layers need the same number, 1 or 2")
    for plane in layer:
        if plane.dim() != 4 or 0 in plane.shape or plane.stride(3) != 1:
            raise ValueError(
                f"layer {number} must be views [blocks, block_size, heads, head_dim] with adjacent elements of a "
                f"head; got {list(plane.shape)}, strides {list(plane.stride())}"
            )
        same = plane.shape == first.shape and plane.stride() == first.stride()
        if not same or plane.dtype != first.dtype or plane.device != first.device:
            raise ValueError(
                f"layer {number} is {plane.dtype} {list(plane.shape)} with strides {list(plane.stride())} on "
                f"{plane.device}; the first layer is {first.dtype} {list(first.shape)} with strides "
                f"{list(first.stride())} on {first.device}"
            )
