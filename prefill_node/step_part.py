"""Parts of a step whose KV becomes ready together, and the chunks of requests in each part."""

from __future__ import annotations

import enum
from typing import NamedTuple

from disagg.core.types import RequestKey, Span


class Part(enum.Enum):
    """Kind of KV that a step sends."""

    CHUNK = "chunk"
    """The positions that the step computes."""
    CACHED = "cached"
    """The positions before a prompt's first chunk, whose KV a prefix cache hit provides."""
    STATE = "state"
    """The recurrent state after a prompt; it is sent as the position that follows the prompt's last position."""


class StepPart(NamedTuple):
    """All KV of one kind in one step: `layers_ready` reports complete layers for all chunks of a part at once."""

    step: int
    part: Part


class PlannedChunk(NamedTuple):
    """Positions of one request whose KV belongs to `part`."""

    part: StepPart
    key: RequestKey
    reservation: int
    """Number of the request's page reservation; each reservation of the request has a different number."""
    positions: Span
    early: bool = False
    """Whether the request had no ticket when the step was planned."""
    awaited: bool = False
    """Whether the decode group waits for each layer of the positions (`Work.awaited`)."""
