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
    """The positions before a prompt's first chunk, by a prefix cache hit."""
    STATE = "state"
    """The recurrent state after a prompt's last position; its position is the next one."""


class StepPart(NamedTuple):
    """One kind of KV of one step: the unit that becomes ready together."""

    step: int
    part: Part


class PlannedChunk(NamedTuple):
    """Positions of one request that `part` makes ready."""

    part: StepPart
    key: RequestKey
    reservation: int
    """Number of the reservation of the pages that hold the positions; see `disagg.node.plan.Work`."""
    positions: Span
    early: bool = False
    """Whether the request had no ticket when the step was planned."""
