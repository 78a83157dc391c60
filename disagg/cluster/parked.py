"""Detects the end of ranks by pending `park` calls, one for each rank.

A rank's `park` call blocks until the rank fails, gets another owner, or its process ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from disagg.cluster.group import Group
from disagg.cluster.pulses import Member
from disagg.cluster.ranks import CALL_TIMEOUT_S, Call, Ranks


class Ended(NamedTuple):
    """A rank whose `park` call has completed, with the reason."""

    group: Group
    rank: int
    why: str


class ParkedCalls:
    """The pending `park` calls of a cluster's ranks. Thread-safe."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._lock = ranks, threading.Lock()
        self._members: dict[Call, Member] = {}

    def add(self, groups: Sequence[Group], token: str) -> None:
        """Starts a `park` call on every rank of `groups`. `token` is the owner's token."""
        with self._lock:
            self._members |= {
                actor.park.remote(token): (group, rank)
                for group in groups
                for rank, actor in enumerate(group.actors)
            }

    def members(self) -> list[Member]:
        """Returns the ranks with a pending call."""
        with self._lock:
            return list(self._members.values())

    def drop(self, member: Member) -> bool:
        """Drops the pending call of a rank; returns False if the rank had none."""
        with self._lock:
            calls = [call for call, one in self._members.items() if one == member]
            for call in calls:
                del self._members[call]
        return bool(calls)

    def clear(self) -> None:
        """Drops every call."""
        with self._lock:
            self._members.clear()

    def ended(self, timeout_s: float) -> list[Ended] | None:
        """Waits at most `timeout_s` for ranks to end, and returns the ended ranks; None if Ray has stopped."""
        with self._lock:
            pending = list(self._members)
        ended = self._ranks.ended(pending, timeout_s)
        if ended is None:
            return None
        found = []
        for call in ended:
            with self._lock:
                member = self._members.pop(call, None)
            if member is not None:
                found.append(Ended(*member, self._why(call)))
        return found

    def _why(self, call: Call) -> str:
        """Returns the reason for the end of a call: its result, or its exception."""
        try:
            [why] = self._ranks.results([call], CALL_TIMEOUT_S)
            return why or "it stopped"
        except Exception as exc:  # noqa: BLE001 - no error of Ray may end the watcher thread
            return str(exc)
