"""Detects the end of ranks by pending `park` calls, one for each rank.

A rank's `park` call blocks until the rank fails, gets another owner, or its process ends. A call that only loses its
connection, because the network was cut, is repeated."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from disagg.cluster.group import Group
from disagg.cluster.pulses import Member
from disagg.cluster.ranks import CALL_TIMEOUT_S, Call, Ranks, UnavailableError
from disagg.core.ports import Clock

REPEAT_S = 0.2
"""Pause before a call that has lost its connection is repeated."""


class Ended(NamedTuple):
    """A rank whose `park` call has completed, with the reason."""

    group: Group
    rank: int
    why: str


class ParkedCalls:
    """The pending `park` calls of a cluster's ranks. Thread-safe."""

    def __init__(self, ranks: Ranks, token: str, clock: Clock = time.monotonic) -> None:
        """`token`: the token of the ranks' owner."""
        self._ranks, self._token, self._clock = ranks, token, clock
        self._lock = threading.Lock()
        self._members: dict[Call, Member] = {}
        self._again: dict[Member, float] = {}
        """Ranks whose call has lost its connection, with the time to repeat the call."""

    def add(self, groups: Sequence[Group]) -> None:
        """Starts a `park` call on every rank of `groups`."""
        with self._lock:
            for group in groups:
                for rank in range(len(group.actors)):
                    self._park((group, rank))

    def members(self) -> list[Member]:
        """Returns the ranks that have not ended."""
        with self._lock:
            return [*self._members.values(), *self._again]

    def drop(self, member: Member) -> bool:
        """Drops a rank; returns False if the rank has ended."""
        with self._lock:
            calls = [call for call, one in self._members.items() if one == member]
            for call in calls:
                del self._members[call]
            waited = self._again.pop(member, None) is not None
        return bool(calls) or waited

    def clear(self) -> None:
        """Drops every rank."""
        with self._lock:
            self._members.clear()
            self._again.clear()

    def ended(self, timeout_s: float) -> list[Ended] | None:
        """Waits at most `timeout_s` for ranks to end, and returns the ended ranks; None if Ray has stopped."""
        with self._lock:
            self._repeat()
            pending = list(self._members)
        if not pending:
            time.sleep(timeout_s)
            return []
        ended = self._ranks.ended(pending, timeout_s)
        if ended is None:
            return None
        found = []
        for call in ended:
            why = self._why(call)
            with self._lock:
                if (member := self._members.pop(call, None)) is None:
                    continue  # dropped
                if why is None:
                    self._again[member] = self._clock() + REPEAT_S
                else:
                    found.append(Ended(*member, why))
        return found

    def _park(self, member: Member) -> None:
        group, rank = member
        self._members[group.actors[rank].park.remote(self._token)] = member

    def _repeat(self) -> None:
        """Repeats calls that have lost their connections. If the process is dead, the new call reports the death."""
        now_s = self._clock()
        for member in [member for member, due_s in self._again.items() if now_s >= due_s]:
            self._park(member)
            del self._again[member]  # last: a call that cannot be made is tried again

    def _why(self, call: Call) -> str | None:
        """Returns the reason for the end of a call: its result, or its exception; None if only its connection is
        lost."""
        try:
            [why] = self._ranks.results([call], CALL_TIMEOUT_S)
            return why or "it stopped"
        except UnavailableError:
            return None
        except Exception as exc:  # noqa: BLE001 - no error of Ray may end the watcher thread
            return str(exc)
