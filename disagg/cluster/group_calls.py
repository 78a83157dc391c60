"""Calls to every living rank of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from disagg.cluster.group import Group
from disagg.cluster.ranks import CALL_TIMEOUT_S, Ranks
from disagg.node.ownership import Owner
from transport.keys.curve import KeySet
from transport.keys.ring import KeyRing

OWNER_TIMEOUT_S = 5.0
"""Timeout of the calls that check whether this process still owns a group's ranks."""


def alive(group: Group) -> list[Any]:
    """Returns the actors of the ranks that are not lost."""
    return [actor for rank, actor in enumerate(group.actors) if rank not in group.lost]


def call_all(ranks: Ranks, group: Group, method: str, *arguments: Any) -> list[Any]:
    """Calls `method` on each living rank; returns the results in rank order. Raises the error of a rank."""
    calls = [getattr(actor, method).remote(*arguments) for actor in alive(group)]
    return ranks.results(calls, CALL_TIMEOUT_S)


def stop_all(ranks: Ranks, group: Group, drain_timeout_s: float) -> None:
    """Stops the living ranks after a drain of at most `drain_timeout_s`. Ignores ranks that fail to stop."""
    calls = [actor.stop.remote(drain_timeout_s) for actor in alive(group)]
    with contextlib.suppress(Exception):  # the caller kills a rank that does not stop
        ranks.results(calls, drain_timeout_s + 10.0)


def inform_of_loss(groups: Iterable[Group], address: str) -> None:
    """Notifies every rank of the linked `groups` that the rank at `address` is dead. Never blocks."""
    for group in groups:
        for actor in alive(group) if group.info is not None else ():
            actor.peer_lost.remote(address)


def inform_of_groups(groups: Iterable[Group]) -> None:
    """Sends the descriptions of all running groups to the groups that share their host memory. Never blocks.

    Ranks remove a group when `inform_of_loss` reports its ranks as dead.
    """
    sharing = [
        group
        for group in groups
        if group.up and not group.lost and group.info is not None and group.info.shares_host_cache
    ]
    infos = [group.info for group in sharing]
    for group in sharing if len(sharing) > 1 else ():
        for actor in alive(group):
            actor.know_groups.remote(infos)


def another_owns(ranks: Ranks, groups: Iterable[Group], owner: Owner) -> bool:
    """Returns whether another launch owns a rank of `groups`. Another launch may adopt them while this process is
    paused."""
    for group in groups if owner.token else ():
        calls = [actor.pulse.remote(owner.token) for actor in alive(group)]
        with contextlib.suppress(Exception):  # a dead rank
            if False in ranks.results(calls, OWNER_TIMEOUT_S):
                return True
    return False


class SentKeys:
    """Sends changed keys to the ranks, because only this process reads the key file. Used by one thread."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._sent: dict[str, KeySet] = {}
        """Keys that were last sent to each group's ranks, by group name."""

    def first(self, name: str) -> KeySet:
        """Returns the keys with which the group `name` starts, and records them as sent."""
        self._sent[name] = self._keys.keys
        return self._sent[name]

    def forget(self, name: str) -> None:
        """Drops the record of a group that has ended; an unknown name has no effect."""
        self._sent.pop(name, None)

    def send(self, groups: Iterable[Group]) -> None:
        """Sends the current keys to the groups that do not have them yet. Never blocks."""
        keys = self._keys.keys
        for group in groups:
            if self._sent.get(group.name) != keys:
                self._sent[group.name] = keys
                for actor in alive(group):
                    actor.update_keys.remote(keys)
