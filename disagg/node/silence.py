"""Records which peers of linked groups are silent. `disagg.node.mending` updates the record and acts on it.

A silent peer may be dead or cut off by the network. The rank keeps watching the peer until the cluster reports the
peer's death. When no peer of a group is silent any more, this rank links with that group again.
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
    """Control addresses of the ranks that this rank exchanges messages with."""


class Silences:
    """Linked groups and their silent peers. Thread-safe: any thread can report a death."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._linked: dict[str, _Linked] = {}
        self._silent: set[str] = set()

    def linked(self, group: GroupInfo, peers: Iterable[str]) -> None:
        """Adds a linked group; `peers` are the addresses that this rank exchanges messages with."""
        with self._lock:
            self._linked[group.name] = _Linked(group, frozenset(peers))

    def is_linked(self, peer: str) -> bool:
        """Returns whether this rank exchanges messages with `peer` as a rank of a linked group."""
        with self._lock:
            return any(peer in linked.peers for linked in self._linked.values())

    @property
    def silent(self) -> frozenset[str]:
        """Peers that are silent now."""
        with self._lock:
            return frozenset(self._silent)

    def mark_silent(self, peer: str) -> bool:
        """Marks `peer` as silent; returns False if it was marked already."""
        with self._lock:
            first = peer not in self._silent
            self._silent.add(peer)
            return first

    def mark_met(self, peer: str) -> list[GroupInfo]:
        """Marks `peer` as not silent; returns its groups that now have no silent peer, to link them again.

        Returns no group if `peer` was not silent.
        """
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
        """Removes the linked group of a dead peer."""
        with self._lock:
            self._silent.discard(peer)
            for name, linked in list(self._linked.items()):
                if peer in {rank.control_address for rank in linked.group.ranks}:
                    del self._linked[name]
