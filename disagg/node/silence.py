"""Which peers of which linked groups are silent. Books only: what follows from them is `disagg.node.rank`'s.

A peer that falls silent may be dead, or behind a broken network. The cluster says when it is dead; until then it is
listened for, and when all peers of its group are heard again, the groups are linked again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from disagg.core.types import GroupInfo


@dataclass(frozen=True, slots=True)
class _Linked:
    group: GroupInfo
    peers: frozenset[str]
    """Control addresses of those of its ranks that this rank speaks to."""


class Silences:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._linked: dict[str, _Linked] = {}
        self._silent: set[str] = set()

    def linked(self, group: GroupInfo, peers: Iterable[str]) -> None:
        """`group` is linked, through these of its ranks."""
        with self._lock:
            self._linked[group.name] = _Linked(group, frozenset(peers))

    def speaks_to(self, peer: str) -> bool:
        """Whether it is a rank of a linked group."""
        with self._lock:
            return any(peer in linked.peers for linked in self._linked.values())

    def fell_silent(self, peer: str) -> bool:
        """True for the first time since it was heard."""
        with self._lock:
            first = peer not in self._silent
            self._silent.add(peer)
            return first

    def heard(self, peer: str) -> list[GroupInfo]:
        """It is there again: the groups of which nobody is silent any more. None if it was not silent."""
        with self._lock:
            if peer not in self._silent:
                return []
            self._silent.discard(peer)
            return [
                linked.group
                for linked in self._linked.values()
                if peer in linked.peers and linked.peers.isdisjoint(self._silent)
            ]

    def dead(self, peer: str) -> None:
        """It will never be heard again, and its group goes with it."""
        with self._lock:
            self._silent.discard(peer)
            for name, linked in list(self._linked.items()):
                if peer in {rank.control_address for rank in linked.group.ranks}:
                    del self._linked[name]
