"""Which prefill and which decode group serve a request. Pure functions over what the router knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.core.config import PolicyName
from disagg.core.errors import BusyError
from disagg.core.types import GroupInfo


@dataclass(slots=True)
class Engine:
    """A group as the router sees it. The session keeps the counts up to date."""

    group: GroupInfo
    requests: int = 0
    """Requests of this router that are with the group now."""
    tokens: int = 0
    """Prompt tokens of those requests: what a prefill group has before it, roughly."""
    served: int = 0
    """Requests that it was ever given."""
    lost: bool = False
    draining: bool = False
    """It finishes what it has and is given nothing new."""
    room: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one session that asks a decode group for room: who came first is served first."""


Policy = Callable[[Sequence[Engine]], Engine]
"""Chooses one of the engines of a kind. Raises `BusyError` when none can be given a request."""


def least_loaded(engines: Sequence[Engine]) -> Engine:
    """The engine with the fewest prompt tokens before it, then the fewest requests, then the first."""
    return min(_usable(engines), key=lambda engine: (engine.tokens, engine.requests))


def round_robin(engines: Sequence[Engine]) -> Engine:
    """Each in turn: the engine that was given the fewest requests, then the first."""
    return min(_usable(engines), key=lambda engine: engine.served)


POLICIES: dict[PolicyName, Policy] = {"least_loaded": least_loaded, "round_robin": round_robin}


def _usable(engines: Sequence[Engine]) -> list[Engine]:
    usable = [engine for engine in engines if not engine.lost and not engine.draining]
    if not usable:
        roles = sorted({engine.group.role for engine in engines}) or ["any"]
        raise BusyError(f"no {'/'.join(roles)} group is up", retry_after_s=1.0)
    return usable
