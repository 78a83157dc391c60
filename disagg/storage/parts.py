"""Parts of a page: the units in which groups of any tensor-parallel size store and read KV.

A part is a rectangle of layers x KV heads, small enough that every shard consists of whole parts. A group of 2
ranks can therefore read a page that a group of 4 ranks stored: each rank reads the parts of its own shard. The parts
of a recurrent state are single heads too, or whole tensors of layers that ranks cannot share by heads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, Shard, Span

_ENCODED = struct.Struct("<5I")


@dataclass(frozen=True, slots=True, order=True)
class PagePart:
    """Some layers and heads of one class of `KVLayout.all_classes`.

    The content of a stored part is contiguous `[layers, planes, page_size, heads, head_bytes]`; that of a state
    `[layers, heads, head_bytes]`.
    """

    class_index: int
    """Index in `KVLayout.all_classes`."""
    layers: Span
    """Global layer numbers."""
    heads: Span
    """Global KV heads; for a state, the indices of the first dimension of its tensors."""

    def encoded(self) -> bytes:
        """Returns the bytes that stand for the part in a key; only equal parts have equal bytes."""
        return _ENCODED.pack(
            self.class_index, self.layers.start, self.layers.stop, self.heads.start, self.heads.stop
        )


@dataclass(frozen=True, slots=True)
class PartGrid:
    """Cuts a model's KV and states into parts. Groups that share pages must use equal grids."""

    layout: KVLayout
    page_size: int
    """Tokens of a page."""
    unit_heads: int = 1
    """Heads of a part. Each rank's heads must be whole units; 1 suits every tensor-parallel size."""
    unit_layers: int = 0
    """Layers of a part, for groups with pipeline stages; 0: all layers of a class."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for sizes that do not divide the layout."""
        if self.page_size < 1 or self.unit_heads < 1 or self.unit_layers < 0:
            raise ConfigError(
                f"a page of {self.page_size} tokens in parts of {self.unit_heads} heads and {self.unit_layers} layers"
                " is empty"
            )
        for one in self.layout.classes:
            if one.kv_heads % self.unit_heads:
                raise ConfigError(
                    f"parts of {self.unit_heads} heads do not divide {one.kv_heads} KV heads: use a divisor"
                )
            if self.unit_layers and one.layers % self.unit_layers:
                raise ConfigError(
                    f"parts of {self.unit_layers} layers do not divide {one.layers} layers: use a divisor"
                )

    @property
    def kv_parts(self) -> tuple[PagePart, ...]:
        """The parts of a page, in the order of classes, layers and heads."""
        return tuple(part for index, _ in enumerate(self.layout.classes) for part in self._class_parts(index))

    @property
    def state_parts(self) -> tuple[PagePart, ...]:
        """The parts of a recurrent state; empty for a model without recurrent layers."""
        first = len(self.layout.classes)
        return tuple(
            part for index, _ in enumerate(self.layout.states, first) for part in self._class_parts(index)
        )

    def parts_of(self, shard: Shard) -> tuple[PagePart, ...]:
        """Returns the KV parts that a rank reads to fill its shard of a page.

        Raises `ConfigError` if the shard cuts through a part.
        """
        return self._held(shard.rank, shard.parts, 0)

    def states_of(self, shard: Shard) -> tuple[PagePart, ...]:
        """Returns the parts of a recurrent state that a rank reads. Raises `ConfigError` as `parts_of` does."""
        return self._held(shard.rank, shard.states, len(self.layout.classes))

    def parts_to_store(self, shards: Sequence[Shard], rank: int) -> tuple[PagePart, ...]:
        """Returns the KV parts that `rank` stores, so that the group stores each part once.

        With more ranks than KV heads, several ranks have the same part; only the lowest of them stores the part.
        Raises `ConfigError` as `parts_of` does.
        """
        return _first_held([self.parts_of(shard) for shard in shards[: rank + 1]])

    def states_to_store(self, shards: Sequence[Shard], rank: int) -> tuple[PagePart, ...]:
        """Returns the parts of a recurrent state that `rank` stores; see `parts_to_store`.

        Ranks that cannot share the recurrent layers hold whole states, which rank 0 stores.
        """
        return _first_held([self.states_of(shard) for shard in shards[: rank + 1]])

    def nbytes(self, part: PagePart) -> int:
        """Returns the size of a stored part in bytes."""
        one = self.layout.all_classes[part.class_index]
        tokens = 1 if part.class_index >= len(self.layout.classes) else self.page_size
        return len(part.layers) * one.planes * tokens * len(part.heads) * one.head_bytes

    def _held(self, rank: int, shards: Sequence[Shard], first: int) -> tuple[PagePart, ...]:
        """Returns the parts within a rank's `shards` of the classes `first`, `first + 1` and so on."""
        found: list[PagePart] = []
        for index, mine in enumerate(shards, first):
            touched = [
                part
                for part in self._class_parts(index)
                if part.layers.intersect(mine.layers) and part.heads.intersect(mine.heads)
            ]
            for part in touched:
                if not (mine.layers.covers(part.layers) and mine.heads.covers(part.heads)):
                    raise ConfigError(
                        f"rank {rank} has layers {mine.layers} and heads {mine.heads}, which cut through the "
                        f"stored part of layers {part.layers} and heads {part.heads}: store smaller parts"
                    )
            found += touched
        return tuple(found)

    def _class_parts(self, index: int) -> Iterator[PagePart]:
        number = index - len(self.layout.classes)
        if number >= 0:
            state, layers = self.layout.states[number], self.layout.state_spans[number]
            unit_heads = 1 if state.layer_heads else state.heads
            for head in range(0, state.heads, unit_heads):
                yield PagePart(index, layers, Span(head, head + unit_heads))
            return
        layers, heads = self.layout.spans[index], self.layout.classes[index].kv_heads
        step = self.unit_layers or len(layers)
        for first in range(layers.start, layers.stop, step):
            for head in range(0, heads, self.unit_heads):
                yield PagePart(index, Span(first, first + step), Span(head, head + self.unit_heads))


def _first_held(held: Sequence[Sequence[PagePart]]) -> tuple[PagePart, ...]:
    """Returns the parts in the last of `held` that are in none of the others."""
    earlier = {part for parts in held[:-1] for part in parts}
    return tuple(part for part in held[-1] if part not in earlier)
