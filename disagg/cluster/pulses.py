"""Detects ranks that hang: the process exists but is stopped, or never releases the interpreter lock.

Each rank gets a small call (a *pulse*) at regular intervals, at most one at a time. Any reply, even an error, proves
that the rank does not hang. `disagg.cluster.parked` detects dead ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from disagg.cluster.group import Group
from disagg.cluster.ranks import Call, Ranks
from disagg.core.ports import Clock
from disagg.node.ownership import NO_COUNTS

PER_TIMEOUT = 5
"""Number of pulses that a rank gets per `hang_timeout_s`."""
PAUSE_S = 2.0
"""Longest normal gap between two checks. After a longer gap this process was itself paused and could not read
replies, so outstanding pulses get that much more time."""

Member = tuple[Group, int]
"""A group and the number of a rank in it."""


@dataclass(slots=True)
class _Pulse:
    call: Call
    sent_s: float
    answered: bool = False


class Pulses:
    """Sends pulses to ranks, and finds ranks that do not reply in time. Used by one thread."""

    def __init__(
        self, ranks: Ranks, hang_timeout_s: float, clock: Clock = time.monotonic, token: str = ""
    ) -> None:
        """`token`: the token of this launch if the groups can outlive this process; else empty."""
        self._ranks, self._hang_timeout_s, self._clock = ranks, hang_timeout_s, clock
        self._token = token
        self.counts = NO_COUNTS
        """Numbers of groups that an operator has set. Each pulse carries these numbers, and the ranks keep them for a
        launch that adopts the groups."""
        self._pulses: dict[Member, _Pulse] = {}
        self._looked_s = self._renewed_s = clock()

    def renew(self, starting: Iterable[Group]) -> None:
        """Sends pulses to starting ranks when due, to renew the ownership. Ignores the replies, which may be late."""
        now_s = self._clock()
        if not self._token or now_s < self._renewed_s + self._hang_timeout_s / PER_TIMEOUT:
            return
        self._renewed_s = now_s
        for group in starting:
            for actor in group.actors:
                actor.pulse.remote(self._token, self.counts)

    def silent(self, members: Iterable[Member]) -> list[Member]:
        """Sends pulses to `members` when due; returns members without a reply for `hang_timeout_s`. Never blocks."""
        now_s = self._clock()
        self._pardon(now_s)
        members = dict.fromkeys(members)
        self._pulses = {member: pulse for member, pulse in self._pulses.items() if member in members}
        waiting = {pulse.call: pulse for pulse in self._pulses.values() if not pulse.answered}
        for call in (self._ranks.ended(list(waiting), 0.0) or ()) if waiting else ():
            waiting[call].answered = True
        for group, rank in members:
            pulse = self._pulses.get((group, rank))
            if pulse is None or (
                pulse.answered and now_s >= pulse.sent_s + self._hang_timeout_s / PER_TIMEOUT
            ):
                self._pulses[group, rank] = _Pulse(
                    group.actors[rank].pulse.remote(self._token, self.counts), now_s
                )
        return [
            member
            for member, pulse in self._pulses.items()
            if not pulse.answered and now_s - pulse.sent_s > self._hang_timeout_s
        ]

    def _pardon(self, now_s: float) -> None:
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if gap_s > PAUSE_S:
            for pulse in self._pulses.values():
                pulse.sent_s += gap_s
