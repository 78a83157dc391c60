"""Recurrent states in vLLM's KV cache blocks: where each state lies in a block, and how ranks share it by heads.

A block of a recurrent layer holds the layer's state tensors one after the other: the window of a convolution, and the
state of a state space model or of linear attention. How ranks share them is that of vLLM's
`MambaStateShapeCalculator` and `derive_mamba_conv_split`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from disagg.core.errors import ConfigError
from disagg.core.types import GroupInfo, StateClass, can_share_heads, dtype_name


class StateTensor(NamedTuple):
    """One state tensor of a recurrent layer, as one rank holds it."""

    shape: tuple[int, ...]
    """Shape without the blocks."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in a block."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def channels_first(self) -> bool:
        """Whether the channels of a convolution's window are its first dimension; they are the larger one."""
        return len(self.shape) == 2 and self.shape[0] > self.shape[1]


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """What the recurrent layers of a KV cache group have in common."""

    kind: str
    """Name of the kind of layers in vLLM, such as `MAMBA2`."""
    tensors: tuple[StateTensor, ...]
    head_groups: int = 0
    """Groups of a Mamba-2 layer's heads in the whole model, which share B and C; 0 if not known."""
    replicated: bool = False
    """Whether each rank holds the whole state."""
    whole: bool = False
    """Whether only the layers' kernels know the order of elements in a state, as on a CPU."""

    def describe(self) -> str:
        """Returns what is equal in all engines that can exchange the states, whatever their numbers of ranks."""
        orders = ["channels first " if one.channels_first else "" for one in self.tensors]
        dtypes = [dtype_name(one.dtype) for one in self.tensors]
        tensors = [f"{order}{dtype}" for order, dtype in zip(orders, dtypes, strict=True)]
        return " ".join([self.kind, *tensors, *(["in whole blocks"] if self.whole else [])])


class BlockSection(NamedTuple):
    """Bytes of a block that form one class of recurrent states, with those of the group's other layers."""

    starts: tuple[int, ...]
    """Offsets within a block. Each offset of each layer counts as a layer of the class: a row of a window whose
    channels are adjacent has an offset of its own."""
    heads: int
    """Heads that the rank holds."""
    of_model: StateClass
    """The class of one layer of the whole model."""

    def planes(self, pages: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields a view `[blocks, 1, heads, head_bytes]` for each offset. `pages`: uint8 `[blocks, bytes]`."""
        for start in self.starts:
            part = pages[:, start : start + self.heads * self.of_model.head_bytes]
            yield torch.unflatten(part, 1, (self.heads, self.of_model.head_bytes)).unsqueeze(1)


def pages_of(name: str, cache: torch.Tensor, layers: RecurrentLayers, blocks: int) -> torch.Tensor:
    """Returns the view uint8 `[blocks, bytes]` of a recurrent layer's cache `[blocks, 1, 1, bytes]`.

    Raises ConfigError for another shape.
    """
    needed = sum(one.nbytes for one in layers.tensors)
    shape = list(cache.shape) if isinstance(cache, torch.Tensor) else type(cache).__name__
    fits = isinstance(cache, torch.Tensor) and cache.dim() == 4 and cache.dtype.itemsize == 1
    if not fits or shape[:3] != [blocks, 1, 1] or cache.shape[3] < needed or cache.stride(3) != 1:
        raise ConfigError(
            f"the recurrent state of {name} is {shape}, not int8 [{blocks}, 1, 1, {needed} or more]; DisaggConnector "
            "knows no other layout of recurrent states"
        )
    return cache[:, 0, 0].view(torch.uint8)


def check_exchange(own: GroupInfo, other: GroupInfo) -> None:
    """Raises ConfigError if groups of one model divide its recurrent states in ways that do not fit."""
    same = own.fingerprint == other.fingerprint and len(own.ranks) != len(other.ranks)
    if same and own.layout.states != other.layout.states:
        raise ConfigError(
            f"{own.name} has {len(own.ranks)} ranks and {other.name} {len(other.ranks)}, and DisaggConnector cannot "
            "divide the recurrent states of this model otherwise: both engines need the same tensor-parallel size"
        )


def sections_of(layers: RecurrentLayers, rank: int, ranks: int) -> list[BlockSection]:
    """Returns the sections of a layer's block on rank `rank` of `ranks`.

    Ranks share the states by heads where `layers` is of a kind whose heads are known. Otherwise the whole part of a
    rank is one head, and only engines with equally many ranks can exchange it.
    """
    found = None if layers.whole or layers.replicated else _by_heads(layers, ranks)
    if found is None or any(len(one.of_model.span(rank, ranks)) != one.heads for one in found):
        return list(_undivided(layers, 1 if layers.replicated else ranks))
    return found


def _undivided(layers: RecurrentLayers, parts: int) -> Iterator[BlockSection]:
    start = 0
    for tensor in layers.tensors:
        yield BlockSection(
            (start,), 1, StateClass(1, parts, tensor.nbytes, layer_heads=parts, layer_groups=parts)
        )
        start += tensor.nbytes


class _Heads(NamedTuple):
    """Division of a layer's states; numbers of a rank, except those of the whole model."""

    window: tuple[tuple[int, int, int], ...]
    """Heads or groups in the whole model, those of a rank, and channels of each, for each section of the window."""
    heads: int
    """Heads of the whole model."""
    groups: int
    """Groups of heads of the whole model."""


def _by_heads(layers: RecurrentLayers, ranks: int) -> list[BlockSection] | None:
    """Returns the sections of a window and a state that ranks share by heads; None for other states."""
    if len(layers.tensors) != 2 or len(layers.tensors[0].shape) != 2 or len(layers.tensors[1].shape) != 3:
        return None
    window, state = layers.tensors
    heads, head_rows, columns = state.shape
    channels, rows, size = max(window.shape), min(window.shape), window.dtype.itemsize
    divided = _division(layers, ranks, channels - heads * head_rows)
    if divided is None or not can_share_heads(divided.heads, divided.groups, ranks):
        return None
    of_layer = divided.heads, divided.groups
    found: list[BlockSection] = []
    starts: tuple[int, ...]
    at = 0
    for number, (total, own, width) in enumerate(divided.window):
        starts, head_bytes = (at * rows * size,), width * rows * size
        if not window.channels_first:
            starts, head_bytes = tuple((row * channels + at) * size for row in range(rows)), width * size
        part = StateClass(len(starts), total, head_bytes, number > 0, *of_layer)
        found.append(BlockSection(starts, own, part))
        at += own * width
    whole = StateClass(1, divided.heads, head_rows * columns * state.dtype.itemsize, False, *of_layer)
    return [*found, BlockSection((window.nbytes,), heads, whole)]


def _division(layers: RecurrentLayers, ranks: int, rest: int) -> _Heads | None:
    """`rest`: channels of a rank's window besides those of its heads: B and C, or queries and keys."""
    heads, head_rows, columns = layers.tensors[1].shape
    groups = rest // (2 * columns)
    if groups < 1 or rest != groups * 2 * columns:
        return None
    match layers.kind:
        case "MAMBA2":  # x, B, C; ranks that share a group hold copies of it
            total = groups if ranks == 1 else layers.head_groups
            if total < 1:
                return None
            shared = (total, groups, columns)
            return _Heads(((heads * ranks, heads, head_rows), shared, shared), heads * ranks, total)
        case "GDN_ATTN":  # q, k, v
            shared = (groups * ranks, groups, columns)
            return _Heads((shared, shared, (heads * ranks, heads, head_rows)), heads * ranks, groups * ranks)
    return None
