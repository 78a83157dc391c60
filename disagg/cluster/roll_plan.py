"""Decides the next action of a rolling replacement of groups (`disagg roll`). Pure functions.

    state of one role -> decide -> action -> (I/O elsewhere) -> state -> ...

A group is `new` if it has the settings of the roll, else `old`. The usual number of groups serves at any time, except
where no device is free: then one group is drained before its replacement starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.core.config.read import Role


@dataclass(frozen=True, slots=True)
class RollState:
    """Groups of one role during a roll."""

    role: Role
    wanted: int
    """Usual number of groups."""
    old: tuple[str, ...]
    """Names of the old groups that serve, the oldest first."""
    new: int
    """Number of new groups that serve."""
    restarting: int
    """Number of dead new groups that the supervisor will replace."""
    room: int
    """Number of further groups for which devices are free."""
    max_surge: int
    """Number of groups that may serve in addition to `wanted`."""
    allow_pause: bool = False
    """Whether the last serving group may be drained before its replacement starts."""
    stopped: bool = False
    """Whether the operator has stopped the roll."""

    @property
    def serving(self) -> int:
        """Number of groups that serve."""
        return len(self.old) + self.new

    @property
    def least_serving(self) -> int:
        """Smallest number of serving groups that an action of the roll may leave."""
        return max(self.wanted - 1, 0 if self.allow_pause else 1)


@dataclass(frozen=True, slots=True)
class StartNew:
    """Start `count` new groups."""

    count: int
    spare: bool
    """Whether the usual number of groups serves during the start, so that an operator may cancel it."""


@dataclass(frozen=True, slots=True)
class RetireOld:
    """Drain and end these old groups."""

    names: tuple[str, ...]
    first: bool
    """Whether the replacements start only afterwards, because no device is free."""


@dataclass(frozen=True, slots=True)
class AwaitRestart:
    """Wait until the supervisor has replaced a dead new group."""


@dataclass(frozen=True, slots=True)
class EndRoll:
    """End the roll of this role: complete if `error` is empty."""

    error: str = ""


RollAction = StartNew | RetireOld | AwaitRestart | EndRoll


def decide(state: RollState) -> RollAction:
    """Returns the next action. Every action but `AwaitRestart` and `EndRoll` brings the roll closer to its end.

    `RetireOld` never leaves fewer than `state.least_serving` groups.
    """
    lacking = state.wanted - state.serving
    if lacking > 0:
        if state.restarting >= lacking:
            return AwaitRestart()
        return StartNew(lacking - state.restarting, spare=False)
    if lacking < 0 and state.old:
        return RetireOld(state.old[:-lacking], first=False)
    if not state.old:
        return EndRoll()
    if state.stopped:
        return EndRoll("the operator has stopped the roll")
    if (surge := min(state.max_surge, len(state.old), state.room)) > 0:
        return StartNew(surge, spare=True)
    if state.serving - 1 >= state.least_serving:
        return RetireOld(state.old[:1], first=True)
    return EndRoll(
        f"{state.old[0]} is the only {state.role} group, and "
        + ("no device is free for a second one" if state.max_surge else "--max-surge is 0")
        + ": add devices, or give --allow-pause, with which requests wait until its replacement serves"
    )
