"""Which prefill and which decode group serve a request. Pure functions over what the router knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.core.errors import BusyError
from disagg.core.types import GroupInfo


@dataclass(slots=True)
class Engine:
    """A group as the router sees it. The session keeps `requests` and `tokens` up to date."""

    group: GroupInfo
    requests: int = 0
    """Requests of this router that are with the group now."""
    tokens: int = 0
    """Prompt tokens of those requests: what a prefill group has before it, roughly."""
    lost: bool = False


def least_loaded(engines: Sequence[Engine]) -> Engine:
    """The engine with the fewest prompt tokens before it, then the fewest requests, then the first.

    Raises `BusyError` when no engine is left.
    """
    alive = [engine for engine in engines if not engine.lost]
    if not alive:
        roles = sorted({engine.group.role for engine in engines}) or ["any"]
        raise BusyError(f"no {'/'.join(roles)} group is up", retry_after_s=1.0)
    return min(alive, key=lambda engine: (engine.tokens, engine.requests))
