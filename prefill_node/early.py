"""Stores chunks that are computed before their ticket arrives, while the destination of their KV is unknown.

The KV of a request without a ticket stays in its pages, with an event for each layer group. When the ticket arrives,
`prefill_node.chunks` cuts the chunks and sends the layers computed so far. Layers of a running step follow when they
are computed.
"""

from __future__ import annotations

from typing import NamedTuple

from disagg.core.errors import InvariantError
from disagg.core.types import RequestKey, Span
from disagg.node.device import DeviceEvent
from prefill_node.step_part import PlannedChunk, StepPart


class ReadyLayers(NamedTuple):
    """A span of layers, numbered over the whole model, whose KV is written once `event` is done on the device."""

    layers: Span
    event: DeviceEvent


class EarlyChunks:
    """Chunks without a ticket on one prefill rank. Owned by the transfer thread."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[RequestKey, int], list[PlannedChunk]] = {}
        """Chunks without a ticket, by request and reservation."""
        self._ready: dict[StepPart, list[ReadyLayers]] = {}
        """Layers computed so far, for each part of a step that has a chunk without a ticket."""

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, chunk: PlannedChunk) -> None:
        """Adds a chunk that has no ticket. Called before any layer of the chunk is computed."""
        self._chunks.setdefault((chunk.key, chunk.reservation), []).append(chunk)
        self._ready.setdefault(chunk.part, [])

    def layers_ready(self, part: StepPart, ready: ReadyLayers) -> None:
        """Records computed layers, if `part` has a chunk without a ticket."""
        if part in self._ready:
            self._ready[part].append(ready)

    def take(self, key: RequestKey, reservation: int) -> list[tuple[PlannedChunk, list[ReadyLayers]]]:
        """Removes and returns the chunks of a reservation, in order, each with its layers computed so far."""
        chunks = self._chunks.pop((key, reservation), [])
        taken = [(chunk, list(self._ready[chunk.part])) for chunk in chunks]
        left = self._parts()
        for chunk in chunks:
            if chunk.part not in left:
                self._ready.pop(chunk.part, None)
        return taken

    def check(self) -> None:
        """Raises `InvariantError` unless layers are recorded for exactly the parts with chunks without a ticket."""
        if self._parts() != set(self._ready):
            raise InvariantError(f"layers are recorded for {set(self._ready)}, chunks for {self._parts()}")

    def _parts(self) -> set[StepPart]:
        return {chunk.part for chunks in self._chunks.values() for chunk in chunks}
