"""Detects ranks that hang: the process exists but is stopped, or never releases the interpreter lock.

Each rank gets a small call (a *pulse*) at regular intervals, at most one at a time. Any reply, even an error, proves
that the rank does not hang; a lost connection is no reply. A rank whose host cannot be reached may only be cut off,
and gets more time:

| network | time without a reply after which the rank counts as silent |
|---|---|
| works | `hang_timeout_s` |
| cut | `CUT_TIMEOUTS` times `hang_timeout_s`, because the host may be dead |
| cut, and another group starts | `hang_timeout_s`, because the new group must be linked with this one |
| works again after a cut | `hang_timeout_s` plus twice the duration of the cut, because TCP repeats late |

`disagg.cluster.parked` detects dead ranks.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from dataclasses import dataclass

import structlog

from disagg.cluster.group import Group
from disagg.cluster.host_reach import HostReach
from disagg.cluster.ranks import Call, Ranks, UnavailableError
from disagg.core.ports import Clock
from disagg.node.ownership import NO_COUNTS

log = structlog.get_logger(__name__)

PER_TIMEOUT = 5
"""Number of pulses that a rank gets per `hang_timeout_s`."""
PAUSE_S = 2.0
"""Longest normal gap between two checks. After a longer gap this process was itself paused and could not read
replies, so outstanding pulses get that much more time."""

CUT_TIMEOUTS = 5
"""Largest number of `hang_timeout_s` for which a rank on an unreachable host is kept."""
DOUBT_SHARE = 0.4
"""Share of `hang_timeout_s` after which a rank without a reply is checked for a reachable host."""

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
        self._hosts: dict[Member, HostReach] = {}
        self.cut_off: frozenset[Group] = frozenset()
        """Groups with a rank that does not reply and whose host cannot be reached. Any thread may read it."""
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

    def silent(
        self, members: Iterable[Member], needed: Container[Group] = ()
    ) -> list[tuple[Group, int, str]]:
        """Sends pulses to `members` when due; returns silent members, each with the reason. Never blocks.

        `needed`: groups that the start of another group waits for. They get no more time if they are cut off.
        """
        now_s = self._clock()
        self._pardon(now_s)
        members = dict.fromkeys(members)
        self._pulses = {member: pulse for member, pulse in self._pulses.items() if member in members}
        self._take_replies()
        for member in members:
            pulse = self._pulses.get(member)
            if pulse is None or (
                pulse.answered and now_s >= pulse.sent_s + self._hang_timeout_s / PER_TIMEOUT
            ):
                self._pulses[member] = _Pulse(self._send(member), now_s)
        self._look_at_hosts(now_s)
        self.cut_off = frozenset(
            member[0]
            for member, pulse in self._pulses.items()
            if not (pulse.answered or self._hosts[member].reached)
        )
        found = ((member, self._why_silent(member, now_s, member[0] in needed)) for member in self._pulses)
        return [(group, rank, why) for (group, rank), why in found if why]

    def _send(self, member: Member) -> Call:
        group, rank = member
        return group.actors[rank].pulse.remote(self._token, self.counts)

    def _take_replies(self) -> None:
        waiting = {pulse.call: member for member, pulse in self._pulses.items() if not pulse.answered}
        for call in (self._ranks.ended(list(waiting), 0.0) or ()) if waiting else ():
            pulse = self._pulses[waiting[call]]
            try:
                self._ranks.results([call], 0.0)
            except UnavailableError:
                pulse.call = self._send(waiting[call])
                continue
            except Exception:  # the rank has replied, or is dead, which `park` reports
                log.debug("pulse_failed", exc_info=True)
            pulse.answered = True

    def _look_at_hosts(self, now_s: float) -> None:
        """Checks the hosts of ranks whose reply is late, and once the host of each rank that replies."""
        for member in [member for member in self._hosts if member not in self._pulses]:
            self._hosts.pop(member).close()
        for (group, rank), pulse in self._pulses.items():
            if (host := self._hosts.get((group, rank))) is None:
                host = self._hosts[group, rank] = HostReach(group.started[rank].info.control_address)
            if pulse.answered:
                host.reset()
                host.prove(now_s)
            elif host.proven and now_s >= pulse.sent_s + DOUBT_SHARE * self._hang_timeout_s:
                known = host.failed_s is not None
                host.look(now_s)
                if host.failed_s is not None and not known:
                    log.warning("rank_unreachable", group=group.name, rank=rank)

    def _why_silent(self, member: Member, now_s: float, needed: bool) -> str:
        """Returns why a rank counts as silent; empty if it does not."""
        pulse, host, timeout_s = self._pulses[member], self._hosts[member], self._hang_timeout_s
        longest_cut_s = CUT_TIMEOUTS * timeout_s
        if pulse.answered:
            return ""
        if not host.reached:
            limit_s, limit = longest_cut_s, f"{CUT_TIMEOUTS} times cluster.hang_timeout_s"
            if needed:
                limit_s, limit = timeout_s, "cluster.hang_timeout_s; a new group waits to be linked with it"
            cut_s = now_s - (pulse.sent_s if host.reached_s is None else host.reached_s)
            why = f"the host of rank {member[1]} cannot be reached for {limit_s:g} s ({limit})"
            return why if cut_s > limit_s else ""
        cut_s = 0.0 if host.failed_s is None else host.failed_s - pulse.sent_s
        limit_s = timeout_s + 2 * min(cut_s, longest_cut_s)  # on a bad network, attempts fail again and again
        why = f"rank {member[1]} has not answered for {timeout_s:g} s (cluster.hang_timeout_s)"
        return why if now_s - pulse.sent_s > limit_s else ""

    def close(self) -> None:
        """Ends pending connections. Idempotent."""
        for host in self._hosts.values():
            host.close()

    def _pardon(self, now_s: float) -> None:
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if gap_s > PAUSE_S:
            for member, pulse in self._pulses.items():
                pulse.sent_s += gap_s
                if member in self._hosts:
                    self._hosts[member].reset()  # attempts have failed because of the pause
