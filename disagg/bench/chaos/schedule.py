"""The schedule of faults: kind, time and victim of each fault, as a function of a seed. No I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, get_args

from disagg.core.config.read import Role
from disagg.core.errors import ConfigError

FaultKind = Literal["kill", "stop", "hang", "cut"]
"""Kind of a fault. `kill`: SIGKILL. `stop`: SIGSTOP, and SIGCONT after a time. `hang`: SIGSTOP without SIGCONT.
`cut`: a network that carries no packet in one or both directions for a time."""
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
CutWay = Literal["both", "forth", "back"]
"""Directions in which a cut network carries no packet."""
CUT_WAYS: tuple[CutWay, ...] = get_args(CutWay)
ROLES: tuple[Role, ...] = get_args(Role)

Victim = TypeVar("Victim")


class PlannedFault(NamedTuple):
    """One fault of a schedule."""

    number: int
    """Number of the fault, counted from 1."""
    kind: FaultKind
    share: float
    """Position of the victim in the list of ranks that run at the fault's time, as a share of the list in [0, 1)."""
    delay_s: float
    """Delay after full strength is reached again; with overlapping faults, delay after the previous fault."""
    stop_s: float
    """Time between SIGSTOP and SIGCONT of a `stop`; duration of a `cut`."""
    way: CutWay = "both"
    """Directions of a `cut`."""

    @property
    def duration_s(self) -> float | None:
        """Time after which the run ends a `stop` or a `cut`; None for other kinds, which it does not end."""
        return self.stop_s if self.kind in ("stop", "cut") else None

    def victim(self, ranks: Sequence[Victim]) -> Victim:
        """Returns the victim among `ranks`, which must not be empty."""
        return ranks[int(self.share * len(ranks))]


@dataclass(frozen=True)
class Schedule:
    """Settings of a schedule."""

    kinds: tuple[FaultKind, ...] = ("kill",)
    count: int = 10
    gap_s: float = 2.0
    """Mean of `PlannedFault.delay_s`, which is uniformly distributed."""
    stops_s: tuple[float, ...] = (1.0, 15.0)
    """Durations of a `stop`; each one is equally likely."""
    cuts_s: tuple[float, ...] = (1.0, 15.0)
    """Durations of a `cut`; each one is equally likely."""
    seed: int = 0
    roles: tuple[Role, ...] = ROLES
    """Roles of the groups whose ranks may be victims."""

    def faults(self) -> list[PlannedFault]:
        """Returns the faults in order. The kinds are shuffled and equally frequent (counts differ by at most one)."""
        draw = random.Random(self.seed)
        kinds = [self.kinds[number % len(self.kinds)] for number in range(self.count)]
        draw.shuffle(kinds)
        return [
            PlannedFault(
                number,
                kind,
                share=draw.random(),
                delay_s=2 * self.gap_s * draw.random(),
                stop_s=draw.choice(self.cuts_s if kind == "cut" else self.stops_s),
                way=draw.choice(CUT_WAYS) if kind == "cut" else "both",
            )
            for number, kind in enumerate(kinds, 1)
        ]


def parse_seconds(flag: str, text: str) -> tuple[float, ...]:
    """Parses a list of seconds such as `1,15`. Raises `ConfigError` that names `flag`."""
    try:
        seconds = tuple(float(part) for part in text.split(","))
    except ValueError:
        seconds = ()
    if not seconds or not 0 < min(seconds) <= max(seconds) < float("inf"):
        raise ConfigError(f"{flag} {text}: give seconds above 0, separated by commas, as 1,15")
    return seconds
