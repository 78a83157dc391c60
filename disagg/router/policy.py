"""Which prefill and which decode group serve a request. Pure functions over what the router knows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from disagg.core.config import PolicyName
from disagg.core.errors import BusyError
from disagg.core.prefixes import HeldPrefixes
from disagg.core.types import GroupInfo

SLACK = 16
"""A sixteenth of a prompt is too little to choose a group by: see `prefix_aware`."""
SESSION_LOAD = 1.25
"""A session's group may have so many times the mean of requests (c of Mirrokni et al.)."""


@dataclass(slots=True, eq=False)
class Engine:
    """A group as the router sees it. The session keeps the counts up to date."""

    group: GroupInfo
    requests: int = 0
    """Requests of this router that are with the group now; with a decode group, each sequence of them."""
    tokens: int = 0
    """Prompt tokens of those requests that it did not hold when it was chosen, as far as was known. A prefill group's
    only until the prompt is computed: what it has before it, roughly."""
    served: int = 0
    """Requests that it was ever given."""
    lost: bool = False
    draining: bool = False
    """It finishes what it has and is given nothing new."""
    held: HeldPrefixes = field(default_factory=HeldPrefixes)
    """Beginnings of prompts that it has cached; empty where nobody asks it."""
    room: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one session that asks a decode group for room: who came first is served first."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What a request is to a policy."""

    tokens: int
    """Of the prompt."""
    session: str = ""
    """Names what the client calls a conversation; empty: nothing."""
    marks: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    """The prompt's, by `unit_tokens` and `switch_tokens` of the groups that hold anything; see `HeldPrefixes`."""

    def missing_tokens(self, engine: Engine) -> int:
        """Tokens of the prompt that a group lacks, as far as is known; the last one always."""
        held = engine.held
        marks = self.marks.get((held.unit_tokens, held.switch_tokens), ())
        return max(1, self.tokens - held.longest_tokens(marks))


Policy = Callable[[Sequence[Engine], Asking], Engine]
"""Chooses one of the engines of a kind. Raises `BusyError` when none can be given a request."""


def least_loaded(engines: Sequence[Engine], asking: Asking) -> Engine:
    """The engine with the fewest prompt tokens before it, then the fewest requests, then the first."""
    return min(_usable(engines), key=lambda engine: (engine.tokens, engine.requests))


def round_robin(engines: Sequence[Engine], asking: Asking) -> Engine:
    """Each in turn: the engine that was given the fewest requests, then the first."""
    return min(_usable(engines), key=lambda engine: engine.served)


def prefix_aware(engines: Sequence[Engine], asking: Asking) -> Engine:
    """The engine with the fewest tokens before it and missing of the prompt; a session's decode group, if it has one.

    Engines that differ by a sixteenth of the prompt or less are alike: else a few common words at the beginning of
    all prompts would lead every request to the one group that has them, and the caches of others would stay empty.
    Of those the one with the fewest requests, then with the least cached, is chosen.
    """
    usable = _usable(engines)
    if asking.session and usable[0].group.role == "decode":
        return _of_session(usable, asking.session)
    costs = {engine: engine.tokens + asking.missing_tokens(engine) for engine in usable}
    most = min(costs.values()) + asking.tokens // SLACK
    alike = [engine for engine in usable if costs[engine] <= most]
    return min(alike, key=lambda e: (e.requests, len(e.held), costs[e], e.served))


POLICIES: dict[PolicyName, Policy] = {
    "prefix_aware": prefix_aware,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}


def _of_session(engines: Sequence[Engine], session: str) -> Engine:
    """Rendezvous hashing with bounded loads: the first in the session's own order of groups that is not too full.

    A group that comes or goes moves only sessions of its own, and a full one gives way to the next in the order
    (Thaler and Ravishankar 1998; Mirrokni, Thorup and Zadimoghaddam 2016).
    """
    order = sorted(engines, key=lambda e: xxhash.xxh3_64_intdigest(f"{e.group.name} {session}".encode()))
    full = math.ceil(SESSION_LOAD * (1 + sum(engine.requests for engine in engines)) / len(engines))
    return next(engine for engine in order if engine.requests < full)


def _usable(engines: Sequence[Engine]) -> list[Engine]:
    usable = [engine for engine in engines if not engine.lost and not engine.draining]
    if not usable:
        roles = sorted({engine.group.role for engine in engines}) or ["any"]
        raise BusyError(f"no {'/'.join(roles)} group is up", retry_after_s=1.0)
    return usable
